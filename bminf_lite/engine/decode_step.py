"""A decode step of a fixed size, which a backend with graphs captures once and replays for any sequences.

Everything that changes from step to step lies in arrays of fixed shape and address: tokens, lengths, rows of the
sampler, block tables. A step of fewer sequences is padded with sequences that own nothing: their tables name the null
block and their row of the sampler is the null row, so they change nothing that anything reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import SamplerState, SamplerVariant
from ..backend.values import BLOCK_SIZE, Array, ForwardBatch

ALIGNMENT = 32
"""Arrays of a step's integers begin at multiples of this many."""


@dataclass(frozen=True)
class StepSize:
    """What a captured step depends on: the most sequences, their greatest length in tokens, the sampler's variant."""

    sequences: int
    max_context_len: int
    variant: SamplerVariant

    @classmethod
    def of(
        cls, sequences: int, context_len: int, variant: SamplerVariant, sizes: Sequence[int], lengths: Sequence[int]
    ) -> StepSize | None:
        """The smallest of ``sizes`` and of ``lengths``, both ascending, that hold a step; None if none does."""
        size, length = bisect_left(sizes, sequences), bisect_left(lengths, context_len)
        return cls(sizes[size], lengths[length], variant) if size < len(sizes) and length < len(lengths) else None


@dataclass(frozen=True)
class StepInputs:
    """The integers of a step of ``B`` sequences on the host.

    ``tokens`` is int32 ``[T]`` and ``context_lens`` int32 ``[B]``. ``rows`` are the rows of the sampler for the
    sequences that sample. ``tables`` has an array int32 ``[B, W]`` for each group of layers. ``source_table`` int32
    ``[B, W]`` and ``source_lens`` int32 ``[B]`` belong to an encoder-decoder.
    """

    tokens: np.ndarray
    context_lens: np.ndarray
    rows: np.ndarray
    tables: Sequence[np.ndarray]
    source_table: np.ndarray | None = None
    source_lens: np.ndarray | None = None

    @classmethod
    def of_no_sequence(cls, groups: int, has_source: bool) -> StepInputs:
        """A step that is padding alone."""
        empty, table = np.zeros(0, np.int32), np.zeros((0, 1), np.int32)
        return cls(empty, empty, empty, [table] * groups, table if has_source else None, empty if has_source else None)


class DecodeStep:
    """A step of up to ``size.sequences`` sequences of up to ``size.max_context_len`` tokens each after it.

    ``widths`` are those of the block tables, the last one that of the sources if ``has_source``. ``run`` computes a
    batch and returns what ``Backend.sample`` does.
    """

    def __init__(
        self,
        ops: Backend,
        size: StepSize,
        widths: Sequence[int],
        has_source: bool,
        sampler: Callable[[Array], SamplerState],
        run: Callable[[ForwardBatch, SamplerState], Array],
    ):
        self._ops = ops
        count = self._count = size.sequences
        pitch = -(-count // ALIGNMENT) * ALIGNMENT
        self._vectors = ops.array(np.zeros((4, pitch), np.int32))
        tokens, context_lens, rows, source_lens = (self._vectors[i, :count] for i in range(4))
        self._held = [np.zeros((count, width), np.int32) for width in widths]
        self._tables = [ops.array(table) for table in self._held]
        batch = ForwardBatch(
            tokens=tokens,
            cu_seqlens=ops.array(np.arange(count + 1, dtype=np.int32)),
            context_lens=context_lens,
            block_tables=tuple(self._tables[: len(widths) - has_source]),
            batch_size=count,
            max_query_len=1,
            max_context_len=size.max_context_len,
            num_decodes=count,
            source_tables=self._tables[-1] if has_source else None,
            source_lens=source_lens if has_source else None,
            max_source_len=BLOCK_SIZE * widths[-1] if has_source else 0,
        )
        state = sampler(rows)
        self._replay = ops.capture(lambda: run(batch, state))

    def launch(self, inputs: StepInputs) -> Array:
        """Start the step; the result has a column for each of its sequences, padding included."""
        vectors = np.zeros(self._vectors.shape, np.int32)
        for row, values in zip(vectors, (inputs.tokens, inputs.context_lens, inputs.rows), strict=False):
            row[: len(values)] = values
        tables = list(inputs.tables)
        if inputs.source_table is not None and inputs.source_lens is not None:
            tables.append(inputs.source_table)
            vectors[3, : len(inputs.source_lens)] = inputs.source_lens
        self._ops.write(self._vectors, vectors)
        for held, array, table in zip(self._held, self._tables, tables, strict=True):
            count, width = table.shape
            if not np.array_equal(held[:count, :width], table) or held[count:].any() or held[:, width:].any():
                held[...] = 0
                held[:count, :width] = table
                self._ops.write(array, held)
        return self._replay()
