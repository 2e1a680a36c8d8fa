"""Products with float activations of many rows on compute capability 9.0: the launcher of ``float_gemm_hopper.cu``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...runtime.kernel import Kernel
from ..arrays import WeightRows, address, ceil_div, nbytes_of, round_up
from ..constants import FLOAT_GEMM_CHANNELS as CHANNELS
from ..constants import FLOAT_GEMM_CHUNK as CHUNK
from ..constants import Epilogue
from ..instantiations import Capability, KernelFamily, Together
from ..launcher import Launcher, StepContext
from ..rowwise.rows import KERNEL_CACHE_SIZE
from .float_operands import (
    ACTIVATION_NUMBERS,
    BLOCK,
    EPILOGUE_NUMBERS,
    FLOAT_EPILOGUES,
    KINDS,
    WeightKind,
    activations_map,
    kind_of,
    possible_epilogue,
    result_map,
    scale_map,
    weight_map,
)

if TYPE_CHECKING:
    import cupy as cp

THREADS = 384
RESERVED_BYTES = 2 << 10
"""Shared memory that the pipeline leaves: for its barriers, and for the system."""
TILES = ((64, 1), (128, 1), (192, 1), (256, 2))
"""Rows of a tile, and blocks of a cluster, which share these rows."""
COSTS = {2: (102, 131, 185, 256), 1: (120, 158, 198, 256), 0: (130, 183, 220)}
"""The relative duration of a tile of each height: of fp16, of codes, and of codes with scales of groups.

Measured on an H200 with 4,096 columns; see docs/dev/order-of-sums.md.
"""
BAND_BYTES = 20 << 20
"""Bytes of the rows of a band, see ``TileScheduler`` in the kernel: the L2 cache keeps them for all channels."""


@dataclass(frozen=True)
class _Plan:
    """The part of a launch that depends on the shapes. ``numbers`` are the kernel's parameters."""

    kernel: Kernel
    grid: int
    cluster: int
    shared: int
    height: int
    numbers: tuple[int, ...]


class FloatGemmHopper:
    """Many fp16 rows times a weight of any kind."""

    source = "gemm/float_gemm_hopper.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._plan = functools.lru_cache(KERNEL_CACHE_SIZE)(self._find_plan)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        if capability == (9, 0):
            tiles = tuple(map(Together, TILES))
            values = (KINDS, tiles, EPILOGUE_NUMBERS, ACTIVATION_NUMBERS)
            yield KernelFamily(cls.source, "bminf::float_gemm_hopper", values, _possible)

    def launch(
        self,
        step: StepContext,
        x: cp.ndarray,
        weight: WeightRows,
        out: cp.ndarray,
        epilogue: int,
        activation: int = 0,
        tile: tuple[int, int] | None = None,
    ) -> None:
        """As :meth:`SkinnyFloatGemmHopper.launch`; ``tile``, one of :data:`TILES`, changes the speed alone."""
        rows, n, k = x.shape[0], weight.out_features, weight.in_features
        gated, kind = epilogue == Epilogue.GATED, kind_of(weight)
        plan = self._plan(rows, n, k, kind, int(epilogue), int(activation), tile)
        columns_of_box = CHUNK if gated or epilogue in FLOAT_EPILOGUES else BLOCK
        args = (
            address(weight.scale),
            address(weight.bias),
            *plan.numbers,
            activations_map(x, BLOCK, plan.height // plan.cluster),
            weight_map(weight, BLOCK, CHANNELS, gated),
            scale_map(weight, CHANNELS // (1 + gated), groups_of_stage(kind)),
            result_map(out, columns_of_box, CHUNK),
        )
        plan.kernel(
            plan.grid,
            THREADS,
            args,
            plan.shared,
            self._launcher.stream,
            True,
            plan.cluster if plan.cluster > 1 else None,
            weight.nbytes + nbytes_of(x, out),
        )
        step.one_block_per_sm = False

    def _find_plan(
        self, rows: int, n: int, k: int, kind: WeightKind, epilogue: int, activation: int, tile: tuple[int, int] | None
    ) -> _Plan:
        launcher = self._launcher
        height, cluster = tile or best_tile(rows, n, kind, launcher.num_sms)
        box_row = 64 if epilogue == Epilogue.GATED else 256 if epilogue in FLOAT_EPILOGUES else 128
        staging = 4 * CHUNK * box_row  # two buffers for each of two warpgroups
        stage = height * BLOCK * 2 + CHANNELS * BLOCK * kind.itemsize
        stage += round_up(groups_of_stage(kind) * CHANNELS * kind.scale_bytes, 1024)
        stages = (launcher.max_shared - RESERVED_BYTES - staging) // stage
        row_tiles, channel_tiles = ceil_div(rows, height), ceil_div(n, CHANNELS * cluster)
        clusters = row_tiles * channel_tiles
        clusters = ceil_div(clusters, ceil_div(clusters, launcher.num_sms // cluster))
        band = max(1, BAND_BYTES // (height * k * 2))
        template = f"{kind}, {height}, {cluster}, {epilogue}, {activation}"
        return _Plan(
            launcher.kernel(self.source, f"bminf::float_gemm_hopper<{template}>"),
            clusters * cluster,
            cluster,
            stages * stage + staging + 16 * stages,
            height,
            (rows, n, k, ceil_div(k, BLOCK), row_tiles, channel_tiles, band, stages),
        )


def groups_of_stage(kind: WeightKind) -> int:
    """Groups whose scales a stage of the pipeline has."""
    return max(1, BLOCK // kind.group_size) if kind.group_size else 0


def best_tile(rows: int, n: int, kind: WeightKind, num_sms: int) -> tuple[int, int]:
    """The tile whose rounds of the blocks take the least time."""
    costs = dict(zip(TILES, COSTS[0 if kind.group_size else kind.itemsize], strict=False))

    def cost(tile: tuple[int, int]) -> float:
        height, cluster = tile
        clusters = ceil_div(rows, height) * ceil_div(n, CHANNELS * cluster)
        return ceil_div(clusters, num_sms // cluster) * costs[tile]

    return min(costs, key=cost)


def _possible(kind: WeightKind, tile: tuple[int, int], epilogue: int, activation: int) -> bool:
    fits = not kind.group_size or TILES.index(tuple(tile)) < len(COSTS[0])  # two sums for each output
    return fits and possible_epilogue(epilogue, activation)
