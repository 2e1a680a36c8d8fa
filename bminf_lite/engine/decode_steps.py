"""Decode steps of a few padded sizes, so that a backend with graphs captures each size once.

A captured step holds addresses, and its launches do not depend on lengths. Its inputs therefore lie in one array that
never moves: a step writes them there with a single copy. A step with fewer sequences than its size is padded with
sequences that own nothing: their tables name the null block, and the sampler does not see them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import NULL_ROW, SamplerState, SamplerVariant
from ..backend.values import Array, ForwardBatch
from ..layers.cache import blocks_for

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Numbers of sequences. Further ones are multiples of 128."""
CONTEXTS = (4096, 32768)
"""Bounds of the longest context of a step, besides the model's own. They bound the width of the tables."""


@dataclass(frozen=True)
class DecodeInputs:
    """One new token of each of ``n`` sequences, on the host; all int32.

    ``tokens`` ``[n]`` are -1 where the sampler holds the token. ``rows`` ``[n]`` are the sampler's rows, ``tables`` the
    block tables of each group ``[n, W]``, and ``source_tables`` and ``source_lens`` those of sources, or None.
    """

    tokens: np.ndarray
    rows: np.ndarray
    context_lens: np.ndarray
    tables: Sequence[np.ndarray]
    source_tables: np.ndarray | None = None
    source_lens: np.ndarray | None = None


class DecodeSteps:
    """The decode steps of a model: ``forward`` computes the logits of a batch.

    Contexts have up to ``context_length`` tokens in ``num_groups`` groups of layers, and sources up to
    ``max_source_length``; 0 without an encoder. ``table`` is the sampler's.
    """

    def __init__(
        self,
        ops: Backend,
        forward: Callable[[ForwardBatch], Array],
        table: Array,
        *,
        max_num_seqs: int,
        num_groups: int,
        context_length: int,
        max_source_length: int = 0,
    ):
        self._ops = ops
        self._forward = forward
        self._table = table
        self._num_groups = num_groups
        self._max_source_length = max_source_length
        self._contexts = [c for c in CONTEXTS if c < context_length] + [context_length]
        self._source_width = blocks_for(max_source_length)
        self.sizes = padded_sizes(max_num_seqs)
        words = self._words(blocks_for(context_length)) * self.sizes[-1]
        self._inputs = ops.array(np.zeros(words, np.int32))
        self._steps: dict[tuple[int, int], Callable[[], Array]] = {}

    def run(self, inputs: DecodeInputs) -> Array:
        """Logits fp32 ``[n, vocab]``, valid until the next step."""
        count = len(inputs.tokens)
        size = self.sizes[bisect_left(self.sizes, count)]
        context = self._contexts[bisect_left(self._contexts, int(inputs.context_lens.max()) + 1)]
        self._ops.write(self._inputs[: size * self._words(blocks_for(context))], self._packed(inputs, size, context))
        return self._step(size, context)()[:count]

    def warm_up(self) -> None:
        """Capture every step, with sequences that own nothing, the largest first."""
        for context in reversed(self._contexts):
            for size in reversed(self.sizes):
                zeros = np.zeros(size * self._words(blocks_for(context)), np.int32)
                self._ops.write(self._inputs[: len(zeros)], zeros)
                for _ in range(3):  # a backend captures the third call
                    self._step(size, context)()

    def _words(self, width: int) -> int:
        """Numbers of one sequence, for tables of ``width`` blocks."""
        return 3 + self._num_groups * width + (1 + self._source_width if self._source_width else 0)

    def _packed(self, inputs: DecodeInputs, size: int, context: int) -> np.ndarray:
        """The inputs in the order of :meth:`_batch`, padded."""
        width = blocks_for(context)
        columns = [inputs.tokens, inputs.rows, inputs.context_lens]
        if inputs.source_lens is not None:
            columns.append(inputs.source_lens)
        tables = [(table, width) for table in inputs.tables]
        if inputs.source_tables is not None:
            tables.append((inputs.source_tables, self._source_width))
        packed, end = np.zeros(size * self._words(width), np.int32), 0
        count = len(inputs.tokens)
        for column in columns:
            packed[end : end + count] = column
            end += size
        for table, own_width in tables:
            packed[end : end + size * own_width].reshape(size, own_width)[:count, : table.shape[1]] = table
            end += size * own_width
        return packed

    def _step(self, size: int, context: int) -> Callable[[], Array]:
        if (size, context) not in self._steps:
            batch, rows = self._batch(size, context)
            sampler = SamplerState(self._table, rows, SamplerVariant.GREEDY)

            def step() -> Array:
                self._ops.insert_last_tokens(batch.tokens, sampler)
                return self._forward(batch)

            self._steps[size, context] = self._ops.capture(step)
        return self._steps[size, context]

    def _batch(self, size: int, context: int) -> tuple[ForwardBatch, Array]:
        """The arguments of a step, and the sampler's rows: views of the inputs."""
        width, end = blocks_for(context), 0

        def take(count: int) -> Array:
            nonlocal end
            end += count
            return self._inputs[end - count : end]

        tokens, rows, context_lens = take(size), take(size), take(size)
        source_lens = take(size) if self._source_width else None
        tables = tuple(take(size * width).reshape(size, width) for _ in range(self._num_groups))
        source = take(size * self._source_width).reshape(size, self._source_width) if self._source_width else None
        batch = ForwardBatch(
            tokens=tokens,
            cu_seqlens=self._ops.array(np.arange(size + 1, dtype=np.int32)),
            context_lens=context_lens,
            block_tables=tables,
            batch_size=size,
            max_query_len=1,
            max_context_len=context,
            num_decodes=size,
            source_tables=source,
            source_lens=source_lens,
            max_source_len=self._max_source_length,
        )
        return batch, rows


def padded_sizes(max_num_seqs: int) -> list[int]:
    """The sizes of steps with up to ``max_num_seqs`` sequences, ascending."""
    further = range(SIZES[-1] + 128, max_num_seqs + 128, 128)
    return [size for size in SIZES if size < max_num_seqs] + [n for n in further if n < max_num_seqs] + [max_num_seqs]


assert NULL_ROW == 0, "zeros pad a step"
