"""Softmax over rows of any width and alignment: the launcher of ``softmax.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..instantiations import BOOLEANS, Capability, KernelFamily, Together
from ..launcher import Launcher, StepContext
from .rows import MAX_NORM_WIDTH, in_vectors, row_shape, row_shapes, row_step

if TYPE_CHECKING:
    import cupy as cp

BLOCK_ROW = MAX_NORM_WIDTH
"""Elements of a row that one block holds in its registers."""
MAX_CLUSTER = 8
CLUSTER_SHAPE = 512, 4
"""Threads per block and vectors per thread if a cluster shares a row."""


class Softmax:
    """The softmax kernels."""

    source = "rowwise/softmax.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        shapes = tuple(Together(s) for s in sorted(row_shapes(4)) if s[0] * s[1] * 8 <= BLOCK_ROW)
        clusters = (1, 2, 4, 8) if capability >= (9, 0) else (1,)
        kinds, whole = ("float", "__half"), BOOLEANS[::-1]
        yield KernelFamily(cls.source, "softmax", (kinds, whole, shapes, clusters), _possible)
        yield KernelFamily(cls.source, "softmax_two_pass", (kinds, whole))

    def launch(
        self, step: StepContext, x: cp.ndarray, scale: float, bias: cp.ndarray | None, mask: cp.ndarray | None,
        out: cp.ndarray,
    ) -> None:  # fmt: skip
        """``softmax(scale * x + bias)`` of fp16 or fp32 rows where ``mask`` (uint8) is set; ``out`` may be ``x``.

        ``bias`` and ``mask`` are matrices, or vectors that serve every row.
        """
        launcher, (rows, k) = self._launcher, x.shape
        if not x.size:
            return
        arrays = [a for a in (x, out, bias, mask) if a is not None]
        assert all(a.strides[-1] == a.itemsize for a in arrays)
        whole = k % 8 == 0 and in_vectors(*arrays)
        fills_gpu = rows > launcher.num_sms
        template = f"{'__half' if x.itemsize == 2 else 'float'}, {'true' if whole else 'false'}"
        arguments = (
            x.data.ptr, pitch_of(x), scale, address(bias), row_step(bias), address(mask), row_step(mask),
            out.data.ptr, pitch_of(out),
        )  # fmt: skip
        cluster = 1 << (ceil_div(k, BLOCK_ROW) - 1).bit_length()
        if cluster > (MAX_CLUSTER if launcher.has_clusters else 1):
            launcher.launch(
                step, self.source, f"softmax_two_pass<{template}>", rows, 512, (*arguments, k),
                bytes_moved=nbytes_of(*arrays), cache=fills_gpu,
            )  # fmt: skip
            return
        threads, vectors = row_shape(k, 4 if fills_gpu else 1) if cluster == 1 else CLUSTER_SHAPE
        grid = cluster * ceil_div(rows * threads, max(threads, 128))
        launcher.launch(
            step, self.source, f"softmax<{template}, {threads}, {vectors}, {cluster}>", grid,
            max(threads, 128), (*arguments, rows, k), cluster=cluster if cluster > 1 else None,
            bytes_moved=nbytes_of(*arrays), cache=fills_gpu,
        )  # fmt: skip


def _possible(kind: str, whole: str, shape: tuple[int, int], cluster: int) -> bool:
    return cluster == 1 or shape == CLUSTER_SHAPE
