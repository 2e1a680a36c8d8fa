"""Time vectors of many texts, in int8 and in float, beside transformers in bf16, compiled, in the same run.

    python benchmarks/measure_embeddings.py all-minilm-l6-v2 bert-large --folder /tmp/measure

For each shape a random checkpoint is made in ``--folder``, and migrated by ``--recipe``, by default that of
``migrate``; those that an earlier run left there are taken as they are. ``--texts`` texts of 20 to 512 random tokens
are embedded ``--runs`` times by each, from lists of tokens; the best time counts, and that from NumPy arrays is printed
beside it. transformers gets the lists sorted by length, in padded batches of ``--batch`` texts, pads each batch to a
multiple of ``--padding`` tokens, and pools by the mean. ``--torch model`` compiles the model for each padded length,
``layers`` one layer for all of them, which takes seconds, and ``none`` leaves it out, as does an environment without
PyTorch or transformers. ``--trace TOKENS`` prints the device's time in one batch of that many tokens, by kernel.

A line of JSON is printed as soon as it is known, so that a time limit keeps the lines before it: of int8, of
transformers with how many times as fast int8 is, and of float. All embed the same texts. For a large model in a minute:

    python benchmarks/measure_embeddings.py bert-large --folder /tmp/measure --torch layers --texts 1024
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import make_random_checkpoint
import numpy as np

import bminf_lite
from bminf_lite.backend.values import Pooling
from bminf_lite.bench.model import read_shape
from bminf_lite.engine.pooling import PoolingQueue, PoolingText

SHORTEST, LONGEST = 20, 512


def random_texts(count: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Texts in tokens, their lengths evenly distributed."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(SHORTEST, LONGEST + 1, count)
    return [rng.integers(1000, min(vocab_size, 30000), n).tolist() for n in lengths]


def best_seconds(work: Callable[[], Any], runs: int) -> float:
    """The shortest time of some runs, after one that prepares."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def our_seconds(folder: Path, texts: list[list[int]], arguments: argparse.Namespace) -> tuple[float, float, np.ndarray]:
    """The times of :meth:`bminf_lite.Model.embed` from lists and from arrays, and the vectors."""
    arrays = [np.array(ids, np.int32) for ids in texts]
    vectors: list[np.ndarray] = []
    with bminf_lite.load(folder, device=arguments.device) as model:

        def embed(given: Sequence[Any]) -> None:
            vectors[:] = [model.embed(given)]

        seconds = [best_seconds(lambda given=given: embed(given), arguments.runs) for given in (texts, arrays)]
        if arguments.trace:
            model.engine.call(lambda: print_trace(model, texts, arguments.trace))
        return seconds[0], seconds[1], vectors[0]


def print_trace(model: bminf_lite.Model, texts: list[list[int]], tokens: int) -> None:
    """Print the device's time in one batch of the first texts, by kernel. Called in the engine's thread."""
    from bminf_lite.bench.cuda import CudaProfiler

    count = int(np.searchsorted(np.cumsum([len(ids) for ids in texts]), tokens, side="right"))
    chosen = [PoolingText(ids) for ids in texts[:count]]
    queue = PoolingQueue(model.network, tokens, count)
    times: dict[str, list[float]] = defaultdict(list)
    for span in CudaProfiler(model.ops).trace(lambda: queue._compute(chosen, (Pooling.MEAN,))):
        times[span.name].append(span.seconds)
    total = sum(map(sum, times.values()))
    print(f"{model}: {count} texts, {sum(len(t.token_ids) for t in chosen):,} tokens, {total * 1e3:.2f} ms of kernels")
    for name, own in sorted(times.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(own) * 1e6:10.0f} us {len(own):4} x {sum(own) / len(own) * 1e6:8.1f} us  {name}")


