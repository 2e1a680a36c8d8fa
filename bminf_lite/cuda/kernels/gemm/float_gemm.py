"""Products with float activations: fp16 rows times a weight in fp16, or in int8 with a scale per channel or per group.

All kernels sum in one order (``float_gemm.cuh``), so a row's bits do not depend on the number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....backend.values import Norm
from ...runtime.driver import shared_memory_per_block
from ...runtime.kernel import Kernel
from ..arrays import WeightRows, address, ceil_div, nbytes_of, pitch_of
from ..constants import Epilogue
from ..instantiations import Capability, KernelFamily, Together
from ..launcher import Launcher, StepContext
from ..rowwise.rows import KERNEL_CACHE_SIZE
from .float_gemm_hopper import FloatGemmHopper
from .float_operands import (
    ACTIVATION_NUMBERS,
    BLOCK,
    EPILOGUE_NUMBERS,
    KINDS,
    WeightKind,
    has_scales_for_tma,
    kind_of,
    possible_epilogue,
    scale_pitch,
)
from .skinny_float_gemm_hopper import MAX_NORM_WIDTH, SkinnyFloatGemmHopper

if TYPE_CHECKING:
    import cupy as cp


@dataclass(frozen=True)
class FloatTile:
    """A tile of ``float_gemm.cu``: warps along channels and along rows, and what each warp has of it.

    A warp has ``m`` times 16 channels and ``n`` times 8 rows; a stage of the pipeline has ``blocks`` times 64 columns.
    """

    warps_m: int
    warps_n: int
    m: int
    n: int
    blocks: int

    @property
    def channels(self) -> int:
        return self.warps_m * self.m * 16

    @property
    def rows(self) -> int:
        return self.warps_n * self.n * 8

    def stages(self, kind: WeightKind, room: int) -> int:
        """Stages of the pipeline, where a block has ``room`` bytes of shared memory and two should fit an SM."""
        return max(2, min(MAX_STAGES, room // 2 // self.stage_bytes(kind)))

    def stage_bytes(self, kind: WeightKind) -> int:
        """Bytes of a stage of the pipeline."""
        return self.blocks * BLOCK * (self.channels * kind.itemsize + self.rows * 2)

    @property
    def arguments(self) -> tuple[int, ...]:
        """Template arguments of the kernel."""
        return self.warps_m, self.warps_n, self.m, self.n, self.blocks


MAX_STAGES = 4
FEW_ROWS = (
    FloatTile(2, 1, 1, 1, 4),
    FloatTile(2, 1, 1, 2, 4),
    FloatTile(2, 1, 1, 4, 4),
    FloatTile(4, 1, 1, 8, 2),
)
"""For up to 8, 16, 32 and 64 rows."""
MANY_ROWS, MANY_ROWS_OF_GROUPS = FloatTile(2, 2, 4, 8, 1), FloatTile(4, 2, 2, 8, 1)
"""A warp has fewer outputs if groups have scales, because each output has two sums then."""


def tiles_of(kind: WeightKind) -> tuple[FloatTile, ...]:
    """The tiles for a kind of weights, by their rows."""
    return (*FEW_ROWS, MANY_ROWS_OF_GROUPS if kind.group_size else MANY_ROWS)


class FloatGemmSync:
    """Any rows in fp16 times a weight of any kind, by the kernel of ``float_gemm.cu``."""

    source = "gemm/float_gemm.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._plan = functools.lru_cache(KERNEL_CACHE_SIZE)(self._find_plan)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        room = shared_memory_per_block(capability)
        for kind in KINDS:
            tiles = tuple(Together((*tile.arguments, tile.stages(kind, room))) for tile in tiles_of(kind))
            yield KernelFamily(
                cls.source, "float_gemm", ((kind,), tiles, EPILOGUE_NUMBERS, ACTIVATION_NUMBERS), _possible
            )

    def launch(
        self, step: StepContext, x: cp.ndarray, weight: WeightRows, out: cp.ndarray, epilogue: int, activation: int = 0
    ) -> None:
        """As :meth:`SkinnyFloatGemmHopper.launch`."""
        rows, n = x.shape[0], weight.out_features
        kernel, grid, block, shared = self._plan(rows, n, kind_of(weight), int(epilogue), int(activation))
        args = (
            x.data.ptr,
            pitch_of(x),
            weight.matrix.data.ptr,
            weight.pitch,
            address(weight.scale),
            scale_pitch(weight),
            address(weight.bias),
            out.data.ptr,
            pitch_of(out),
            rows,
            n,
            weight.in_features,
        )
        kernel(grid, block, args, shared, self._launcher.stream, True, None, weight.nbytes + nbytes_of(x, out))
        step.one_block_per_sm = False

    def _find_plan(
        self, rows: int, n: int, kind: WeightKind, epilogue: int, activation: int
    ) -> tuple[Kernel, tuple[int, int], int, int]:
        """The kernel, its blocks, the threads of a block, and its shared memory."""
        *few, many = tiles_of(kind)
        tile = next((tile for tile in few if rows <= tile.rows), many)
        stages = tile.stages(kind, self._launcher.max_shared)
        template = f"{kind}, {', '.join(map(str, tile.arguments))}, {stages}, {epilogue}, {activation}"
        grid = ceil_div(rows, tile.rows), ceil_div(n, tile.channels)
        kernel = self._launcher.kernel(self.source, f"float_gemm<{template}>")
        return kernel, grid, 32 * tile.warps_m * tile.warps_n, stages * tile.stage_bytes(kind)


class FloatProductKernels:
    """The kernels of one GPU, which give the same bits."""

    def __init__(self, launcher: Launcher) -> None:
        self.sync = FloatGemmSync(launcher)
        self.is_hopper = launcher.device.compute_capability == (9, 0)
        self.skinny, self.many = SkinnyFloatGemmHopper(launcher), FloatGemmHopper(launcher)

    def normalises(self, rows: int, weight: WeightRows, epilogue: int) -> bool:
        """Whether :meth:`launch` takes a norm of ``rows`` rows."""
        fits = self.is_hopper and rows == 1 and weight.in_features <= MAX_NORM_WIDTH
        return fits and has_scales_for_tma(weight, epilogue == Epilogue.GATED)

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

        ``x`` is fp16 ``[rows, in_features]`` in padded rows, or fp32 with a ``norm`` that the kernel computes
        (:meth:`normalises`). ``out`` has padded rows: fp16 or fp32 ``[rows, out_features]``, to which ``ADD`` adds, or
        fp16 ``[rows, out_features / 2]`` if gated. ``early``: what is normalised is complete before the kernel can
        start (:meth:`.StepContext.reads`).
        """
        if not (self.is_hopper and has_scales_for_tma(weight, epilogue == Epilogue.GATED)):
            assert norm is None
            self.sync.launch(step, x, weight, out, epilogue, activation)
        elif x.shape[0] <= self.skinny.max_rows:
            self.skinny.launch(step, x, norm, weight, out, epilogue, activation, early)
        else:
            self.many.launch(step, x, weight, out, epilogue, activation)


def _possible(kind: WeightKind, tile: tuple[int, ...], epilogue: int, activation: int) -> bool:
    return possible_epilogue(epilogue, activation)
