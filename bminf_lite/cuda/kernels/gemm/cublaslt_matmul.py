"""Products by cublasLt on one GPU: descriptors and algorithms are kept per shape, so a product is one C call.

A :class:`MatmulContext` owns the library's handle, the workspace and the choices of algorithms. It makes a
:class:`PreparedMatmul` for each shape, which runs on any stream with three addresses. The first run outside a stream
capture may time the algorithms that cublasLt's heuristic proposes, on the operands of that run. Inside a capture
nothing is timed or allocated. All products of one ``MatmulContext`` share one workspace, so they must not run on
several streams at the same time.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....errors import DeviceError
from ...runtime import cubin_cache, libraries
from ...runtime.bindings import LibraryError
from ...runtime.cublaslt import (
    Algorithm,
    CublasLt,
    DataType,
    HeuristicResult,
    LayoutAttribute,
    MatmulDesc,
    MatrixLayout,
    Operation,
    Preference,
    Status,
)
from ...runtime.driver import Device
from .algorithm_store import AlgorithmStore
from .plans import MatmulOperand, MatmulProblem

WORKSPACE_BYTES = 32 << 20
"""NVIDIA's recommendation for GPUs from compute capability 9.0 on."""
PROPOSALS = 8
TIMED_RUNS = 3


class NoAlgorithm(DeviceError):
    """cublasLt has no algorithm for a product on this GPU."""


class MatmulContext:
    """Runs products on the current GPU; see the module's docstring.

    ``allocate(nbytes)`` returns the workspace: an object with an address ``ptr``, which is kept. ``store`` keeps chosen
    algorithms; without it, each process times them again. An observer of ``device`` is called for each product.
    """

    def __init__(
        self,
        lt: CublasLt,
        allocate: Callable[[int], Any],
        store: AlgorithmStore | None = None,
        device: Device | None = None,
    ) -> None:
        self.lt = lt
        self.device = device
        self.store = store or AlgorithmStore("", None)
        self.workspace = allocate(WORKSPACE_BYTES)
        lt.handle  # noqa: B018 - creating it allocates, which must not happen inside a stream capture

    @classmethod
    def open(cls, device: Device, allocate: Callable[[int], Any], folder: Path | None = None) -> MatmulContext:
        """On ``device``, with algorithms kept in ``folder`` (by default where compiled kernels are kept).

        Raises ``DeviceError`` with the command that installs cublasLt if it is missing.
        """
        lt = CublasLt(libraries.load("cublasLt").dll)
        identity = f"{device.name} {libraries.driver_release()} {lt.version} {WORKSPACE_BYTES}"
        folder = cubin_cache.default_folder() if folder is None else folder
        return cls(lt, allocate, AlgorithmStore(identity, folder), device)

    def clear_workspace(self, stream: int) -> None:
        """Write zeros to the workspace, which evicts most of the GPU's cache."""
        from cupy.cuda import runtime

        runtime.memsetAsync(self.workspace.ptr, 0, WORKSPACE_BYTES, stream)

    def prepare(
        self, product: MatmulProblem, alignment: int = 256, key: str | None = None, split_k: bool = True
    ) -> PreparedMatmul:
        """Make the descriptors of ``product`` and choose an algorithm; raises :class:`NoAlgorithm`.

        ``alignment`` in bytes, a power of two, divides all three addresses. With a ``key``, the proposed algorithms are
        timed at the first run and the fastest is kept under that key, which may stand for several similar shapes.
        Without one, the heuristic's first proposal is used, which is the same in every run. Without ``split_k``, no
        proposal cuts a sum into parts.
        """
        return PreparedMatmul(self, product, alignment, key, split_k)


