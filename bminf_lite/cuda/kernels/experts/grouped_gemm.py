"""int8 products of sorted pairs with the weights of their experts: the launcher of ``grouped_gemm.cu``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....backend.expert_values import ExpertActivation
from ...runtime.driver import shared_memory_per_block
from ...runtime.kernel import Kernel
from ..arrays import ceil_div, nbytes_of, pitch_of, round_up
from ..constants import (
    CLAMPED_SWIGLU,
    GROUPED_COLUMNS,
    GROUPED_ROWS,
    GROUPED_THREADS,
    MAX_EXPERTS,
    Activation,
    Epilogue,
)
from ..instantiations import Capability, KernelFamily, numbers
from ..launcher import Launcher, StepContext
from ..rowwise.rows import KERNEL_CACHE_SIZE
from .adapters import PairSide
from .weights import ExpertMatrices, activation_number, clamp_arguments

if TYPE_CHECKING:
    import cupy as cp

TILES = (1, 2, 4, 8)
"""Tiles of 8 rows of one expert that a block computes at once."""
MAX_STAGES = 4
SCHEDULE_BYTES = 2 * 4 * (MAX_EXPERTS + 1)
BLOCKS_PER_SM = 4
"""Blocks of an SM at most."""
EPILOGUES = (Epilogue.TO_HALF, Epilogue.GATED, Epilogue.ACTIVATED)
FUNCTIONS = (*numbers(Activation), CLAMPED_SWIGLU)


class GroupedGemm:
    """One launch for all experts, from compute capability 7.5 on."""

    source = "experts/grouped_gemm.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._plan = functools.lru_cache(KERNEL_CACHE_SIZE)(self._find_plan)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        defines = defines_of(stages_of(shared_memory_per_block(capability)))
        for name in ("grouped_gemm", "grouped_gemm_adapted"):
            yield KernelFamily(cls.source, name, (TILES, numbers(EPILOGUES), FUNCTIONS), possible_epilogue, defines)

    def launch(
        self,
        step: StepContext | None,
        codes: cp.ndarray,
        scales: cp.ndarray,
        offsets: cp.ndarray,
        claimed: cp.ndarray,
        weight: ExpertMatrices,
        out: cp.ndarray,
        activation: ExpertActivation | None = None,
        early: bool = False,
        side: PairSide | None = None,
    ) -> None:
        """The products of sorted pairs, int8 ``[P, pitch]`` with ``scales`` fp32 ``[P]``, as fp16 ``[P, features]``.

        ``offsets`` int32 ``[experts + 1]`` are those of :class:`.SortedPairs`. ``claimed`` int32 ``[1]`` is the counter
        of this product, zero before and not afterwards; blocks with fixed tiles, as here, do not read it. With an
        ``activation`` that is gated, half as many features. ``early``: the offsets were complete before the kernel can
        start, because another product has read them. A ``side`` product is added to each.
        """
        pairs, (epilogue, function) = len(codes), epilogue_of(activation)
        kernel, grid, shared = self._plan(
            pairs, weight.num_experts, weight.out_features, epilogue, function, side is not None
        )
        clamp = (0.0, 0.0) if activation is None else clamp_arguments(activation)
        kernel(
            grid,
            GROUPED_THREADS,
            (
                *(side.arguments if side is not None else ()),
                codes.data.ptr,
                scales.data.ptr,
                offsets.data.ptr,
                *weight.arguments,
                out.data.ptr,
                pitch_of(out),
                weight.num_experts,
                weight.out_features,
                round_up(weight.in_features, 16),
                weight.pitch,
                *clamp,
            ),
            shared,
            self._launcher.stream,
            True,
            None,
            weight.bytes_of(min(pairs, weight.num_experts)) + nbytes_of(codes, out),
        )
        if step is not None:
            step.one_block_per_sm = False

    def _find_plan(
        self, pairs: int, experts: int, channels: int, epilogue: Epilogue, function: int, adapted: bool
    ) -> tuple[Kernel, int, int]:
        """The kernel, its number of blocks, and the bytes of shared memory of each."""
        launcher, tiles = self._launcher, tiles_for(pairs, experts)
        stages = stages_of(launcher.max_shared)
        shared = stages * stage_bytes(tiles) + SCHEDULE_BYTES
        expression = f"grouped_gemm{'_adapted' * adapted}<{tiles}, {int(epilogue)}, {function}>"
        kernel = launcher.kernel(self.source, expression, False, defines_of(stages))
        most = min(pairs, experts + pairs // (8 * tiles)) * ceil_div(channels, GROUPED_ROWS)  # tiles
        blocks = max(1, min(BLOCKS_PER_SM, launcher.max_shared // shared))
        return kernel, min(most, blocks * launcher.num_sms), shared


def epilogue_of(activation: ExpertActivation | None) -> tuple[Epilogue, int]:
    """The epilogue for an activation, and its number."""
    if activation is None:
        return Epilogue.TO_HALF, 0
    return Epilogue.GATED if activation.gated else Epilogue.ACTIVATED, activation_number(activation)


def tiles_for(pairs: int, experts: int) -> int:
    """The element of :data:`TILES` with which most experts have one tile, if ``pairs`` are spread over all experts."""
    rows = 1.5 * pairs / experts + 2
    return next((tiles for tiles in TILES if rows <= 8 * tiles), TILES[-1])


def stage_bytes(tiles: int) -> int:
    """Bytes of shared memory of a stage of the pipeline."""
    return (GROUPED_ROWS + 8 * tiles) * GROUPED_COLUMNS


def stages_of(shared: int) -> int:
    """Stages of the pipeline on a GPU whose blocks may have ``shared`` bytes of shared memory."""
    return min(MAX_STAGES, (shared - SCHEDULE_BYTES) // stage_bytes(TILES[-1]))


def defines_of(stages: int) -> tuple[str, ...]:
    """The macros of a kernel whose pipeline has ``stages`` stages."""
    return (f"PIPELINE_STAGES={stages}",)


def possible_epilogue(tiles: int, epilogue: int, function: int) -> bool:
    if epilogue == Epilogue.TO_HALF:
        return function == 0
    return epilogue == Epilogue.GATED or function != CLAMPED_SWIGLU
