"""The rows of a step that operations compute: all of its tokens, or those behind which logits are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from ..adapter_slots import AdapterSlots
from ..device import HostDevice
from ..functions import silently
from ..values import Array, ForwardBatch


class StepOperations(HostDevice):
    """What the groups of operations share: the step, its last tokens, and the rounding to the activation type."""

    adapter_slots: AdapterSlots | None = None
    """Room for adapters beside the weights of the model that is built next; None for a model without adapters."""

    @contextmanager
    def step(self, batch: ForwardBatch) -> Iterator[None]:
        slots = self.adapter_slots
        if slots is None:
            yield
            return
        before, slots.rows = slots.rows, batch.lora_ids
        try:
            yield
        finally:
            slots.rows = before

    def _go_on_with_last_tokens(self, batch: ForwardBatch) -> None:
        """The rows of the products that follow in the step are those whose logits are wanted."""
        if self.adapter_slots is not None and not (batch.logit_rows is None and batch.is_decode):
            self.adapter_slots.rows = batch.logit_lora_ids

    def last_tokens(self, x: Array, batch: ForwardBatch) -> Array:
        """The rows whose logits are wanted: ``[T, features]`` -> ``[L, features]``, by default each sequence's last.

        The products that follow in the step are of these rows.
        """
        self._go_on_with_last_tokens(batch)
        if batch.logit_rows is not None:
            return x[batch.logit_rows]
        return x if batch.is_decode else x[batch.cu_seqlens[1:] - 1]

    def last_token_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """The step whose only tokens are each sequence's last one, behind which all others are in the cache.

        Layers get it behind :meth:`last_tokens`. ``batch`` has ``last_positions``.
        """
        assert batch.last_positions is not None
        last = self._of_last_tokens(batch)
        if batch.layer_inputs is not None:
            last = replace(last, layer_inputs=self.last_tokens(batch.layer_inputs, batch))
        return replace(
            last,
            context_lens=batch.last_positions,
            max_query_len=1,
            num_decodes=batch.batch_size,
            has_drafts=False,
            last_positions=None,
        )

    def _of_last_tokens(self, batch: ForwardBatch) -> ForwardBatch:
        """``batch`` with the last token of each sequence alone."""
        ends = np.arange(batch.batch_size + 1, dtype=np.int32)
        return replace(batch, tokens=batch.tokens[batch.cu_seqlens[1:] - 1], cu_seqlens=ends)

    @silently
    def _round(self, x: Array) -> Array:
        """``x`` in the activation type; too large numbers become infinities."""
        return x.astype(self.activation_dtype, copy=False)


def sequences(batch: ForwardBatch) -> Iterator[tuple[int, slice]]:
    """The number of each sequence that has tokens, and its rows among the step's tokens."""
    ends = batch.cu_seqlens
    for b in range(batch.batch_size):
        if ends[b] < ends[b + 1]:
            yield b, slice(int(ends[b]), int(ends[b + 1]))


def positions_of(batch: ForwardBatch) -> Array:
    """Each token's position in its sequence, ``[T]``; 0 for the padding of a step."""
    ends = batch.cu_seqlens
    positions = np.zeros(len(batch.tokens), np.int64)
    positions[: ends[-1]] = np.arange(int(ends[-1])) - np.repeat(ends[:-1] - batch.context_lens, np.diff(ends))
    return positions
