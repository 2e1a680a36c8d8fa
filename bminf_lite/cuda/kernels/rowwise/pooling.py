"""The launcher of ``pooling.cu``: one vector for each sequence of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....backend.values import ForwardBatch, Pooling
from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..constants import POOLING_COLUMNS, POOLING_LANES, PoolingKind
from ..instantiations import Capability, KernelFamily, numbers
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp

KINDS = {
    Pooling.FIRST: PoolingKind.POOL_FIRST,
    Pooling.LAST: PoolingKind.POOL_LAST,
    Pooling.MAX: PoolingKind.POOL_MAX,
    Pooling.MEAN: PoolingKind.POOL_MEAN,
    Pooling.MEAN_SQRT_LEN: PoolingKind.POOL_MEAN_SQRT_LEN,
    Pooling.WEIGHTED_MEAN: PoolingKind.POOL_WEIGHTED_MEAN,
}


class PoolingKernels:
    """Vectors of sequences, of those of their tokens."""

    source = "rowwise/pooling.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "pool", (numbers(PoolingKind),))

    def pool(
        self,
        step: StepContext,
        x: cp.ndarray,
        batch: ForwardBatch,
        pooling: Pooling,
        skipped: cp.ndarray | None,
        out: cp.ndarray,
    ) -> None:
        """The ``pooling`` of the rows of ``x``, fp32 ``[T, n]``, into ``out``, fp32 ``[B, n]``."""
        count, n = out.shape
        self._launcher.launch(
            step,
            self.source,
            f"pool<{int(KINDS[pooling])}>",
            (count, ceil_div(n, POOLING_COLUMNS)),
            POOLING_LANES * POOLING_COLUMNS,
            (
                x.data.ptr,
                pitch_of(x),
                address(batch.cu_seqlens),
                address(skipped),
                out.data.ptr,
                pitch_of(out),
                n,
            ),
            bytes_moved=nbytes_of(x, out),
        )
