"""Time the layers that keep a state or latent rows: alone, kernel by kernel, and in the prompt of a whole model.

    python benchmarks/measure_states.py alone latent
    python benchmarks/measure_states.py model --shapes qwen3.6-27b --tokens 2048

``alone`` runs gated DeltaNet and Mamba 2 behind their first products, at the sizes of Qwen3.6-27B, Nemotron 3 Nano and
Falcon-H1 7B: a prompt of 2,048 tokens and eight of 256, and one token of 1, 8 and 64 sequences in a graph of layers
with states of their own, whose bytes exceed the GPU's cache. The time of a prompt is that of each kernel by the GPU's
events. ``latent`` runs attention to latent rows: with 20 and 128 heads, one token of 64 sequences behind 4,096 tokens,
and with 20 one token of one sequence behind 512 and 4,096, and a prompt. ``model``
runs whole models of random weights, a prompt and a step behind 512 tokens, and adds up the time of their kernels by
name.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bminf_lite.backend import create
from bminf_lite.backend.base import Backend
from bminf_lite.backend.cache_values import StateCache
from bminf_lite.backend.chunked_state import CHUNK, state_arrays
from bminf_lite.backend.values import (
    DeltaNetSpec,
    ForwardBatch,
    GatedNorm,
    LatentSpec,
    Mamba2Spec,
    Norm,
    Rope,
    ShortConvolution,
    sequential_tables,
)
from bminf_lite.bench.profiler import Profiler, Span
from bminf_lite.bench.runner import make_profiler
from bminf_lite.layers.cache import Latent, State

TAPS = 4
PROMPT = 2048
DEPTH, STEPS = 512, 32
"""Tokens before a decoded one of a model, and steps that are timed together."""
LEAST_BYTES = 256 << 20
"""Bytes of the states of all layers of a graph, which exceed the GPU's cache."""
DELTA_NET = {"Qwen3.6-27B": (16, 48, 128, 128)}
"""Key heads, value heads, and elements of keys and of values."""
MAMBA2 = {"Nemotron-3-Nano": (8, 64, 64, 128), "Falcon-H1-7B": (1, 24, 128, 256)}
"""Groups, heads, and elements of a head and of B."""


@dataclass(frozen=True)
class Sizes:
    """A layer's: ``is_delta_net``, or else Mamba 2, whose groups are the key heads and whose B and C are the keys."""

    is_delta_net: bool
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def state_bytes(self) -> int:
        """Of a sequence."""
        return 4 * self.values * self.key_dim

    @property
    def decoded_bytes(self) -> float:
        """Bytes that one token must move: the state, and of ``CHUNK`` tokens one writes it; half a chunk's rows."""
        rows = 4 * CHUNK / 2 * (self.key_heads * self.key_dim + self.values + self.value_heads)
        return self.state_bytes * (1 + 1 / CHUNK) + rows + 8 * self.channels

    @property
    def operations(self) -> int:
        """Multiplications and additions of a token with the state, which it reads by one vector or two and advances."""
        return 2 * (3 if self.is_delta_net else 2) * self.values * self.key_dim


