"""Time the kernels of mixtures of experts alone, at the sizes of models: layers of experts one behind another.

    python benchmarks/experts.py [-o FILE] [--shapes NAME,...] [--tokens 1,16,...] [--parts]

Weights, tokens and router are random, so the routing is balanced: each expert is as likely as another. The table says
how many different experts a step reached and how many tokens the most chosen one had, next to its fair share. A layer
is everything from the residual stream to the residual stream: norm, router, choice, both products, and the sum.

The time of a layer is that of a graph of all layers, whose weights exceed the L2 cache, over their number; the median
of replays. GB/s are of the bytes that must be read: the router and each expert that some token chose, once. The share
is that of the read bandwidth, which is measured too. Prompts are bound by the tensor cores rather than by memory: for
them the table has the operations per second of both products. --parts times each kernel in a graph of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

from bminf_lite.backend.expert_values import ExpertActivation, RouterSpec, Score
from bminf_lite.backend.values import Norm
from bminf_lite.cuda.kernels.arrays import PAD, round_up
from bminf_lite.cuda.kernels.experts.layer import ExpertKernels, ExpertLayerWeights, Routing
from bminf_lite.cuda.kernels.experts.weights import ExpertMatrices, RouterWeights
from bminf_lite.cuda.kernels.launcher import Launcher, StepContext
from bminf_lite.cuda.kernels.rowwise.rows import RowKernels
from bminf_lite.cuda.kernels.sources import load
from bminf_lite.cuda.runtime.driver import Device
from bminf_lite.cuda.runtime.graphs import CudaGraph
from bminf_lite.cuda.runtime.kernel import Kernel

REPLAYS = 15
READ_BYTES = 4 << 30
"""Bytes that are read to measure the bandwidth."""


@dataclass(frozen=True)
class Shape:
    """The experts of a model, and how many layers of them are measured."""

    hidden: int
    features: int
    experts: int
    router: RouterSpec
    activation: ExpertActivation
    layers: int
    bias: bool = False
    correction: bool = False
    """Whether the router adds a bias to the scores by which it chooses."""


GPT_OSS = ExpertActivation(limit=7.0)
SIGMOID = {"score": Score.SIGMOID, "renormalise": True}
SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, RouterSpec(128, 8, renormalise=True), ExpertActivation(), 8),
    "qwen3.6-35b-a3b": Shape(2048, 512, 256, RouterSpec(256, 8, renormalise=True), ExpertActivation(), 8),
    "glm-4.7-flash": Shape(
        2048, 1536, 64, RouterSpec(64, 4, epsilon=1e-20, scale=1.8, **SIGMOID), ExpertActivation(), 8, correction=True
    ),
    "mixtral-8x7b": Shape(4096, 14336, 8, RouterSpec(8, 2, renormalise=True), ExpertActivation(), 3),
    "gpt-oss-20b": Shape(2880, 2880, 32, RouterSpec(32, 4, Score.SOFTMAX_OF_CHOSEN), GPT_OSS, 6, bias=True),
    "gpt-oss-120b": Shape(2880, 2880, 128, RouterSpec(128, 4, Score.SOFTMAX_OF_CHOSEN), GPT_OSS, 6, bias=True),
}
"""Routed experts alone: a shared expert's products are those of a dense layer."""
TOKENS = (1, 2, 4, 16, 64, 256, 2048)


@dataclass(frozen=True)
class Result:
    """One shape and one number of tokens. Times are microseconds of a layer; ``share`` is of the read bandwidth."""

    shape: str
    tokens: int
    microseconds: float
    distinct_experts: float
    most_pairs: float
    fair_pairs: float
    bytes_to_read: float
    share: float
    tera_ops: float
    parts: dict[str, float]


