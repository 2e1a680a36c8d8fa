"""Softmax over rows of any width and alignment: the launcher of ``softmax.cu``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...runtime.kernel import Kernel
from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..instantiations import BOOLEANS, Capability, KernelFamily, Together
from ..launcher import Launcher, StepContext
from .rows import KERNEL_CACHE_SIZE, MAX_NORM_WIDTH, in_vectors, row_shape, row_shapes, row_step

if TYPE_CHECKING:
    import cupy as cp

BLOCK_ROW = MAX_NORM_WIDTH
"""Elements of a row that one block holds in its registers."""
MAX_CLUSTER = 8
CLUSTER_SHAPE = 512, 4
"""Threads per block and vectors per thread if a cluster shares a row."""


EACH_ROW = 1, 0
"""``BroadcastRows`` of a bias or a mask that has a row for each row of the scores."""


@dataclass(frozen=True)
class RowLaunch:
    """The part of a launch that depends on the shape; ``sizes`` are the kernel's last parameters."""

    kernel: Kernel
    grid: int
    block: int
    cluster: int | None
    sizes: tuple[int, ...]


class Softmax:
    """The softmax kernels."""

    source = "rowwise/softmax.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.plan = functools.lru_cache(KERNEL_CACHE_SIZE)(self.plan_uncached)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        shapes = tuple(Together(s) for s in sorted(row_shapes(4)) if s[0] * s[1] * 8 <= BLOCK_ROW)
        clusters = (1, 2, 4, 8) if capability >= (9, 0) else (1,)
        kinds, whole = ("float", "__half", "__nv_bfloat16"), BOOLEANS[::-1]
        yield KernelFamily(cls.source, "softmax", (kinds, whole, shapes, clusters), _possible)
        yield KernelFamily(cls.source, "softmax_two_pass", (kinds, whole))

    def launch(
        self,
        step: StepContext,
        x: cp.ndarray,
        scale: float,
        bias: cp.ndarray | None,
        mask: cp.ndarray | None,
        out: cp.ndarray,
    ) -> None:
        """``softmax(scale * x + bias)`` of fp16 or fp32 rows where ``mask`` (uint8) is set; ``out`` may be ``x``.

        ``bias`` and ``mask`` are matrices, or vectors that serve every row.
        """
        launcher, (rows, k) = self._launcher, x.shape
        if not x.size:
            return
        arrays = [a for a in (x, out, bias, mask) if a is not None]
        assert all(a.strides[-1] == a.itemsize for a in arrays)
        kind = "__half" if x.itemsize == 2 else "float"
        plan = self.plan(kind, k % 8 == 0 and in_vectors(*arrays), rows, k)
        arguments = (
            x.data.ptr,
            pitch_of(x),
            scale,
            address(bias),
            row_step(bias),
            address(mask),
            row_step(mask),
            out.data.ptr,
            pitch_of(out),
            *EACH_ROW,
            *EACH_ROW,
            *plan.sizes,
        )
        plan.kernel(plan.grid, plan.block, arguments, 0, launcher.stream, True, plan.cluster, nbytes_of(*arrays))
        step.one_block_per_sm = False

    def plan_uncached(self, kind: str, whole: bool, rows: int, k: int) -> RowLaunch:
        """The launch for ``rows`` of ``k`` elements of type ``kind``; ``whole``: all rows can be read in vectors."""
        launcher, fills_gpu = self._launcher, rows > self._launcher.num_sms
        template = f"{kind}, {str(whole).lower()}"
        cluster = 1 << (ceil_div(k, BLOCK_ROW) - 1).bit_length()
        if cluster > (MAX_CLUSTER if launcher.has_clusters else 1):
            kernel = launcher.kernel(self.source, f"softmax_two_pass<{template}>", fills_gpu)
            return RowLaunch(kernel, rows, 512, None, (k,))
        threads, vectors = row_shape(k, 4 if fills_gpu else 1) if cluster == 1 else CLUSTER_SHAPE
        kernel = launcher.kernel(self.source, f"softmax<{template}, {threads}, {vectors}, {cluster}>", fills_gpu)
        grid, block = cluster * ceil_div(rows * threads, max(threads, 128)), max(threads, 128)
        return RowLaunch(kernel, grid, block, cluster if cluster > 1 else None, (rows, k))


def _possible(kind: str, whole: str, shape: tuple[int, int], cluster: int) -> bool:
    return cluster == 1 or shape == CLUSTER_SHAPE