class Layers:
    """Layers of some sizes with random inputs of ``tokens`` tokens of each of ``sequences`` sequences."""

    def __init__(self, ops: Backend, sizes: Sizes, count: int, sequences: int, tokens: int, start: int):
        rng = np.random.default_rng(0)
        self.ops, self.sizes = ops, sizes
        heads = sizes.value_heads
        convolution = ShortConvolution(rng.standard_normal((TAPS, sizes.channels)).astype(np.float32))
        rates = -np.exp(rng.uniform(-3, 2, heads)).astype(np.float32)
        bias = rng.standard_normal(heads).astype(np.float32)
        width = sizes.channels + sizes.values + (0 if sizes.is_delta_net else heads)
        self.rows = ops.array(rng.standard_normal((sequences * tokens, width)).astype(ops.activation_dtype))
        self.gates = ops.array(rng.standard_normal((sequences * tokens, 2 * heads)).astype(np.float32))
        order = sizes.key_heads, heads, sizes.key_dim, sizes.value_dim
        if sizes.is_delta_net:
            norm = Norm(np.ones(sizes.value_dim, np.float32), 1e-6)
            self.spec: Any = ops.delta_net_spec(DeltaNetSpec(*order, convolution, rates, bias, norm))
        else:
            order_of_mamba = sizes.key_heads, heads, sizes.value_dim, sizes.key_dim
            of_norm = GatedNorm(Norm(np.ones(sizes.values, np.float32), 1e-5), sizes.key_heads, False)
            spec = Mamba2Spec(*order_of_mamba, convolution, rates, bias, bias, (0.0, float("inf")), of_norm)
            self.spec = ops.mamba2_spec(spec)
        layout = State(state_arrays(*order, sizes.channels, TAPS, corrects=sizes.is_delta_net))
        self.caches: list[StateCache] = [layout.make(ops, sequences + 1, None) for _ in range(count)]
        for cache in self.caches:
            for array in cache.arrays:
                ops.assign(array, np.zeros(array.shape, array.dtype))
            ops.assign(cache["end"], np.full(cache["end"].shape, start // CHUNK * CHUNK, np.int32))
        slots = np.arange(1, sequences + 1, dtype=np.int32)[:, None]
        self.batch = ForwardBatch.packed(ops.array, [np.zeros(tokens)] * sequences, [start] * sequences, [slots])

    def run(self, i: int) -> None:
        cache = self.caches[i % len(self.caches)]
        if self.sizes.is_delta_net:
            self.ops.gated_delta_net(self.rows, self.gates, self.spec, cache, self.batch)
        else:
            self.ops.mamba2(self.rows, self.spec, cache, self.batch)


def by_name(spans: Iterable[Span]) -> list[tuple[str, int, float]]:
    """Names of kernels without template arguments, their launches and seconds in all, the longest first."""
    launches: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        launches[span.name] += 1
        seconds[span.name] += span.seconds
    return sorted(((name, launches[name], seconds[name]) for name in seconds), key=lambda row: -row[2])


def print_spans(spans: list[Span], rows: int = 24) -> None:
    """The kernels of a step by name."""
    for name, count, seconds in by_name(spans)[:rows]:
        print(f"    {1e6 * seconds:10.1f} us  {count:5}  {name[:100]}")


def measure_alone(profiler: Profiler) -> None:
    """Gated DeltaNet and Mamba 2 without the products around them."""
    ops = profiler.ops
    cases = [(name, Sizes(True, *sizes)) for name, sizes in DELTA_NET.items()]
    cases += [(name, Sizes(False, g, h, n, d)) for name, (g, h, d, n) in MAMBA2.items()]
    for name, sizes in cases:
        for sequences in (1, 8):
            layers = Layers(ops, sizes, 1, sequences, PROMPT // sequences, 0)
            spans = profiler.trace(lambda layers=layers: layers.run(0))  # type: ignore[misc]
            seconds = sum(span.seconds for span in spans) or profiler.median_seconds(layers.run)
            rate = sizes.operations * PROMPT / seconds / 1e12
            print(f"{name}, {sequences} x {PROMPT // sequences} tokens: {1e6 * seconds:.1f} us, {rate:.1f} TFLOPS")
            print_spans(spans)
        for sequences in (1, 8, 64):
            count = max(2, -(-LEAST_BYTES // (sequences * sizes.state_bytes)))
            layers = Layers(ops, sizes, min(count, 80), sequences, 1, 24)
            seconds = profiler.median_seconds(layers.run)
            rate = sequences * sizes.decoded_bytes / seconds / 1e12
            print(f"{name}, one token of {sequences}: {1e6 * seconds:.2f} us, {rate:.2f} TB/s")
            if sequences != 8:
                print_spans(profiler.trace(lambda layers=layers: layers.run(0)))  # type: ignore[misc]


LATENT = ((20, 64, 1, 4096), (128, 64, 1, 4096), (20, 1, 1, 512), (20, 1, 1, 4096), (20, 1, PROMPT, 0))
"""Heads, sequences, and tokens of each and those behind which they are."""


def measure_latent(profiler: Profiler) -> None:
    """Attention to latent rows, without the products with the matrices of heads, and with them."""
    ops = profiler.ops
    for heads, sequences, tokens, behind in LATENT:
        rank, rotary, nope, value = 512, 64, 128, 128
        rng = np.random.default_rng(0)
        rope = Rope(ops.vector(1 / 100 ** (np.arange(rotary // 2) / (rotary // 2))), 1.0)
        norm = Norm(ops.vector(np.ones(rank)), 1e-6)
        spec = LatentSpec(heads, nope, rotary, value, rank, (nope + rotary) ** -0.5, norm, rope, None)
        matrix = (rng.standard_normal((heads * (nope + value), rank)) / rank**0.5).astype(np.float16)
        expand = ops.latent_weight(matrix, spec)
        tables = sequential_tables(sequences, behind + tokens)
        cache = Latent(rank, rotary, False).make(ops, 1 + sequences * tables.shape[1], None)
        for array in cache.arrays:
            block = rng.standard_normal(array.shape[1:]).astype(array.dtype)
            for b in range(len(array)):
                ops.assign(array[b], block)
        batch = ForwardBatch.packed(ops.array, [np.zeros(tokens)] * sequences, [behind] * sequences, [tables])
        q = ops.array(rng.standard_normal((sequences * tokens, spec.query_features)).astype(ops.activation_dtype))
        kv = ops.array(rng.standard_normal((sequences * tokens, rank + rotary)).astype(np.float32))

        def run(_: int = 0) -> None:
            ops.latent_attention(q, kv, spec, expand, cache, batch)  # noqa: B023

        spans = profiler.trace(run)
        whole = profiler.median_seconds(run)
        own = [
            span.seconds
            for span in spans
            if span.name.startswith(("latent_attention", "latent_merge", "latent_few", "latent_hopper"))
        ]
        seconds = sum(own) or whole
        nbytes, operations = (
            sequences * (behind + tokens) * 2 * (rank + rotary),
            2 * sequences * tokens * heads * (behind + tokens / 2) * (2 * rank + rotary),
        )
        print(
            f"{heads} heads, {sequences} sequences, {tokens} tokens behind {behind}: {1e6 * seconds:.1f} us alone "
            f"({nbytes / seconds / 1e12:.2f} TB/s, {operations / seconds / 1e12:.0f} TFLOPS); {1e6 * whole:.1f} us "
            "with the products of heads"
        )
        print_spans(spans)


def measure_model(profiler: Profiler, shapes: list[str], tokens: int, batches: Iterable[int]) -> None:
    """The kernels of a prompt of whole models, and of a step behind ``DEPTH`` tokens."""
    from bminf_lite.bench.model import random_model, read_shape
    from bminf_lite.bench.session import Session

    for shape in shapes:
        model = random_model(shape, read_shape(shape), profiler.ops, max_num_batched_tokens=max(tokens, 2048))
        with contextlib.closing(Session(model, 1, tokens + 8)) as session:
            work = session.prepare_prefill(tokens)
            work()
            whole = min(profiler.time(work)[0] for _ in range(3))
            spans = profiler.trace(work)
        alone = sum(span.seconds for span in spans)
        print(f"{shape}, a prompt of {tokens}: {1e3 * whole:.2f} ms; its {len(spans)} kernels {1e3 * alone:.2f} ms")
        print_spans(spans)
        for batch in batches:
            with contextlib.closing(Session(model, batch, DEPTH + STEPS + 8)) as session:
                session.fill_context(DEPTH)
                session.prepare_decode(DEPTH)
                session.decode(4)
                found = []
                for _ in range(3):
                    session.prepare_decode(DEPTH)
                    found.append(profiler.time(lambda session=session: session.decode(STEPS))[0] / STEPS)  # type: ignore[misc]
                session.prepare_decode(DEPTH)
                session.set_max_context_len(DEPTH + 2)
                spans = profiler.trace(session.decode_eagerly)
            alone = sum(span.seconds for span in spans)
            print(
                f"{shape}, a step of {batch} behind {DEPTH}: {1e3 * min(found):.3f} ms, {batch / min(found):.1f} "
                f"tokens/s; its {len(spans)} kernels {1e3 * alone:.3f} ms"
            )
            print_spans(spans)
            for span in spans[-60:]:
                print(f"        {1e6 * span.seconds:8.2f} us, {1e6 * span.gap:6.2f} to the next  {span.name[:90]}")
        del model, session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("alone", "latent", "model"))
    parser.add_argument("--shapes", default="qwen3.6-27b", help="of `model`, with commas: names as in bench --shape")
    parser.add_argument("--tokens", type=int, default=PROMPT, help="of `model`")
    parser.add_argument("--batches", default="1", help="sequences of a step of `model`, with commas")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    ops = create(arguments.device)
    profiler = make_profiler(ops)
    for part in arguments.parts:
        if part == "alone":
            measure_alone(profiler)
        elif part == "latent":
            measure_latent(profiler)
        else:
            batches = [int(batch) for batch in arguments.batches.split(",")]
            measure_model(profiler, arguments.shapes.split(","), arguments.tokens, batches)


if __name__ == "__main__":
    main()