class Pool:
    """Memory of a step: the same arrays in every run, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._arrays: list[cp.ndarray] = []
        self._next = 0

    def restart(self) -> None:
        self._next = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> cp.ndarray:
        if self._next == len(self._arrays):
            self._arrays.append(cp.empty(shape, dtype))
        self._next += 1
        return self._arrays[self._next - 1]


class Layers:
    """Random layers of one shape, and tokens of their own for each."""

    def __init__(self, shape: Shape, tokens: int, weights: list[ExpertLayerWeights], stream: cp.cuda.Stream) -> None:
        self.shape, self.stream, self.weights = shape, stream, weights
        launcher = Launcher(Device(0), stream.ptr)
        self.kernels = ExpertKernels(launcher, RowKernels(launcher))
        self.norm = Norm(cp.ones(round_up(shape.hidden, PAD), cp.float32)[: shape.hidden], 1e-6)
        random = cp.random.default_rng(1)
        width = round_up(shape.hidden, PAD)
        self.streams = [random.standard_normal((tokens, width), cp.float32)[:, : shape.hidden] for _ in weights]
        self.sums = [cp.zeros((tokens, width), cp.float32)[:, : shape.hidden] for _ in weights]
        self.pools = [Pool() for _ in weights]
        self.routings: list[Routing] = []
        cp.cuda.Device().synchronize()

    def launch(self) -> None:
        """All layers in one step."""
        step, routings = StepContext(), []
        for layer, x, total, pool in zip(self.weights, self.streams, self.sums, self.pools, strict=True):
            pool.restart()
            routings.append(self.kernels.forward(step, x, self.norm, layer, total, True, pool.empty))
        self.routings = routings

    def microseconds(self) -> float:
        """The time of a layer: the median over replays of a graph of all layers, divided by their number."""
        self.launch()
        self.stream.synchronize()
        graph, found = CudaGraph(self.launch, self.stream.ptr), []
        for _ in range(REPLAYS + 3):
            start, end = cp.cuda.Event(), cp.cuda.Event()
            start.record(self.stream)
            graph.replay(self.stream.ptr)
            end.record(self.stream)
            end.synchronize()
            found.append(cp.cuda.get_elapsed_time(start, end) * 1e3)
        graph.close()
        return statistics.median(found[3:]) / len(self.weights)

    def parts(self) -> dict[str, float]:
        """Microseconds of each kernel of a layer, launched alone in its order, by name."""
        names: list[str] = []
        call = Kernel.__call__

        def note(kernel: Kernel, *arguments: Any, **options: Any) -> None:
            if kernel.name not in names:
                names.append(kernel.name)
            call(kernel, *arguments, **options)

        with replaced_call(note):
            self.launch()
        found = {}
        for name in names:

            def only(kernel: Kernel, *arguments: Any, name: str = name, **options: Any) -> None:
                if kernel.name == name:
                    call(kernel, *arguments, **options)

            with replaced_call(only):
                found[name] = self.microseconds()
        return found


class replaced_call:
    """A context in which launches go through another function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function, self._before = function, Kernel.__call__

    def __enter__(self) -> None:
        Kernel.__call__ = self._function  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Kernel.__call__ = self._before  # type: ignore[method-assign]


def random_layers(shape: Shape) -> list[ExpertLayerWeights]:
    """Layers with random weights, whose results have about the size of their inputs."""
    random = cp.random.default_rng(0)

    def matrices(out: int, features: int) -> ExpertMatrices:
        pitch = round_up(features, PAD)
        codes = (random.random((shape.experts, out, pitch), cp.float32) * 254 - 127).astype(cp.int8)
        scale = (random.random((shape.experts, out), cp.float32) + 0.5) * np.float32(1 / 64 / np.sqrt(features))
        bias = random.standard_normal((shape.experts, out), cp.float32) if shape.bias else None
        return ExpertMatrices(codes, scale, bias, features)

    layers = []
    for _ in range(shape.layers):
        matrix = random.standard_normal((shape.experts, round_up(shape.hidden, PAD)), cp.float32)
        router = RouterWeights(
            shape.router,
            (matrix * np.float32(2 / np.sqrt(shape.hidden))).astype(cp.float16),
            shape.hidden,
            cp.zeros(shape.experts, cp.float32) if shape.bias else None,
            cp.zeros(shape.experts, cp.float32) if shape.correction else None,
        )
        hidden, down = matrices(2 * shape.features, shape.hidden), matrices(shape.hidden, shape.features)
        layers.append(ExpertLayerWeights(router, hidden, down, shape.activation))
    return layers


