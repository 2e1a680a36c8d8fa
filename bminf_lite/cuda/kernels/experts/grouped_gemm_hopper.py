"""int8 products of sorted pairs on compute capability 9.0: the same results as :mod:`.grouped_gemm`, faster.

``grouped_gemm_hopper.cu`` multiplies with wgmma from shared memory that TMA copies fill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....backend.expert_values import ExpertActivation
from ...runtime.kernel import Kernel
from ...runtime.tensor_maps import TensorMapDataType, tensor_map_2d
from ..arrays import ceil_div, nbytes_of, pitch_of, round_up
from ..constants import GROUPED_COLUMNS, Epilogue
from ..constants import GROUPED_HOPPER_STAGE_STATE_BYTES as STAGE_STATE_BYTES
from ..constants import GROUPED_HOPPER_WEIGHT_BOX as WEIGHT_BOX
from ..instantiations import BOOLEANS, Capability, KernelFamily, Together, numbers
from ..launcher import Launcher, StepContext
from .adapters import PairSide
from .grouped_gemm import EPILOGUES, FUNCTIONS, SCHEDULE_BYTES, GroupedGemm, epilogue_of, possible_epilogue
from .weights import ExpertMatrices, clamp_arguments

if TYPE_CHECKING:
    import cupy as cp

THREADS = 384
BOXES = 8, 32
"""Rows of sorted pairs in a box of the two tensor maps."""
MAX_STAGES = 8


@dataclass(frozen=True)
class GroupedTile:
    """A tile: channels of the weight, and sorted rows of one expert at most; and bytes of a transposed piece."""

    channels: int
    rows: int

    @property
    def arguments(self) -> Together:
        """The first template arguments of the kernel."""
        return Together((self.channels, self.rows))

    def stages(self, room: int) -> int:
        """Stages of the pipeline in ``room`` bytes of shared memory."""
        return min(MAX_STAGES, (room - self._fixed) // self._stage)

    def shared(self, stages: int) -> int:
        """Bytes of shared memory."""
        return self._fixed + stages * self._stage

    @property
    def _stage(self) -> int:
        return (self.channels + self.rows) * GROUPED_COLUMNS + STAGE_STATE_BYTES

    @property
    def _fixed(self) -> int:
        pieces = 4 * (4096 if self.channels == WEIGHT_BOX else 2048)
        return pieces + 4 * self.rows * 4 + SCHEDULE_BYTES


TILES = GroupedTile(128, 64), GroupedTile(256, 160)
"""The tiles for few rows of each expert, and for many."""
ADAPTED_TILES = GroupedTile(128, 64), GroupedTile(256, 128)
"""The same where adapters add to the products, which takes registers."""


class GroupedGemmHopper(GroupedGemm):
    """The kernel of ``experts/grouped_gemm_hopper.cu``."""

    source = "experts/grouped_gemm_hopper.cu"

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        if capability == (9, 0):
            for name, tiles in (("grouped_gemm_hopper", TILES), ("grouped_gemm_hopper_adapted", ADAPTED_TILES)):
                values = (tuple(tile.arguments for tile in tiles), numbers(EPILOGUES), FUNCTIONS, BOOLEANS)
                yield KernelFamily(cls.source, f"bminf::{name}", values, _possible)

    def __init__(self, launcher: Launcher) -> None:
        super().__init__(launcher)
        self.supported = launcher.device.compute_capability == (9, 0)

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
        pairs, (epilogue, function) = len(codes), epilogue_of(activation)
        early = early and activation is None
        tile = tile_for(pairs, weight.num_experts, side is not None)
        kernel, grid, shared, stages = self._hopper_plan(
            pairs, weight, tile, epilogue, function, early, side is not None
        )
        columns = round_up(weight.in_features, 16)
        maps = [
            tensor_map_2d(codes.data.ptr, TensorMapDataType.INT8, pairs, columns, pitch_of(codes), box, False)
            for box in BOXES
        ]
        channels = len(weight.matrix) * weight.out_features
        w_map = tensor_map_2d(
            weight.matrix.data.ptr, TensorMapDataType.INT8, channels, columns, weight.pitch, WEIGHT_BOX
        )
        clamp = (0.0, 0.0) if activation is None else clamp_arguments(activation)
        _, slots, *operands = weight.arguments
        kernel(
            grid,
            THREADS,
            (
                *(side.arguments if side is not None else ()),
                scales.data.ptr,
                offsets.data.ptr,
                slots,
                claimed.data.ptr,
                *operands,
                out.data.ptr,
                pitch_of(out),
                weight.num_experts,
                weight.out_features,
                ceil_div(columns, GROUPED_COLUMNS),
                stages,
                *clamp,
                *maps,
                w_map,
            ),
            shared,
            self._launcher.stream,
            True,
            None,
            weight.bytes_of(min(pairs, weight.num_experts)) + nbytes_of(codes, out),
        )
        if step is not None:
            step.one_block_per_sm = True

    def _hopper_plan(
        self,
        pairs: int,
        weight: ExpertMatrices,
        tile: GroupedTile,
        epilogue: Epilogue,
        function: int,
        early: bool,
        adapted: bool,
    ) -> tuple[Kernel, int, int, int]:
        """The kernel, its number of blocks, the bytes of shared memory of each, and the stages of the pipeline."""
        stages = tile.stages(self._launcher.max_shared)
        name = "bminf::grouped_gemm_hopper_adapted" if adapted else "bminf::grouped_gemm_hopper"
        expression = f"{name}<{tile.arguments}, {int(epilogue)}, {function}, {BOOLEANS[early]}>"
        kernel = self._launcher.kernel(self.source, expression)
        most = min(pairs, weight.num_experts + pairs // tile.rows) * ceil_div(weight.out_features, tile.channels)
        return kernel, min(most, self._launcher.num_sms), tile.shared(stages), stages


def tile_for(pairs: int, experts: int, adapted: bool = False) -> GroupedTile:
    """The tile with which an expert has one tile, if ``pairs`` are spread over all experts."""
    return (ADAPTED_TILES if adapted else TILES)[1.3 * pairs / experts + 8 > TILES[0].rows]


def _possible(tile: tuple[int, int], epilogue: int, function: int, early: str) -> bool:
    return possible_epilogue(0, epilogue, function) and (early == BOOLEANS[0] or epilogue == Epilogue.TO_HALF)
