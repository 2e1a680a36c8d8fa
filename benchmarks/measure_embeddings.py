"""Time vectors of many texts, in int8 and in float, beside transformers in bf16, compiled, in the same run.

    python benchmarks/measure_embeddings.py all-minilm-l6-v2 bert-large --folder /tmp/measure

For each shape a random checkpoint is made in ``--folder``, and migrated by the default recipe. ``--texts`` texts of 20
to 512 random tokens are embedded ``--runs`` times by each; the best time counts. transformers gets the texts sorted by
length, in padded batches of ``--batch`` texts, pads each batch to a multiple of 32 tokens, and pools by the mean. It
needs PyTorch and transformers; without them, or with ``--without-torch``, our times are printed alone. The folder is
removed at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_random_checkpoint
import numpy as np

import bminf_lite
from bminf_lite.bench.model import read_shape

SHORTEST, LONGEST, PADDING = 20, 512, 32


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


def our_seconds(folder: Path, texts: list[list[int]], device: str, runs: int) -> tuple[float, np.ndarray]:
    """The time of :meth:`bminf_lite.Model.embed`, and the vectors."""
    with bminf_lite.load(folder, device=device) as model:
        return best_seconds(lambda: model.embed(texts), runs), model.embed(texts)


def torch_seconds(folder: Path, texts: list[list[int]], batch: int, runs: int) -> tuple[float, np.ndarray]:
    """The time of transformers' compiled model in bf16, and the vectors."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").cuda().eval()
    compiled = torch.compile(model, dynamic=False)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors = np.zeros((len(texts), model.config.hidden_size), np.float32)

    def embed() -> None:
        waiting = []
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            width = -(-max(len(texts[i]) for i in chosen) // PADDING) * PADDING
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

    return best_seconds(embed, runs), vectors


def measure(shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The times of one shape, in seconds, and tokens per second."""
    name = Path(shape).stem
    source, int8 = arguments.folder / name, arguments.folder / f"{name}-int8"
    make_random_checkpoint.make(source, shape)
    bminf_lite.migrate(source, int8)
    texts = random_texts(arguments.texts, int(read_shape(shape)["vocab_size"]))
    tokens = sum(map(len, texts))
    found: dict[str, Any] = {"shape": name, "texts": len(texts), "tokens": tokens}
    rows = {}
    for kind, folder in (("int8", int8), ("float", source)):
        found[f"{kind}_seconds"], rows[kind] = our_seconds(folder, texts, arguments.device, arguments.runs)
        found[f"{kind}_tokens_per_second"] = round(tokens / found[f"{kind}_seconds"])
    found["int8_least_cosine"] = float((rows["int8"] * rows["float"]).sum(axis=1).min())
    has_torch = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
    if has_torch and not arguments.without_torch:
        found["torch_seconds"], expected = torch_seconds(source, texts, arguments.batch, arguments.runs)
        found["float_least_cosine_with_torch"] = float((rows["float"] * expected).sum(axis=1).min())
        for kind in ("int8", "float"):
            found[f"{kind}_times_as_fast"] = found["torch_seconds"] / found[f"{kind}_seconds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", help="names as in bench --shape")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--without-torch", action="store_true")
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        try:
            print(json.dumps(measure(shape, arguments)), flush=True)
        finally:
            for name in (Path(shape).stem, f"{Path(shape).stem}-int8"):
                shutil.rmtree(arguments.folder / name, ignore_errors=True)


if __name__ == "__main__":
    main()
