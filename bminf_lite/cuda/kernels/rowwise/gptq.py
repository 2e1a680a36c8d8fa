"""The kernels of GPTQ, of which products of blocks are float products: the launcher of ``gptq.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..arrays import ceil_div, nbytes_of, pitch_of
from ..constants import GPTQ_THREADS as THREADS
from ..instantiations import Capability, KernelFamily
from ..launcher import Launcher
from .calibration import BF16, FloatMatrix

if TYPE_CHECKING:
    import cupy as cp

WARP = 32


class GPTQKernels:
    """The kernels of GPTQ, which are launched outside steps."""

    source = "rowwise/gptq.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "gptq_ratios", (("__half", BF16, "float"),))
        yield from (KernelFamily(cls.source, name) for name in ("gather_square", "cholesky_block", "gptq_round"))

    def gather_square(self, a: cp.ndarray, index: cp.ndarray, out: cp.ndarray, damping: float = 0.0) -> None:
        """Rows and columns ``index`` of a square matrix, plus ``damping`` on the diagonal."""
        arguments = (a.data.ptr, index.data.ptr, out.data.ptr, damping, len(a))
        self._launch("gather_square", len(a), arguments, a, out)

    def cholesky_block(self, a: cp.ndarray, inverse: cp.ndarray, smallest: float) -> None:
        """Decompose a square view ``a`` of at most ``GPTQ_ROOT_BLOCK`` rows in place; also the inverse of the root."""
        arguments = (a.data.ptr, pitch_of(a), inverse.data.ptr, smallest, len(a))
        self._launch("cholesky_block", 1, arguments, inverse)

    def ratios(self, matrix: FloatMatrix, order: cp.ndarray, scale: cp.ndarray, rest: cp.ndarray) -> None:
        """The matrix in units of its scales, its columns in another order."""
        arguments = (matrix.values.data.ptr, order.data.ptr, scale.data.ptr, rest.data.ptr, matrix.shape[1])
        self._launch(f"gptq_ratios<{matrix.kind}>", matrix.shape[0], arguments, matrix.values, rest)

    def round(
        self,
        rest: cp.ndarray,
        root: cp.ndarray,
        order: cp.ndarray,
        codes: cp.ndarray,
        errors: cp.ndarray,
        start: int,
    ) -> None:
        """Round as many columns as ``errors`` has, from ``start`` on."""
        n, k = rest.shape
        arguments = (
            rest.data.ptr,
            root.data.ptr,
            order.data.ptr,
            codes.data.ptr,
            pitch_of(codes),
            errors.data.ptr,
            n,
            k,
            start,
            errors.shape[1],
        )
        self._launch("gptq_round", ceil_div(n, THREADS // WARP), arguments, errors, errors)

    def _launch(self, expression: str, grid: int, arguments: tuple[object, ...], *moved: cp.ndarray) -> None:
        bytes_moved = nbytes_of(*moved)
        self._launcher.launch(None, self.source, expression, grid, THREADS, arguments, bytes_moved=bytes_moved)
