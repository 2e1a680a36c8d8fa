"""The time of a product on a GPU, by how it is quantized: measured, or from the GPU's limits.

The work is that of one of :data:`SEQUENCES` requests that run together, each with a prompt of :data:`PROMPT` tokens and
an answer of :data:`ANSWER` tokens. So a product runs once with a row for each prompt token, and takes its share of the
steps that decode all sequences. The output head sees one row of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from ..backend.base import Backend
from ..backend.cpu import CpuBackend
from ..backend.quantization import Int8Weight, OutlierColumns
from ..backend.random_matrix import RandomMatrix
from ..checkpoint.recipe import Scheme

if TYPE_CHECKING:
    from ..backend.cuda.backend import CudaBackend
    from .cuda import CudaProfiler

PROMPT, ANSWER, SEQUENCES = 2048, 128, 16
STEPS_PER_REQUEST = ANSWER / SEQUENCES
GEMV_ROWS = 4
"""A product with float activations of at most ``GEMV_ROWS`` rows reads int8 weights directly."""


@dataclass(frozen=True)
class ProductMethod:
    """How a product ``[outputs, inputs]`` is quantized, as far as its time depends on it.

    Its input is rotated in blocks of ``rotation`` elements, and ``outliers`` of its columns stay fp16. ``is_head``
    marks the output head.
    """

    outputs: int
    inputs: int
    scheme: Scheme
    rotation: int = 1
    outliers: int = 0
    is_head: bool = False


@dataclass(frozen=True)
class ProductTime:
    """Seconds of a product: with the rows of a ``prompt``, and with those of one decode ``step``."""

    prompt: float
    step: float

    @property
    def request(self) -> float:
        """Seconds of a request."""
        return self.prompt + STEPS_PER_REQUEST * self.step


@dataclass(frozen=True)
class GpuLimits:
    """A GPU's limits: ``int8`` and ``fp16`` operations and ``bandwidth`` bytes per second, and seconds of a ``launch``.

    The defaults are what large products reach on an H200. Quotients of times differ little between GPUs.
    """

    int8: float = 1.55e15
    fp16: float = 7.6e14
    bandwidth: float = 4.3e12
    launch: float = 2e-6


TimeOf = Callable[[ProductMethod], ProductTime]


def modelled_time(method: ProductMethod, limits: GpuLimits | None = None) -> ProductTime:
    """The time of a product by the limits of a GPU, by default the H200's."""
    limits = limits or GpuLimits()
    return ProductTime(*(modelled_seconds(method, rows, limits) for rows in _rows(method)))


def modelled_seconds(method: ProductMethod, rows: int, limits: GpuLimits) -> float:
    """The seconds of a product of ``rows`` activations: its operations, and the bytes that its kernels move.

    An int8 product quantizes its input first; a rotation takes that time again. Outlier columns split the input, and
    add a product in fp32. With float activations, the weight is dequantized first, which reaches half of the bandwidth,
    and the sums are scaled by a kernel of their own.
    """
    weight, x, y = method.outputs * method.inputs, rows * method.inputs, rows * method.outputs
    operations = 2 * rows * weight

    def move(nbytes: float) -> float:
        return nbytes / limits.bandwidth

    if method.scheme is Scheme.W8A8:
        seconds = max(operations / limits.int8, move(weight)) + move(3 * x) + 2 * limits.launch
        if method.rotation > 1:
            seconds += move(3 * x)
        if method.outliers:
            seconds += move(4 * x) + move(10 * y) + 3 * limits.launch
        return seconds
    if rows <= GEMV_ROWS:
        return move(weight) + limits.launch
    return max(operations / limits.fp16, move(2 * weight)) + move(6 * weight + 10 * y) + 4 * limits.launch


def make_time_of(ops: Backend) -> tuple[str, TimeOf]:
    """The name of the GPU that products are timed on, and their times.

    On a GPU they are measured with random weights, each method once. A CPU has no kernels to choose between, and the
    times are modelled.
    """
    if isinstance(ops, CpuBackend):
        return "an H200, modelled", modelled_time
    from ..backend.cuda.backend import CudaBackend
    from .cuda import CudaProfiler

    assert isinstance(ops, CudaBackend)
    profiler, known = CudaProfiler(ops), dict[ProductMethod, ProductTime]()

    def measured(method: ProductMethod) -> ProductTime:
        if method not in known:
            known[method] = ProductTime(*(_measured_seconds(ops, profiler, method, rows) for rows in _rows(method)))
        return known[method]

    return f"{ops.name}, measured", measured


def _rows(method: ProductMethod) -> tuple[int, int]:
    return 1 if method.is_head else PROMPT, SEQUENCES


def _measured_seconds(ops: CudaBackend, profiler: CudaProfiler, method: ProductMethod, rows: int) -> float:
    """The median time of a product with its input in fp16."""
    n, k = method.outputs, method.inputs
    outliers = None
    if method.outliers:
        index = np.arange(method.outliers, dtype=np.int32)
        outliers = OutlierColumns(index, np.zeros((n, method.outliers), np.float16))
    codes, scale = cast(np.ndarray, RandomMatrix((n, k), np.int8)), np.full(n, 1e-4, np.float32)
    weight = ops.weight([Int8Weight(codes, scale, method.scheme is Scheme.W8A8, outliers, method.rotation)])
    x, out = (ops.arrays.rows(rows, columns, np.float16) for columns in (k, n))
    ops.kernels.pointwise.fill_random(x, seed=0)
    return profiler.median_seconds(lambda _: ops.linear(x, weight, out=out))
