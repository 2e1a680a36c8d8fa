"""Int8 products with scales of groups of columns, and the codes of such inputs.

These are the launchers of ``gemm/group_scales.cu`` and ``rowwise/quantize_groups.cu``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...runtime.driver import shared_memory_per_block
from ...runtime.kernel import Kernel
from ..arrays import WeightRows, address, ceil_div, nbytes_of, pitch_of, round_up
from ..constants import GROUP_SCALES_CHANNELS as CHANNELS
from ..constants import GROUP_SCALES_COLUMNS as COLUMNS
from ..constants import GROUP_SCALES_ROWS as ROWS
from ..constants import GROUP_SCALES_THREADS as THREADS
from ..constants import Activation, Epilogue
from ..instantiations import Capability, KernelFamily, numbers
from ..launcher import Launcher, StepContext
from ..rowwise.rows import KERNEL_CACHE_SIZE

if TYPE_CHECKING:
    import cupy as cp

MULTIPLE = 32
"""Groups are padded with zeros to a multiple of this many columns: those of an instruction."""
STEPS = (64, 32)
"""Columns that a lane's piece of a row belongs to: a group consists of whole steps."""
FEW_TILES = (1, 2, 4)
"""Tiles of 8 rows of the kernel for few rows."""
FEW_CHANNELS = 16
"""Channels of its blocks."""
MAX_STAGES = 4
STAGE_BYTES = (CHANNELS + ROWS) * COLUMNS
EPILOGUES = (Epilogue.TO_HALF, Epilogue.TO_FLOAT, Epilogue.ADD, Epilogue.GATED, Epilogue.ACTIVATED)


@dataclass(frozen=True)
class ColumnGroups:
    """``count`` groups of ``size`` columns of a weight, which lie ``padded`` columns apart in memory.

    The weight has a scale for each channel and group if ``of_weight``, else one for each channel; the input has one for
    each row and group if ``of_input``, else one for each row.
    """

    size: int
    count: int
    of_weight: bool
    of_input: bool

    @property
    def padded(self) -> int:
        return round_up(self.size, MULTIPLE)

    @property
    def pitch(self) -> int:
        """Codes of a row in memory, of the weight and of its input."""
        return self.count * self.padded

    @property
    def step(self) -> int:
        """Columns of a step."""
        return next(step for step in STEPS if self.padded % step == 0)


class GroupScalesGemm:
    """Products of any number of rows, from compute capability 7.5 on."""

    source = "gemm/group_scales.cu"
    codes_source = "rowwise/quantize_groups.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._plan = functools.lru_cache(KERNEL_CACHE_SIZE)(self._find_plan)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        defines = defines_of(stages_of(shared_memory_per_block(capability)))
        kinds = STEPS, numbers(EPILOGUES), numbers(Activation)
        yield KernelFamily(cls.source, "group_scales_few", (FEW_TILES, *kinds), _possible_few, defines)
        yield KernelFamily(cls.source, "group_scales_many", kinds, _possible, defines)
        yield KernelFamily(cls.codes_source, "quantize_groups", (("__half", "float"),))

    def launch(
        self, step: StepContext | None, codes: int, scales: int, scale_stride: int, rows: int, weight: WeightRows,
        groups: ColumnGroups, out: cp.ndarray, epilogue: Epilogue, activation: int = 0,
    ) -> None:  # fmt: skip
        """``out`` from int8 ``codes`` ``[rows, pitch]`` of ``groups``; ``codes`` and ``scales`` are addresses.

        ``scales`` is fp32, ``scale_stride`` elements from group to group, or 0 if a row has one scale. Those of the
        weight are ``[groups, out]`` in padded rows, or ``[out]``. ``activation`` for a gated or activated epilogue.
        """
        assert weight.scale is not None
        n, w_stride = weight.out_features, pitch_of(weight.scale) if groups.of_weight else 0
        kernel, grid, shared = self._plan(rows, n, groups.step, epilogue, int(activation))
        bytes_moved = (
            weight.nbytes + rows * groups.pitch + nbytes_of(out) if self._launcher.device.observer is not None else 0
        )
        kernel(
            grid, THREADS,
            (codes, scales, scale_stride, weight.matrix.data.ptr, address(weight.scale), w_stride,
             address(weight.bias), out.data.ptr, pitch_of(out), rows, n, groups.pitch, groups.padded, groups.count),
            shared, self._launcher.stream, True, None, bytes_moved,
        )  # fmt: skip
        if step is not None:
            step.one_block_per_sm = False

    def _find_plan(
        self, rows: int, n: int, columns: int, epilogue: Epilogue, activation: int
    ) -> tuple[Kernel, int | tuple[int, int], int]:
        """The kernel, its grid, and the bytes of dynamic shared memory of a block."""
        launcher = self._launcher
        tail, stages = f"{columns}, {int(epilogue)}, {activation}>", stages_of(launcher.max_shared)
        if rows <= 8 * FEW_TILES[-1]:
            tiles = next(tiles for tiles in FEW_TILES if rows <= 8 * tiles)
            kernel = launcher.kernel(self.source, f"group_scales_few<{tiles}, {tail}", False, defines_of(stages))
            return kernel, ceil_div(n, FEW_CHANNELS), 0
        kernel = launcher.kernel(self.source, f"group_scales_many<{tail}", False, defines_of(stages))
        return kernel, (ceil_div(rows, ROWS), ceil_div(n, CHANNELS)), stages * STAGE_BYTES

    def quantize(
        self, step: StepContext | None, x: cp.ndarray, codes: int, scales: int, scale_stride: int,
        groups: ColumnGroups,
    ) -> None:  # fmt: skip
        """The codes of rows of ``x``, fp16 or fp32, and a scale for each group, at addresses; see :meth:`launch`."""
        rows, kind = len(x), "__half" if x.itemsize == 2 else "float"
        self._launcher.launch(
            step, self.codes_source, f"quantize_groups<{kind}>", ceil_div(rows * groups.count, THREADS // 32), THREADS,
            (x.data.ptr, pitch_of(x), codes, scales, scale_stride, rows, groups.size, groups.padded, groups.count),
            bytes_moved=nbytes_of(x) + rows * groups.pitch,
        )  # fmt: skip


def stages_of(shared: int) -> int:
    """Stages of the pipeline on a GPU with so much shared memory per block."""
    return min(MAX_STAGES, shared // STAGE_BYTES)


def defines_of(stages: int) -> tuple[str, ...]:
    """The macros of a kernel with so many stages."""
    return (f"PIPELINE_STAGES={stages}",)


def _possible(step: int, epilogue: int, activation: int) -> bool:
    return epilogue in (Epilogue.GATED, Epilogue.ACTIVATED) or activation == 0


def _possible_few(tiles: int, step: int, epilogue: int, activation: int) -> bool:
    return _possible(step, epilogue, activation)
