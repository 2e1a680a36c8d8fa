"""The integers of guesses: what a draft model reads of some sequences to guess several tokens of each, one by one.

All of them lie in one array, as those of a step do (:mod:`.step_arrays`). A guess is the token of the next one, so it
stays on the device, where a step that checks it finds it. Guesses of a fixed size are captured, all in one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..backend.base import Backend
from ..backend.guesses import GuessPlace
from ..backend.sampling import SamplerState
from ..backend.values import Array, ForwardBatch
from .step_arrays import layout_of, pitch_of, split, up_to

StateOfRows = Callable[[Array, Array], SamplerState]
"""The sampler's state for some rows int32 ``[B]``, with offsets int32 ``[B]`` or None."""


@dataclass(frozen=True)
class GuessSize:
    """``count`` guesses of each of some ``sequences``, which have at most ``max_context_len`` tokens with them."""

    sequences: int
    count: int
    max_context_len: int


def guess_sizes(ops: Backend, lengths: Sequence[int], max_num_seqs: int, count: int) -> list[GuessSize]:
    """The sizes of captured guesses: they are padded to the first that they fit. ``lengths`` are bounds, ascending."""
    ends = [*dict.fromkeys((lengths[0], lengths[-1]))]
    sizes = up_to(ops.decode_sizes, max_num_seqs) if count else []
    return [GuessSize(sequences, count, length) for sequences in sizes for length in ends]


class GuessInputs:
    """The integers of guesses on the host, int32, for ``B`` sequences whose tables have ``widths``.

    ``pitch`` is ``B``, rounded up so that kernels find each row at a multiple of :data:`.step_arrays.ALIGNMENT`.
    ``tokens`` ``[pitch]`` are the newest ones, -1 where the sampler has it in its one of the ``rows`` ``[pitch]``.
    ``context_lens`` ``[count, pitch]`` are the positions of the newest tokens and of the guesses but the last;
    ``-1 - p`` stands for ``p`` and the number of tokens that the sequence has been given.
    """

    def __init__(self, size: GuessSize, widths: Sequence[int]):
        count = size.sequences
        self.size = size
        self.pitch = pitch = pitch_of((count,))
        self.shapes = [(pitch,), (count + 1,), (pitch,), (size.count, pitch), *((count, width) for width in widths)]
        self.packed = np.zeros(layout_of(tuple(self.shapes))[0], np.int32)
        self.tokens, cu_seqlens, self.rows, self.context_lens, *self.tables = split(self.packed, self.shapes)
        cu_seqlens[:] = np.arange(count + 1)


class GuessArrays:
    """The same on the device: a place for each guess, and the ``guesses`` int32 ``[count, pitch]`` of all.

    ``state`` gives the sampler's state for ``rows`` with ``offsets``, which is used whenever these guesses are made.
    """

    def __init__(self, ops: Backend, inputs: GuessInputs, state: StateOfRows):
        self._ops = ops
        self._packed = ops.array(inputs.packed)
        count = inputs.size.sequences
        self.guesses: Array = ops.array(np.zeros((inputs.size.count, inputs.pitch), np.int32))
        own = [row[:count] for row in self.guesses]
        tokens, cu_seqlens, rows, self._context_lens, *tables = split(self._packed, inputs.shapes)
        offsets = ops.array(np.repeat(np.arange(inputs.size.count, dtype=np.int32)[:, None], inputs.pitch, axis=1))
        self._sampler = state(rows, None)
        batches = [
            ForwardBatch(
                tokens=own[place - 1] if place else tokens[:count],
                cu_seqlens=cu_seqlens,
                context_lens=self._context_lens[place][:count],
                block_tables=tuple(tables),
                batch_size=count,
                max_query_len=1,
                max_context_len=inputs.size.max_context_len,
                num_decodes=count,
            )
            for place in range(inputs.size.count)
        ]
        self.places = [
            GuessPlace(batch, guesses, state(rows[:count], own_offsets[:count]))
            for batch, guesses, own_offsets in zip(batches, own, offsets, strict=True)
        ]

    def write(self, inputs: GuessInputs) -> None:
        """Set the integers for the work that is started from now on."""
        self._ops.write_step(self._packed, inputs.packed, inputs.size.sequences, self._sampler)
        if (inputs.context_lens < 0).any():
            self._ops.insert_positions(self._context_lens, self._sampler)


class CapturedGuesses:
    """Guesses of a fixed size: ``run`` makes them, and is captured."""

    def __init__(
        self, ops: Backend, inputs: GuessInputs, state: StateOfRows, guess: Callable[[Sequence[GuessPlace]], None]
    ):
        self.arrays = GuessArrays(ops, inputs, state)
        self.run = ops.capture(lambda: guess(self.arrays.places))