def make_models(shape: str, arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The folders of the random model and of its migration, which are made if they are not there."""
    name = Path(shape).stem
    source, int8 = arguments.folder / name, arguments.folder / f"{name}-{arguments.recipe or 'default'}"
    if not source.exists():
        make_random_checkpoint.make(source, shape)
    if not int8.exists():
        bminf_lite.migrate(source, int8, arguments.recipe)
    return source, int8


def torch_seconds(folder: Path, texts: list[list[int]], arguments: argparse.Namespace) -> tuple[float, np.ndarray]:
    """The time of transformers' compiled model in bf16, and the vectors."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").cuda().eval()
    batch, padding = arguments.batch, arguments.padding
    compiled = model
    if arguments.torch == "layers":
        for layer in model.encoder.layer:
            layer.compile(dynamic=True)
    else:
        compiled = torch.compile(model, dynamic=False)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors = np.zeros((len(texts), model.config.hidden_size), np.float32)

    def embed() -> None:
        waiting = []
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            width = -(-max(len(texts[i]) for i in chosen) // padding) * padding
            ids = torch.zeros((batch, width), dtype=torch.long)
            mask = torch.zeros((batch, width), dtype=torch.long)
            for row, i in enumerate(chosen):
                ids[row, : len(texts[i])] = torch.tensor(texts[i])
                mask[row, : len(texts[i])] = 1
            mask[len(chosen) :, 0] = 1
            ids, mask = ids.cuda(non_blocking=True), mask.cuda(non_blocking=True)
            with torch.inference_mode():
                hidden = compiled(input_ids=ids, attention_mask=mask).last_hidden_state.float()
                sums = (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
                waiting.append((chosen, torch.nn.functional.normalize(sums, dim=1)))
        for chosen, rows in waiting:
            vectors[chosen] = rows.cpu().numpy()[: len(chosen)]

    return best_seconds(embed, arguments.runs), vectors


def measure(shape: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The times of one shape, in seconds, and tokens per second: what each side adds, when it is known."""
    source, int8 = make_models(shape, arguments)
    texts = random_texts(arguments.texts, int(read_shape(shape)["vocab_size"]))
    tokens = sum(map(len, texts))
    shared = {"shape": source.name, "texts": len(texts), "tokens": tokens}
    vectors: dict[str, np.ndarray] = {}
    times: dict[str, float] = {}

    def ours(kind: str, folder: Path) -> dict[str, Any]:
        seconds, from_arrays, vectors[kind] = our_seconds(folder, texts, arguments)
        times[kind] = seconds
        return shared | {
            f"{kind}_seconds": seconds,
            f"{kind}_seconds_from_arrays": from_arrays,
            f"{kind}_tokens_per_second": round(tokens / seconds),
        }

    yield ours("int8", int8)
    has_torch = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
    if has_torch and arguments.torch != "none":
        times["torch"], vectors["torch"] = torch_seconds(source, texts, arguments)
        yield shared | {
            "torch_seconds": times["torch"],
            "int8_times_as_fast": times["torch"] / times["int8"],
            "int8_least_cosine_with_torch": least_cosine(vectors["int8"], vectors["torch"]),
        }
    found = ours("float", source)
    found["int8_least_cosine"] = least_cosine(vectors["int8"], vectors["float"])
    if "torch" in times:
        found["float_times_as_fast"] = times["torch"] / times["float"]
        found["float_least_cosine_with_torch"] = least_cosine(vectors["float"], vectors["torch"])
    yield found


def least_cosine(one: np.ndarray, other: np.ndarray) -> float:
    """The least cosine of vectors of length 1 of the same texts."""
    return float((one * other).sum(axis=1).min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", help="names as in bench --shape")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--recipe", help="of migrate; the default is its own")
    parser.add_argument("--torch", choices=("model", "layers", "none"), default="model")
    parser.add_argument("--padding", type=int, default=32)
    parser.add_argument("--trace", type=int, metavar="TOKENS")
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        for found in measure(shape, arguments):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
