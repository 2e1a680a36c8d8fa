"""The sampler's table on the device: a row for each running sequence, written when the sequence comes and goes.

The table is allocated once and never moves, so a captured step stays valid while rows are written: the step reads the
rows that an index array names. Writing a row copies 128 bytes without waiting for the device; steps that were launched
before do not see it. A step runs in the largest variant (:class:`~bminf_lite.backend.sampling.SamplerVariant`) that one
of its sequences needs.

Biases, counts of tokens for penalties, and bit masks take more memory, which is allocated when the first sequence needs
any of it, or by :meth:`SamplerTable.allocate` before a step of the variant ``ADJUST`` or ``FULL``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    ROW,
    ROW_WORDS,
    SamplerState,
    SamplerVariant,
    SequenceSampling,
    neutral_rows,
)
from ..backend.values import Array


@dataclass
class _Entry:
    """What the host knows of a row in use."""

    variant: SamplerVariant
    count_row: int
    mask_row: int


class SamplerTable:
    """Rows for up to ``max_num_seqs`` sequences of a model with ``vocab_size`` tokens.

    At most ``max_penalized`` of them may have penalties at a time (4 bytes per token of the vocabulary each), and at
    most ``max_masked`` a bit mask (a bit per token). Row 0 belongs to no sequence: it pads a step.
    """

    def __init__(
        self, ops: Backend, max_num_seqs: int, vocab_size: int, max_penalized: int = 64, max_masked: int = 256
    ):
        self.ops = ops
        self.vocab_size = vocab_size
        self._num_rows = max_num_seqs + 1
        self._num_count_rows = min(max_penalized, max_num_seqs)
        self._num_mask_rows = min(max_masked, max_num_seqs)
        self._free_rows = list(range(1, self._num_rows))[::-1]
        self._free_count_rows = list(range(self._num_count_rows))[::-1]
        self._free_mask_rows = list(range(self._num_mask_rows))[::-1]
        self._entries: dict[int, _Entry] = {}
        self._masks: np.ndarray | None = None  # the masks as the host wrote them
        table = ops.array(neutral_rows(self._num_rows).view(np.int32).reshape(-1, ROW_WORDS))
        self._state = SamplerState(table, ops.array(np.zeros(1, np.int32)), SamplerVariant.GREEDY)

    def nbytes(self, full: bool = True) -> int:
        """Bytes on the device: of the table, and with ``full`` of what the variant ``ADJUST`` adds."""
        words = (self.vocab_size + 31) // 32
        added = self._num_rows * 2 * MAX_LOGIT_BIAS + self._num_count_rows * self.vocab_size
        return 4 * (self._num_rows * ROW_WORDS + full * (added + self._num_mask_rows * words))

    def allocate(self) -> None:
        """Allocate what the variant ``ADJUST`` needs, unless that was done. Raises ``MemoryError``."""
        if self._masks is not None:
            return
        words = (self.vocab_size + 31) // 32
        ops, masks = self.ops, np.zeros((self._num_mask_rows, words), np.uint32)
        self._state = replace(
            self._state,
            bias=ops.array(np.zeros((self._num_rows, 2, MAX_LOGIT_BIAS), np.int32)),
            counts=ops.array(np.zeros((self._num_count_rows, self.vocab_size), np.int32)),
            masks=ops.array(masks),
        )
        ops.complete(self._state.masks)  # so that masks are written after these zeros
        self._masks = masks

    def has_room(self, penalized: bool = False, masked: bool = False) -> bool:
        """Whether :meth:`add` finds a free row for a sequence, and free counts and a free mask if it needs them."""
        return (
            bool(self._free_rows)
            and (bool(self._free_count_rows) or not penalized)
            and (bool(self._free_mask_rows) or not masked)
        )

    def add(self, sequence: SequenceSampling, masked: bool = False) -> int:
        """Give a sequence a row and write it; returns the row. Steps started from now on may use it.

        With ``masked`` the sequence has a bit mask; :meth:`write_masks` fills it before each step that samples. Check
        :meth:`has_room` first. Raises ``MemoryError`` where :meth:`allocate` does.
        """
        assert self.has_room(sequence.penalized, masked), "the sampler's table is full"
        variant = max(sequence.variant, SamplerVariant.ADJUST) if masked else sequence.variant
        if variant >= SamplerVariant.ADJUST:
            self.allocate()
        row = self._free_rows.pop()
        entry = _Entry(
            variant,
            self._free_count_rows.pop() if sequence.penalized else -1,
            self._free_mask_rows.pop() if masked else -1,
        )
        self._entries[row] = entry
        written = np.empty(1, ROW)
        written[0] = sequence.row
        written["num_bias"], written["count_row"], written["mask_row"] = (
            len(sequence.bias), entry.count_row, entry.mask_row,
        )  # fmt: skip
        self.ops.write(self._state.table[row], written.view(np.int32))
        if sequence.bias:
            self.ops.write(self._state.bias[row], sequence.packed_bias())
        if sequence.penalized:
            self.ops.write(self._state.counts[entry.count_row], sequence.counted(self.vocab_size))
        return row

    def remove(self, row: int) -> None:
        """Free a row. No step that is started from now on may use it; steps under way may."""
        entry = self._entries.pop(row)
        self._free_rows.append(row)
        if entry.count_row >= 0:
            self._free_count_rows.append(entry.count_row)
        if entry.mask_row >= 0:
            self._free_mask_rows.append(entry.mask_row)

    def write_masks(self, rows: Sequence[int], fill: Callable[[np.ndarray, Sequence[int]], None]) -> None:
        """Replace the bit masks of some rows for the work that is started from now on.

        ``fill`` gets the masks of the table, uint32 ``[M, words]`` on the host, and the places of the rows' masks,
        which it writes: token ``t`` is allowed if bit ``t % 32`` of word ``t // 32`` is set. All masks from the first
        to the last of them travel in one copy.
        """
        if not rows:
            return
        assert self._masks is not None
        places = [self._entries[row].mask_row for row in rows]
        assert min(places) >= 0, "the sequence was added without a mask"
        fill(self._masks, places)
        first, end = min(places), max(places) + 1
        self.ops.write_for_sampler(self._state.masks[first:end], self._masks[first:end])

    def variant(self, rows: Sequence[int]) -> SamplerVariant:
        """The variant of a step of the sequences in ``rows``."""
        return max((self._entries[row].variant for row in rows if row), default=SamplerVariant.GREEDY)

    def reporting(self, count: int) -> SamplerState:
        """A state for ``count`` rows of logits that reports the most likely tokens; the table's rows are not used."""
        columns = neutral_rows(count + 1)
        columns["num_logprobs"] = MAX_LOGPROBS
        table = self.ops.array(columns.view(np.int32).reshape(-1, ROW_WORDS))
        return SamplerState(table, self.ops.array(np.arange(1, count + 1, dtype=np.int32)), SamplerVariant.FULL)

    def state(self, rows: Array, variant: SamplerVariant) -> SamplerState:
        """The state for a step of ``variant`` whose sequences have the rows ``rows``, int32 ``[B]`` on the device.

        A captured step keeps the array ``rows``; its values may change between replays. Allocate first for ``ADJUST``.
        """
        assert variant < SamplerVariant.ADJUST or self._masks is not None, "allocate() comes first"
        return replace(self._state, rows=rows, variant=variant)
