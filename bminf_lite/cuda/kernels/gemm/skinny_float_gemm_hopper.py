"""Products with float activations of a few rows on compute capability 9.0: ``skinny_float_gemm_hopper.cu``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....backend.values import Norm
from ...runtime.kernel import Kernel
from ...runtime.tensor_maps import ROW_BYTES, TensorMapDataType, tensor_map
from ..arrays import WeightRows, address, ceil_div, nbytes_of, pitch_of, round_up
from ..constants import SKINNY_FLOAT_BOXES as BOXES
from ..constants import Epilogue, GemvInput
from ..instantiations import Capability, KernelFamily, Together, numbers
from ..launcher import Launcher, StepContext
from ..rowwise.rows import KERNEL_CACHE_SIZE, norm_arguments
from .float_operands import (
    ACTIVATION_NUMBERS,
    BLOCK,
    EPILOGUE_NUMBERS,
    INT8,
    KINDS,
    NO_MAP,
    WeightKind,
    kind_of,
    possible_epilogue,
    scale_map,
    weight_map,
)

if TYPE_CHECKING:
    import cupy as cp

WARP_CHANNELS = 16
"""Rows of the weight that a warp has of a tile."""
SYNC_ROWS, WGMMA_ROWS = (1, 8, 16), (8, 16, 32, 64)
"""Rows of the activations that the kernels by ``mma.sync`` and by wgmma are compiled for."""
SYNC_CHANNELS, WGMMA_CHANNELS = tuple(range(128, 0, -16)), (64, 48, 32, 16)
"""Rows of the weight in a tile."""
WGMMA_WARPS, NORM_WARPS, LOADING_WARPS = 4, 8, 2
INPUTS = (GemvInput.HALF, GemvInput.RMS_NORM, GemvInput.LAYER_NORM)
NORM_VECTORS = (1, 2, 4)
"""Vectors of eight elements that a thread has of a row that is normalised."""
MAX_NORM_WIDTH = 8 * 32 * NORM_WARPS * NORM_VECTORS[-1]
"""The kernel normalises an input of up to this many elements."""
WINDOW_BYTES = 64 << 10
"""Bytes of the weight in flight at the same time. More of them delay the loads of other blocks."""
RESIDENT_BYTES_OF_TWO, RESIDENT_BYTES = 32 << 10, 96 << 10
"""Activations of up to this many bytes stay in shared memory, if two blocks share an SM and if one has it alone."""
ROOM_OF_TWO = 110 << 10
"""Shared memory of a block, so that a block of the next kernel fits the SM beside it."""
BARRIER_BYTES, STATIC_BYTES, SCALES_ALIGNMENT = 1 << 10, 2 << 10, 128
MAX_STAGES = 40
MAX_BLOCKS_IN_COPY = 256
"""The most elements of a box in a dimension."""


@dataclass(frozen=True)
class _Plan:
    """The part of a launch that depends on the shapes. ``numbers`` are the kernel's last parameters."""

    kernel: Kernel
    warps: int
    shared: int
    channels: int
    blocks_in_copy: int
    is_swizzled: bool
    numbers: tuple[int, ...]

    @property
    def tiles(self) -> int:
        return self.numbers[1]

    def activations_map(self, x: cp.ndarray) -> bytes:
        """Boxes of blocks of 64 columns of all rows, see ``load_activations`` in the kernel."""
        (rows, k), pitch = x.shape, pitch_of(x)
        sizes, pitches = (BLOCK, rows, k // BLOCK), (pitch, BLOCK)
        if k % BLOCK:
            sizes, pitches = (k, rows, 1), (pitch, rows * pitch)
        box = BLOCK, rows, self.blocks_in_copy
        return tensor_map(x.data.ptr, TensorMapDataType.FLOAT16, sizes, pitches, box, swizzled=self.is_swizzled)


class SkinnyFloatGemmHopper:
    """Up to 64 rows in fp16, or one fp32 row that is normalised, times a weight of any kind."""

    source = "gemm/skinny_float_gemm_hopper.cu"
    max_rows = WGMMA_ROWS[-1]

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._plan = functools.lru_cache(KERNEL_CACHE_SIZE)(self._find_plan)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        if capability != (9, 0):
            return
        ways = (*(Together(("true", rows)) for rows in SYNC_ROWS), *(Together(("false", rows)) for rows in WGMMA_ROWS))
        inputs = tuple(Together((kind, vectors)) for kind in numbers(INPUTS) for vectors in NORM_VECTORS)
        values = (KINDS, ways, inputs, EPILOGUE_NUMBERS, ACTIVATION_NUMBERS)
        yield KernelFamily(cls.source, "bminf::skinny_float_gemm_hopper", values, _possible)

    def launch(
        self,
        step: StepContext,
        x: cp.ndarray,
        norm: Norm | None,
        weight: WeightRows,
        out: cp.ndarray,
        epilogue: int,
        activation: int = 0,
        early: bool = False,
    ) -> None:
        """``out = epilogue(x @ weight.T + bias)``; ``activation`` for a gated or activated epilogue.

        ``x`` is fp16 ``[rows, in_features]`` in padded rows, or with a ``norm`` one fp32 row. ``out`` has padded rows:
        fp16 or fp32 ``[rows, out_features]``, to which ``ADD`` adds, or fp16 ``[rows, out_features / 2]`` if gated.
        ``early``: ``x`` is complete before the kernel can start. With a norm the kernel then computes beside its
        predecessor, with a block for each tile and no more.
        """
        gated, shape = epilogue == Epilogue.GATED, (weight.out_features, weight.in_features)
        rows, kind, source = x.shape[0], kind_of(weight), int(input_of(norm))
        plan = self._plan(rows, *shape, kind, source, int(epilogue), int(activation))
        early = early and norm is not None and epilogue != Epilogue.ADD
        groups = columns_of_stage(kind) // kind.group_size if kind.group_size else 0
        args = (
            x.data.ptr,
            *norm_arguments(norm),
            address(weight.scale),
            address(weight.bias),
            out.data.ptr,
            pitch_of(out),
            rows,
            *shape,
            NO_MAP if norm is not None else plan.activations_map(x),
            weight_map(weight, ROW_BYTES // kind.itemsize, plan.channels, gated),
            scale_map(weight, plan.channels // (1 + gated), groups),
            *plan.numbers,
            early,
        )
        # Behind a kernel with another number of blocks, two of these blocks could land on one SM; see Gemv.launch.
        shared = plan.shared if step.one_block_per_sm else max(plan.shared, self._launcher.half_shared)
        blocks = min(self._launcher.num_sms, plan.tiles) if early else self._launcher.num_sms
        plan.kernel(
            blocks,
            32 * plan.warps,
            args,
            shared,
            self._launcher.stream,
            True,
            None,
            weight.nbytes + nbytes_of(x, out),
        )
        step.one_block_per_sm = blocks == self._launcher.num_sms

    def _find_plan(
        self, rows: int, n: int, k: int, kind: WeightKind, source: int, epilogue: int, activation: int
    ) -> _Plan:
        launcher, gated = self._launcher, epilogue == Epilogue.GATED
        sync = uses_sync(kind, rows)
        compiled = next(count for count in (SYNC_ROWS if sync else WGMMA_ROWS) if rows <= count)
        vectors = 1 if source == GemvInput.HALF else next(v for v in NORM_VECTORS if k <= 8 * 32 * NORM_WARPS * v)
        columns = columns_of_stage(kind)
        steps, blocks_of_stage = ceil_div(k, columns), columns // BLOCK
        blocks, two = steps * blocks_of_stage, compiled <= 16
        most = RESIDENT_BYTES_OF_TWO if two else RESIDENT_BYTES
        resident = source != GemvInput.HALF or blocks * rows * ROW_BYTES <= most
        in_copy = 1 if k % BLOCK else min(blocks, MAX_BLOCKS_IN_COPY) if resident else blocks_of_stage
        resident_bytes = round_up(blocks, in_copy) * rows * ROW_BYTES if resident else 0
        groups = columns // kind.group_size if kind.group_size else 0
        room = (ROOM_OF_TWO if two else launcher.max_shared - STATIC_BYTES) - resident_bytes - BARRIER_BYTES

        def stage_bytes(channels: int) -> int:
            scales = 2 * round_up(groups * channels // (1 + gated) * kind.scale_bytes, SCALES_ALIGNMENT)
            activations = 0 if resident else round_up(blocks_of_stage * rows * ROW_BYTES, 1024)
            return round_up(BOXES * channels * ROW_BYTES + scales, 1024) + activations

        def behind_bytes(channels: int) -> int:
            return compiled * ROW_BYTES + (0 if sync else (WGMMA_CHANNELS[0] - channels) * ROW_BYTES)

        def num_stages(channels: int) -> int:
            return min((room - behind_bytes(channels)) // stage_bytes(channels), MAX_STAGES)

        fitting = tuple(c for c in (SYNC_CHANNELS if sync else WGMMA_CHANNELS) if num_stages(c) >= 2)
        channels = best_channels(fitting, n, rows, kind, launcher.num_sms)
        stages = num_stages(channels)
        shared = BARRIER_BYTES + stages * stage_bytes(channels) + resident_bytes + behind_bytes(channels)
        window = max(1, min(stages, WINDOW_BYTES // (BOXES * channels * ROW_BYTES)))
        template = f"{kind}, {str(sync).lower()}, {compiled}, {source}, {vectors}, {epilogue}, {activation}"
        kernel = launcher.kernel(self.source, f"bminf::skinny_float_gemm_hopper<{template}>")
        warps = NORM_WARPS if source != GemvInput.HALF else channels // WARP_CHANNELS if sync else WGMMA_WARPS
        tiles = ceil_div(n // (1 + gated), channels // (1 + gated))
        return _Plan(
            kernel,
            warps + LOADING_WARPS,
            shared,
            channels,
            in_copy,
            not (sync and rows == 1),
            (channels, tiles, steps, stages, window, resident, in_copy, k % BLOCK != 0),
        )


def input_of(norm: Norm | None) -> GemvInput:
    """What is multiplied: fp16 rows, or a norm of a row."""
    return GemvInput.HALF if norm is None else GemvInput.LAYER_NORM if norm.center else GemvInput.RMS_NORM


def columns_of_stage(kind: WeightKind) -> int:
    """Columns of the weight in a stage of the pipeline."""
    return BOXES * ROW_BYTES // kind.itemsize


def uses_sync(kind: WeightKind, rows: int) -> bool:
    """Whether the kernel multiplies by ``mma.sync``: codes and few rows. Wider products of codes leave wgmma time."""
    return kind.element == INT8 and rows <= SYNC_ROWS[-1]


def best_channels(choices: tuple[int, ...], n: int, rows: int, kind: WeightKind, num_sms: int) -> int:
    """Rows of the weight in a tile: few rounds of the blocks, and few copies of the activations."""

    def cost(channels: int) -> float:
        rounds = ceil_div(ceil_div(n, channels), num_sms)
        return rounds * (channels * kind.itemsize + rows + TILE_OVERHEAD)

    return min(choices, key=cost)


TILE_OVERHEAD = 6
"""What a tile costs beside its columns, in bytes of a column."""


def _possible(kind: WeightKind, way: tuple[str, int], source: tuple[int, int], epilogue: int, activation: int) -> bool:
    sync, rows = way[0] == "true", way[1]
    if uses_sync(kind, rows) != sync or not possible_epilogue(epilogue, activation):
        return False
    if source[0] == GemvInput.HALF:
        return source[1] == 1
    return rows == (SYNC_ROWS if sync else WGMMA_ROWS)[0]
