"""Which row of the sampler's table each running sequence has, on the host. It writes nothing to a device.

What is to be written there is collected as :class:`RowWrite`, for the next step that is built: the scheduler gives and
takes rows, the executor writes them (:mod:`.sampler_table`). Row 0 belongs to no sequence: it pads a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..backend.sampling import ROW, SamplerVariant, SequenceSampling


@dataclass
class _Entry:
    """What the host knows of a row in use."""

    variant: SamplerVariant
    count_row: int
    mask_row: int


@dataclass(frozen=True)
class RowWrite:
    """What is written when a sequence gets a row: the row itself, one :data:`ROW`, and what ``sequence`` has beside it.

    ``count_row`` is -1 for a sequence without penalties.
    """

    row: int
    values: np.ndarray
    count_row: int
    sequence: SequenceSampling


@dataclass(frozen=True)
class MaskWrite:
    """Consecutive bit masks of the table from the row ``first`` on, uint32 ``[n, words]``."""

    first: int
    masks: np.ndarray


@dataclass(frozen=True)
class TableSize:
    """The rows of a sampler's table, of its counts and of its masks, for a vocabulary of ``vocab_size`` tokens.

    Of the ``max_num_seqs`` sequences at most ``max_penalized`` may have penalties at a time (4 bytes for each token of
    the vocabulary), and at most ``max_masked`` bit masks (a bit for each token). Such a sequence has a mask for its
    newest token, and one for each of up to ``num_draft_tokens`` drafts.
    """

    max_num_seqs: int
    vocab_size: int
    num_draft_tokens: int = 0
    max_penalized: int = 64
    max_masked: int = 256

    @property
    def rows(self) -> int:
        """Rows of the table, the null row included."""
        return self.max_num_seqs + 1

    @property
    def count_rows(self) -> int:
        """Rows of counts."""
        return min(self.max_penalized, self.max_num_seqs)

    @property
    def masks_per_sequence(self) -> int:
        """Consecutive masks of a sequence that has any."""
        return 1 + self.num_draft_tokens

    @property
    def mask_rows(self) -> int:
        """Rows of masks."""
        return min(self.max_masked, self.max_num_seqs) * self.masks_per_sequence

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask."""
        return (self.vocab_size + 31) // 32


class SamplerRows:
    """Gives rows to sequences, and names what is to be written to them."""

    def __init__(self, size: TableSize):
        self.size = size
        self._masks: np.ndarray | None = None
        self.clear()

    def clear(self) -> None:
        """Free every row, and forget what was to be written."""
        size = self.size
        self._free_rows = list(range(1, size.rows))[::-1]
        self._free_count_rows = list(range(size.count_rows))[::-1]
        self._free_mask_rows = list(range(0, size.mask_rows, size.masks_per_sequence))[::-1]
        self._entries: dict[int, _Entry] = {}
        self._writes: list[RowWrite] = []

    def has_room(self, penalized: bool = False, masked: bool = False) -> bool:
        """Whether :meth:`add` finds a free row for a sequence, and free counts and free masks if it needs them."""
        return (
            bool(self._free_rows)
            and (bool(self._free_count_rows) or not penalized)
            and (bool(self._free_mask_rows) or not masked)
        )

    def add(self, sequence: SequenceSampling, masked: bool = False) -> int:
        """Give a sequence a row, and return it. Check :meth:`has_room` first.

        With ``masked`` the sequence has bit masks; :meth:`fill_masks` fills them before each step that samples.
        """
        assert self.has_room(sequence.penalized, masked), "the sampler's table is full"
        variant = max(sequence.variant, SamplerVariant.ADJUST) if masked else sequence.variant
        row = self._free_rows.pop()
        entry = _Entry(
            variant,
            self._free_count_rows.pop() if sequence.penalized else -1,
            self._free_mask_rows.pop() if masked else -1,
        )
        self._entries[row] = entry
        values = np.empty(1, ROW)
        values[0] = sequence.row
        values["num_bias"], values["count_row"], values["mask_row"] = (
            len(sequence.bias),
            entry.count_row,
            entry.mask_row,
        )
        self._writes.append(RowWrite(row, values, entry.count_row, sequence))
        return row

    def remove(self, row: int) -> None:
        """Free a row. No step that is built from now on may use it; steps under way may."""
        entry = self._entries.pop(row)
        self._free_rows.append(row)
        if entry.count_row >= 0:
            self._free_count_rows.append(entry.count_row)
        if entry.mask_row >= 0:
            self._free_mask_rows.append(entry.mask_row)

    def take_writes(self) -> Sequence[RowWrite]:
        """What was added since the last call, in order."""
        writes, self._writes = self._writes, []
        return writes

    def variant(self, rows: Iterable[int]) -> SamplerVariant:
        """The variant of a step of the sequences in ``rows``."""
        return max((self._entries[row].variant for row in rows if row), default=SamplerVariant.GREEDY)

    def fill_masks(self, rows: Sequence[int], fill: Callable[[np.ndarray, Sequence[int]], None]) -> MaskWrite | None:
        """The bit masks of some rows, for the next step that samples; None without rows.

        ``fill`` gets all masks of the table, uint32 ``[M, words]``, and the first mask of each row, which it writes,
        with those behind it for the row's drafts: token ``t`` is allowed if bit ``t % 32`` of word ``t // 32`` is set.
        All masks from the first to the last of these rows are in the result.
        """
        if not rows:
            return None
        if self._masks is None:
            self._masks = np.zeros((self.size.mask_rows, self.size.mask_words), np.uint32)
        places = [self._entries[row].mask_row for row in rows]
        assert min(places) >= 0, "the sequence was added without a mask"
        fill(self._masks, places)
        first, end = min(places), max(places) + self.size.masks_per_sequence
        return MaskWrite(first, self._masks[first:end])
