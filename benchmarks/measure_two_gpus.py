"""Check a model that is divided among GPUs, bit for bit, and measure it beside the model on one GPU.

    python benchmarks/measure_two_gpus.py [--gpus 2] [--shapes llama-3-8b,llama-3-70b] [--parts sums,bits,speed]

Every part prints lines of JSON as soon as it knows them, and an error of one part is a line too:

- ``sums``: sums over the GPUs in one shot, in two shots and through the host's memory equal the sum in the order of the
  ranks; microseconds of a sum in a captured step;
- ``bits``: a small model with random weights has the same logits on GPUs that reach each other's memory, on GPUs that
  meet in the host's, and on ranks that share one GPU; the largest difference to ranks on the CPU is printed;
- ``speed``: tokens per second of one sequence and of several, and seconds of a prompt, with random weights, on one GPU
  and on several.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from bminf_lite import backend
from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.backend.communicator import RankThreads, simulated_ranks
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.bench.model import random_model, read_shape

SIZES = ((1, 4096), (1, 8192), (8, 8192), (32, 8192), (64, 8192), (256, 8192), (2048, 8192))
FEW_SIZES = SIZES[:4]
SUMS_OF_A_STEP, REPLAYS = 64, 20
SMALL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}
SHARED_LIMIT = 24 << 30
"""The memory of a rank where several share a GPU."""


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


@contextmanager
def reported(what: str) -> Iterator[None]:
    """An error becomes a line, so that what follows is still measured."""
    try:
        yield
    except Exception as error:
        say(failed=what, error=repr(error)[:2000], where=traceback.format_exc()[-1500:])


def backends_on(devices: Sequence[int], most: int, through_host: bool = False) -> list[Backend]:
    """Backends that are the ranks of a model, several of which may share a GPU; one alone is no rank."""
    from bminf_lite.backend.cuda.backend import CudaBackend
    from bminf_lite.backend.cuda.peers import connect

    backends = [CudaBackend(device, None if len(set(devices)) == len(devices) else SHARED_LIMIT) for device in devices]
    if len(backends) > 1:
        connect(backends, most, through_host)
        backends[0].make_current()
    return list(backends)


class Ranks:
    """Backends that are ranks, and their threads."""

    def __init__(self, devices: Sequence[int], most: int, through_host: bool = False):
        self.name = f"{len(devices)} ranks on GPUs {devices}{', through the host' if through_host else ''}"
        self.backends = backends_on(devices, most, through_host)
        self.threads = RankThreads(
            [ops.communicator for ops in self.backends], [ops.make_current for ops in self.backends]
        )

    def run(self, work: Callable[[Any], Any]) -> list[Any]:
        """``work`` of each backend, all at once."""
        return self.threads.run(lambda rank: work(self.backends[rank]))

    def close(self) -> None:
        self.threads.close()
        backend.close_ranks(self.backends)


# -- sums --------------------------------------------------------------------------------------------------------------


def random_rows(rank: int, rows: int, n: int) -> np.ndarray:
    return np.random.default_rng(1000 * rank + rows).standard_normal((rows, n)).astype(np.float32)


def time_sums(ranks: Ranks, rows: int, n: int) -> None:
    """Check sums with and without a residual stream, eagerly and captured, and time the captured ones."""
    size, bias = len(ranks.backends), np.linspace(-1, 1, n, dtype=np.float32)
    total = random_rows(0, rows, n)
    for rank in range(1, size):
        total = total + random_rows(rank, rows, n)
    half, start = (total + bias).astype(np.float16), random_rows(size, rows, n)
    added = start
    for _ in range(SUMS_OF_A_STEP):
        added = added + half

    def work(ops: Any) -> tuple[bool, float]:
        batch = ForwardBatch(np.zeros(rows), np.array([0, rows]), np.zeros(1), (), 1, rows, rows)
        source, device_bias = ops.array(random_rows(ops.communicator.tp_rank, rows, n)), ops.vector(bias)
        residual = ops.array(start)

        def step() -> Any:
            with ops.step(batch):
                found = residual
                for _ in range(SUMS_OF_A_STEP):
                    found = ops.all_reduce_add(source, device_bias, found)
                return found

        with ops.step(batch):
            equal = np.array_equal(ops.host(ops.all_reduce_add(source)), total)
        captured = ops.capture(step)
        for _ in range(4):  # two runs, the capture, and a replay
            ops.assign(residual, start)
            equal = equal and np.array_equal(ops.host(captured()), added)
        seconds = []
        for _ in range(3):
            ops.complete(source)
            began = time.perf_counter()
            for _ in range(REPLAYS):
                last = captured()
            ops.complete(last)
            seconds.append((time.perf_counter() - began) / REPLAYS / SUMS_OF_A_STEP)
        return equal, min(seconds)

    found = ranks.run(work)
    microseconds = round(1e6 * max(seconds for _, seconds in found), 2)
    say(part="sums", ranks=ranks.name, rows=rows, n=n, equal=all(e for e, _ in found), microseconds=microseconds)


def sums(gpus: int) -> None:
    """Sums by all paths. Ranks that share a GPU take turns there, so their time says nothing."""
    together = list(range(gpus))
    for devices, through_host, sizes in (
        (together, False, SIZES),
        (together, True, FEW_SIZES),
        ([0] * gpus, False, SIZES[:2]),  # ranks that share a GPU may wait for each other's blocks for ever
    ):
        with reported(f"sums on {devices}"), closing(Ranks(devices, 2048 * 8192, through_host)) as ranks:
            for rows, n in sizes:
                with reported(f"{ranks.name}: {rows} x {n}"):
                    time_sums(ranks, rows, n)


# -- a model -----------------------------------------------------------------------------------------------------------


def tokens_of(seed: int, count: int, vocab: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


def opened(shape: dict[str, Any], backends: Sequence[Backend], max_batch: int) -> Model:
    """A model with random weights of a shape; closing it closes the backends."""
    try:
        made = random_model("random", shape, backends, max_batch=max_batch)
    except BaseException:
        backend.close_ranks(backends)
        raise
    return Model(made.networks, made.engine_config)


def outputs(model: Model) -> list[np.ndarray]:
    """Logits of prompts of several lengths, and tokens and log-probabilities of decoding sequences."""
    vocab = model.engine_config.vocab_size
    found = [model.logits(tokens_of(length, length, vocab)) for length in (1, 7, 130, 700, 2000)]
    prompts = [tokens_of(100 + i, 5 + 40 * i, vocab) for i in range(6)]
    for batch in (prompts[:1], prompts):
        for result in model.generate(batch, max_new_tokens=40, ignore_eos=True, logprobs=1):
            found += [np.array(result.token_ids), np.array(result.logprobs, np.float64)]
    return found


def bits(gpus: int) -> None:
    """Outputs of a small model are the same to the bit by all paths."""
    together, first = list(range(gpus)), None
    most = 2048 * SMALL["hidden_size"]  # type: ignore[operator]
    for devices, through_host in ((together, False), (together, True), ([0] * gpus, False)):
        name = f"{devices}{', through the host' if through_host else ''}"
        with reported(f"bits on {name}"), opened(SMALL, backends_on(devices, most, through_host), 8) as model:
            found = outputs(model)
            first = first or found
            equal = [bool(np.array_equal(one, other)) for one, other in zip(found, first, strict=True)]
            say(part="bits", ranks=name, equal_to_the_first=all(equal), outputs=len(equal), unequal=equal.count(False))
    with reported("bits on the CPU"):
        cpus = [backend.create("cpu") for _ in range(gpus)]
        for ops, rank in zip(cpus, simulated_ranks(gpus), strict=True):
            ops.communicator = rank
        with opened(SMALL, cpus, 8) as model:
            expected = model.logits(tokens_of(130, 130, model.engine_config.vocab_size))
        assert first is not None
        error = float(np.abs(first[2] - expected).max() / np.abs(expected).max())
        say(part="bits", ranks="CPU", largest_difference_of_largest_logit=error)


def speed(gpus: int, shapes: Sequence[str], sequences: int, prompt: int, new: int) -> None:
    """One GPU beside several: one sequence, several, and a prompt."""
    for name in shapes:
        shape = read_shape(name)
        for count in (1, gpus):
            with reported(f"{name} on {count} GPUs"):
                began = time.perf_counter()
                backends = backends_on(list(range(count)), 2048 * shape["hidden_size"])
                with opened(shape, backends, sequences) as model:
                    say(part="speed", shape=name, gpus=count, load_seconds=round(time.perf_counter() - began, 1))
                    for _ in range(2):  # the first run compiles and captures
                        say(part="speed", shape=name, gpus=count, **decoding(model, 1, new))
                    for _ in range(2):
                        say(part="speed", shape=name, gpus=count, **decoding(model, sequences, new // 2))
                    seconds = [prompt_seconds(model, prompt, seed) for seed in range(6)]
                    say(part="speed", shape=name, gpus=count, prompt=prompt, seconds=round(min(seconds[2:]), 5))


def decoding(model: Model, sequences: int, new: int) -> dict[str, Any]:
    """Tokens per second of sequences that decode together, from the last first token to the first last one."""
    vocab = model.engine_config.vocab_size
    prompts = [tokens_of(i, 64, vocab) for i in range(sequences)]
    times: list[list[float]] = [[] for _ in prompts]
    for piece in model.stream(prompts, max_new_tokens=new, ignore_eos=True):
        times[piece.index].append(time.perf_counter())
    start, end = max(own[0] for own in times), min(own[-1] for own in times)
    tokens = sum(sum(start < moment <= end for moment in own) for own in times)
    return {"sequences": sequences, "tokens_per_second": round(tokens / (end - start), 1)}


def prompt_seconds(model: Model, count: int, seed: int) -> float:
    tokens = tokens_of(1000 + seed, count, model.engine_config.vocab_size)
    began = time.perf_counter()
    model.generate([tokens], max_new_tokens=1, ignore_eos=True)
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--shapes", default="llama-3-8b,llama-3-70b")
    parser.add_argument("--parts", default="sums,bits,speed")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=256)
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if "sums" in parts:
        sums(options.gpus)
    if "bits" in parts:
        bits(options.gpus)
    if "speed" in parts:
        speed(options.gpus, options.shapes.split(","), options.sequences, options.prompt, options.new)


if __name__ == "__main__":
    main()
