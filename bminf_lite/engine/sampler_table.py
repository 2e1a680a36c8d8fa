"""The sampler's table on the device: a row for each running sequence, written when the sequence comes.

The table is allocated once and never moves, so a captured step stays valid while rows are written: the step reads the
rows that an index array names. Writing a row copies 128 bytes without waiting for the device; steps that were launched
before do not see it. A step runs in the largest variant (:class:`~bminf_lite.backend.sampling.SamplerVariant`) that one
of its sequences needs.

Biases, counts of tokens for penalties, and bit masks take more memory, which is allocated when the first sequence needs
any of it, or by :meth:`SamplerTable.allocate` before a step of the variant ``ADJUST`` or ``FULL``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    NULL_ROW,
    ROW_WORDS,
    SamplerState,
    SamplerVariant,
    neutral_rows,
)
from ..backend.values import Array
from .sampler_rows import MaskWrite, RowWrite, TableSize
from .step_arrays import StepArrays


class SamplerTable:
    """The arrays of a :class:`SamplerState` for the rows that :class:`.SamplerRows` gives to sequences."""

    def __init__(self, ops: Backend, size: TableSize):
        self.ops = ops
        self.size = size
        self._is_allocated = False
        table = ops.array(neutral_rows(size.rows).view(np.int32).reshape(-1, ROW_WORDS))
        self._state = SamplerState(table, ops.array(np.zeros(1, np.int32)), SamplerVariant.GREEDY)

    def allocate(self) -> None:
        """Allocate what the variant ``ADJUST`` needs, unless that was done. Raises ``MemoryError``."""
        if self._is_allocated:
            return
        ops, size = self.ops, self.size
        self._state = replace(
            self._state,
            bias=ops.array(np.zeros((size.rows, 2, MAX_LOGIT_BIAS), np.int32)),
            counts=ops.array(np.zeros((size.count_rows, size.vocab_size), np.int32)),
            masks=ops.array(np.zeros((size.mask_rows, size.mask_words), np.uint32)),
        )
        ops.complete(self._state.masks)  # so that masks are written after these zeros
        self._is_allocated = True

    def write_null_row(self) -> None:
        """Write the row that pads steps as it is, so that a backend loads what writes rows."""
        self.ops.write(self._state.table[NULL_ROW], neutral_rows(1).view(np.int32))

    def write(self, writes: Sequence[RowWrite]) -> None:
        """Write rows for the work that is started from now on. Raises ``MemoryError`` where :meth:`allocate` does."""
        for write in writes:
            sequence = write.sequence
            self.ops.write(self._state.table[write.row], write.values.view(np.int32))
            if sequence.bias or sequence.penalized:
                self.allocate()
            if sequence.bias:
                self.ops.write(self._state.bias[write.row], sequence.packed_bias())
            if sequence.penalized:
                self.ops.write(self._state.counts[write.count_row], sequence.counted(self.size.vocab_size))

    def write_masks(self, write: MaskWrite | None) -> None:
        """Replace bit masks for the samplers that are started from now on."""
        if write is not None:
            self.allocate()
            target = self._state.masks[write.first : write.first + len(write.masks)]
            self.ops.write_for_sampler(target, write.masks)

    def reporting(self, count: int) -> SamplerState:
        """A state for ``count`` rows of logits that reports the most likely tokens; the table's rows are not used."""
        columns = neutral_rows(count + 1)
        columns["num_logprobs"] = MAX_LOGPROBS
        table = self.ops.array(columns.view(np.int32).reshape(-1, ROW_WORDS))
        return SamplerState(table, self.ops.array(np.arange(1, count + 1, dtype=np.int32)), SamplerVariant.FULL)

    def state(self, rows: Array, variant: SamplerVariant, offsets: Array = None, drafts: Array = None) -> SamplerState:
        """The state for a step of ``variant`` whose logits belong to the rows ``rows``, int32 ``[B]`` on the device.

        ``offsets`` and ``drafts`` are those of a :class:`SamplerState`. A captured step keeps the arrays; their values
        may change between replays. Raises ``MemoryError`` where :meth:`allocate` does.
        """
        if variant >= SamplerVariant.ADJUST:
            self.allocate()
        return replace(self._state, rows=rows, variant=variant, offsets=offsets, drafts=drafts)

    def state_of(self, arrays: StepArrays, variant: SamplerVariant) -> SamplerState:
        """The state for a step with these arrays, which keep it for their next step. Raises as :meth:`state` does."""
        found = arrays.samplers.get(variant)
        if found is None or found.bias is not self._state.bias:  # allocated since
            found = self.state(arrays.rows, variant, arrays.offsets, arrays.drafts)
            arrays.samplers[variant] = found
        return found