def read_bandwidth(stream: cp.cuda.Stream) -> float:
    """Bytes per second that a kernel reads."""
    device = Device(0)
    kernel, data, out = (
        load(device, "rowwise/bandwidth.cu", "read_all"),
        cp.ones(READ_BYTES // 4, cp.int32),
        cp.empty(1),
    )
    found = []
    for _ in range(8):
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record(stream)
        kernel(4096, 512, (data.data.ptr, READ_BYTES // 16, out.data.ptr), stream=stream.ptr)
        end.record(stream)
        end.synchronize()
        found.append(READ_BYTES / cp.cuda.get_elapsed_time(start, end) * 1e3)
    return max(found)


def measure(
    name: str, tokens: int, weights: list[ExpertLayerWeights], stream: cp.cuda.Stream, bandwidth: float, parts: bool
) -> Result:
    """One shape and one number of tokens."""
    shape = SHAPES[name]
    layers = Layers(shape, tokens, weights, stream)
    layers.launch()
    stream.synchronize()
    counts = [np.bincount(cp.asnumpy(r.ids).ravel(), minlength=shape.experts) for r in layers.routings]
    distinct = statistics.mean(int((c > 0).sum()) for c in counts)
    each = weights[0].hidden.bytes_of(1) + weights[0].down.bytes_of(1)
    nbytes = distinct * each + weights[0].router.matrix.nbytes
    microseconds = layers.microseconds()
    operations = 2 * tokens * shape.router.top_k * 3 * shape.hidden * shape.features
    return Result(
        name,
        tokens,
        microseconds,
        distinct,
        statistics.mean(int(c.max()) for c in counts),
        tokens * shape.router.top_k / shape.experts,
        nbytes,
        nbytes / microseconds * 1e6 / bandwidth,
        operations / microseconds / 1e6,
        layers.parts() if parts else {},
    )


def table(results: list[Result]) -> str:
    """The results as lines of text."""
    columns = f"{'us':>9} {'experts':>8} {'most':>6} {'fair':>6} {'MB':>8} {'GB/s':>6} {'share':>7} {'TOPS':>7}"
    lines = [f"{'shape':15} {'tokens':>6} {columns}"]
    for r in results:
        lines.append(
            f"{r.shape:15} {r.tokens:6} {r.microseconds:9.2f} {r.distinct_experts:8.1f} {r.most_pairs:6.0f} "
            f"{r.fair_pairs:6.1f} {r.bytes_to_read / 1e6:8.1f} {r.bytes_to_read / r.microseconds / 1e3:6.0f} "
            f"{r.share:7.1%} {r.tera_ops:7.1f}"
        )
        lines += [f"    {time:9.2f}  {kernel}" for kernel, time in r.parts.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", type=Path, metavar="FILE", help="write the results there as JSON")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names, with commas between them")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers, with commas between them")
    parser.add_argument("--parts", action="store_true", help="also time each kernel alone")
    arguments = parser.parse_args()
    unknown = set(arguments.shapes.split(",")) - SHAPES.keys()
    if unknown:
        parser.error(f"no shapes {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    stream = cp.cuda.Stream(non_blocking=True)
    bandwidth = read_bandwidth(stream)
    print(f"{Device(0).name}: reads {bandwidth / 1e9:.0f} GB/s", flush=True)
    results = []
    for name in arguments.shapes.split(","):
        weights = random_layers(SHAPES[name])
        for tokens in map(int, arguments.tokens.split(",")):
            results.append(measure(name, tokens, weights, stream, bandwidth, arguments.parts))
            print(table(results[-1:]).split("\n", 1)[1], flush=True)
        del weights
        cp.get_default_memory_pool().free_all_blocks()
    print(table(results))
    if arguments.o:
        found = {"device": Device(0).name, "read_bytes_per_second": bandwidth, "results": [asdict(r) for r in results]}
        arguments.o.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
