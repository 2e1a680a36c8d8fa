"""Adapters of experts that the tokens of a step choose: their slots, and the launcher of ``adapters.cu``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arrays import PAD, address, nbytes_of, pitch_of, round_up
from ..constants import EXPERT_FLOAT_THREADS
from ..instantiations import BOOLEANS, Capability, KernelFamily, Together
from ..launcher import Launcher, StepContext
from ..rowwise.adapters import HEADER, RANKS
from .pairs import SortedPairs

if TYPE_CHECKING:
    import cupy as cp

TILES = (1, 1), (4, 1), (4, 2)
"""Tiles of 8 rows of one expert that a block computes at once, and groups of :data:`RANKS` columns."""
SLOTS_AT_ONCE = 4
"""Slots of a tile that have blocks of their own, at most."""


def expert_slot_bytes(rank: int, experts: int, widths: Sequence[int], features: int) -> int:
    """Bytes of the adapters of a padded ``rank`` of matrices ``[width, features]``, as ``pair_side.cuh`` lays them out.

    ``widths`` are those of one expert's matrices, which are equal.
    """
    of_expert = rank * (len(widths) * (4 + 2 * round_up(features, PAD)) + 2 * sum(widths))
    return round_up(HEADER + experts * of_expert, HEADER)


@dataclass(frozen=True)
class ExpertAdapterArrays:
    """The slots of one weight of all experts, uint8 ``[slots, bytes]``, as ``pair_side.cuh`` describes them.

    Each has room for ``rank_pitch`` ranks of ``features`` inputs, and ``sections`` matrices of ``width`` rows.
    """

    memory: cp.ndarray
    rank_pitch: int
    sections: int
    width: int
    features: int

    @property
    def columns(self) -> int:
        """Ranks of all sections."""
        return self.sections * self.rank_pitch


@dataclass(frozen=True)
class ExpertAdapters:
    """Adapters of both weights of a layer's experts."""

    hidden: ExpertAdapterArrays
    down: ExpertAdapterArrays


@dataclass(frozen=True)
class StepAdapters:
    """The adapters that the tokens of a step choose: the tokens' ``slots`` int32 ``[T]``, and what they read.

    That is ``x``, fp16 ``[T, in]`` with padded rows, in no other coordinates.
    """

    adapters: ExpertAdapters
    slots: cp.ndarray
    x: cp.ndarray


@dataclass(frozen=True)
class PairSide:
    """The side product of the sorted pairs of a step with one weight: ``inputs`` fp16 ``[pairs, columns]``.

    ``slots`` are those of :class:`.SortedPairs`. Rows of pairs without an adapter, and ranks behind that of a pair's
    slot, are not written.
    """

    of: ExpertAdapterArrays
    slots: cp.ndarray
    inputs: cp.ndarray

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ``PairSide`` of a kernel."""
        of = self.of
        return (
            self.slots.data.ptr,
            of.memory.data.ptr,
            of.memory.shape[1],
            self.inputs.data.ptr,
            of.sections,
            of.rank_pitch,
            round_up(of.features, PAD),
            of.width,
        )


class PairAdapterKernels:
    """The inputs of the side products of pairs whose tokens have adapters."""

    source = "experts/adapters.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "shrink_pairs", (BOOLEANS, BOOLEANS, tuple(map(Together, TILES))), _possible)

    def shrink(
        self,
        step: StepContext | None,
        x: cp.ndarray,
        by_pair: bool,
        factors: cp.ndarray | None,
        pairs: SortedPairs,
        top_k: int,
        side: PairSide,
    ) -> None:
        """Write the inputs of the side product.

        ``x`` are padded fp16 rows, of the sorted ``pairs`` if ``by_pair``, else of the tokens. These are multiplied by
        ``factors`` fp32 ``[T, top_k]``, if there are any.
        """
        count, experts, groups = len(side.inputs), len(pairs.offsets) - 1, side.of.columns // RANKS
        tiles, each = TILES[0] if count <= 4 * experts else TILES[1 + (groups % 2 == 0)]
        rows = 8 * tiles
        grid = groups // each, min(count, experts + count // rows), min(len(side.of.memory), SLOTS_AT_ONCE)
        sorted_by = pairs.offsets.data.ptr, experts, pairs.pairs.data.ptr, top_k
        self._launch(step, f"true, {BOOLEANS[by_pair]}, {tiles}, {each}", grid, sorted_by, x, by_pair, factors, side, 0)

    def shrink_unsorted(
        self,
        step: StepContext | None,
        x: cp.ndarray,
        factors: cp.ndarray | None,
        topk_ids: cp.ndarray,
        slots: cp.ndarray | None,
        side: PairSide,
    ) -> None:
        """The same of pairs in their own order, with the experts ``topk_ids`` int32 ``[T, top_k]``.

        With ``slots``, int32 ``[T]``, ``x`` are rows of tokens, and the slots are written to those of the pairs.
        Otherwise ``x`` are rows of pairs, which have slots.
        """
        by_pair = slots is None
        grid = side.of.columns // RANKS, topk_ids.size, 1
        pairs = 0, 0, topk_ids.data.ptr, topk_ids.shape[1]
        self._launch(step, f"false, {BOOLEANS[by_pair]}, 1, 1", grid, pairs, x, by_pair, factors, side, address(slots))

    def _launch(
        self,
        step: StepContext | None,
        arguments: str,
        grid: tuple[int, int, int],
        pairs: tuple[int, int, int, int],
        x: cp.ndarray,
        by_pair: bool,
        factors: cp.ndarray | None,
        side: PairSide,
        token_slots: int,
    ) -> None:
        assert factors is None or not by_pair
        self._launcher.launch(
            step,
            self.source,
            f"shrink_pairs<{arguments}>",
            grid,
            EXPERT_FLOAT_THREADS,
            (
                *side.arguments,
                *pairs,
                x.data.ptr,
                pitch_of(x),
                address(factors),
                side.of.features,
                token_slots,
            ),
            bytes_moved=nbytes_of(x, side.inputs),
        )


def _possible(is_sorted: str, by_pair: str, tiles: tuple[int, int]) -> bool:
    return is_sorted == BOOLEANS[1] or tiles == TILES[0]