class PreparedMatmul:
    """One product of fixed shape, ready to run."""

    def __init__(
        self, matmul_context: MatmulContext, product: MatmulProblem, alignment: int, key: str | None, split_k: bool
    ) -> None:
        self._matmul_context, lt = matmul_context, matmul_context.lt
        self.product = product
        self._desc = MatmulDesc(
            lt, product.compute, product.scale_type, Operation(product.transpose_a), Operation(product.transpose_b)
        )
        self._layouts = [_matrix_layout(lt, matrix) for matrix in (product.a, product.b, product.d)]
        number = ctypes.c_int32 if product.scale_type is DataType.R_32I else ctypes.c_float
        self._one, self._zero = number(1), number(0)
        self._preference = Preference(lt, WORKSPACE_BYTES, alignment, split_k)
        self._key = key
        known = matmul_context.store.get(key) if key else None
        if known is not None and not self._is_usable(known):
            known = None
        self._untimed = key is not None and known is None
        self._algorithm = known or self._proposals()[0]

    def run(self, a: int, b: int, d: int, stream: int) -> None:
        """Compute ``d`` from ``a`` and ``b``, all addresses, on ``stream``, a ``cudaStream_t`` as an integer."""
        if self._untimed and not capturing(stream):
            self._choose(a, b, d, stream)
        device = self._matmul_context.device
        if device is None or device.observer is None:
            self._launch(self._algorithm, a, b, d, stream)
            return
        with device.observer(f"cublasLt {self.product}", self.product.nbytes, stream):
            self._launch(self._algorithm, a, b, d, stream)

    def _launch(self, algorithm: Algorithm, a: int, b: int, d: int, stream: int) -> None:
        lt, (layout_a, layout_b, layout_d) = self._matmul_context.lt, self._layouts
        lt.functions.cublasLtMatmul(
            lt.handle,
            self._desc.handle,
            ctypes.addressof(self._one),
            a,
            layout_a.handle,
            b,
            layout_b.handle,
            ctypes.addressof(self._zero),
            d,
            layout_d.handle,
            d,
            layout_d.handle,
            algorithm,
            self._matmul_context.workspace.ptr,
            WORKSPACE_BYTES,
            stream,
        )

    def _proposals(self) -> list[Algorithm]:
        """The heuristic's proposals, the best by its estimate first."""
        lt, (a, b, d) = self._matmul_context.lt, (layout.handle for layout in self._layouts)
        results, count = (HeuristicResult * PROPOSALS)(), ctypes.c_int()
        try:
            lt.functions.cublasLtMatmulAlgoGetHeuristic(
                lt.handle, self._desc.handle, a, b, d, d, self._preference.handle, PROPOSALS, results, count
            )
        except LibraryError as error:
            raise NoAlgorithm(f"cublasLt has no algorithm for {self.product}: {error}") from error
        usable = [r.algorithm for r in results[: count.value] if r.state == Status.SUCCESS]
        if not usable:
            raise NoAlgorithm(f"cublasLt has no algorithm for {self.product}")
        return usable

    def _is_usable(self, algorithm: Algorithm) -> bool:
        lt, (a, b, d) = self._matmul_context.lt, (layout.handle for layout in self._layouts)
        result = HeuristicResult()
        try:
            lt.functions.cublasLtMatmulAlgoCheck(lt.handle, self._desc.handle, a, b, d, d, algorithm, result)
        except LibraryError:
            return False
        return bool(result.state == Status.SUCCESS and result.workspace_bytes <= WORKSPACE_BYTES)

    def _choose(self, a: int, b: int, d: int, stream: int) -> None:
        """Time every proposal on the real operands, and keep the fastest."""
        proposals = self._proposals()
        seconds = [self._time(algorithm, a, b, d, stream) for algorithm in proposals]
        if min(seconds) == math.inf:
            raise NoAlgorithm(f"none of cublasLt's {len(proposals)} algorithms can run {self.product}")
        self._algorithm = proposals[seconds.index(min(seconds))]
        self._untimed = False
        assert self._key is not None
        self._matmul_context.store.put(self._key, self._algorithm)

    def _time(self, algorithm: Algorithm, a: int, b: int, d: int, stream: int) -> float:
        """Seconds that the product takes with ``algorithm``; infinity if it fails."""
        try:
            self._launch(algorithm, a, b, d, stream)  # the first run loads the kernel
            return timed(lambda: self._launch(algorithm, a, b, d, stream), stream)
        except LibraryError:
            return math.inf


def _matrix_layout(lt: CublasLt, matrix: MatmulOperand) -> MatrixLayout:
    layout = MatrixLayout(lt, matrix.dtype, matrix.order, matrix.rows, matrix.cols, matrix.ld)
    if matrix.batch > 1:
        layout[LayoutAttribute.BATCH_COUNT] = matrix.batch
        layout[LayoutAttribute.STRIDED_BATCH_OFFSET] = matrix.stride
    return layout


def common_alignment(*addresses: int) -> int:
    """The largest power of two, up to 256, that divides every address."""
    bits = 256
    for address in addresses:
        bits |= address
    return bits & -bits


def capturing(stream: int) -> bool:
    """Whether ``stream`` is being captured."""
    import cupy

    return bool(cupy.cuda.runtime.streamIsCapturing(stream))


@contextmanager
def _event() -> Iterator[int]:
    from cupy.cuda import runtime

    event = runtime.eventCreate()
    try:
        yield event
    finally:
        runtime.eventDestroy(event)


def timed(launch: Callable[[], None], stream: int, runs: int = TIMED_RUNS) -> float:
    """Seconds that one ``launch()`` takes on ``stream``, the mean over ``runs``; waits for the stream."""
    from cupy.cuda import runtime

    with _event() as start, _event() as end:
        runtime.eventRecord(start, stream)
        for _ in range(runs):
            launch()
        runtime.eventRecord(end, stream)
        runtime.eventSynchronize(end)
        return float(runtime.eventElapsedTime(start, end)) / 1000 / runs
