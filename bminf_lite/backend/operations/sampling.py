"""The sampler, and what it inserts into the arrays of a step that was launched before its tokens were known."""

from __future__ import annotations

import numpy as np

from ..device import HostDevice
from ..guesses import guess
from ..sampling import SamplerState, score
from ..sampling import sample as sample_tokens
from ..values import Array


class SamplingOperations(HostDevice):
    """Choosing tokens, as :mod:`..sampling` defines it."""

    def sample(self, logits: Array, sampler: SamplerState) -> Array:
        """Choose the next token of each row of a step, as :mod:`..sampling` defines it, from fp32 ``[B, vocab]``.

        Returns int32 ``[2, B]``, or ``[2 + 2 * MAX_LOGPROBS, B]`` in the variant ``FULL``: what ``Choice.packed`` says.
        Row 0 holds the tokens (-1 where no token can be chosen), row 1 the bits of their fp32 log-probabilities. The
        sampler's state advances by the tokens that its sequences get.
        """
        return sample_tokens(logits, sampler).packed()

    def token_logprobs(self, logits: Array, tokens: Array) -> Array:
        """The log-softmax of each row of ``logits`` at its token, and the largest: fp32 ``[n, vocab]``, int32 ``[n]``.

        Returns int32 ``[3, n]``, see :meth:`.TokenScores.packed`. Sums have the same order as in :meth:`sample`.
        """
        return score(logits, tokens).packed()

    def guess(self, logits: Array, out: Array, sampler: SamplerState, ids: Array = None) -> None:
        """Write what a draft model guesses, from its ``logits`` fp32 ``[n, vocab]``, to ``out`` int32 ``[n]``.

        :mod:`..guesses` defines it. With ``ids`` int32 ``[vocab]``, what stands at its place there is written instead.
        """
        tokens = guess(logits, sampler)
        out[...] = tokens if ids is None else ids[tokens]

    def insert_last_tokens(self, tokens: Array, sampler: SamplerState) -> None:
        """Replace -1 among a step's first tokens by the newest token of its sequence, in place.

        ``tokens`` is int32 ``[T]``; token ``i`` belongs to the sequence in row ``sampler.rows[i]``, for the leading
        sequences of the step. So the host can launch a step before it knows the tokens that the previous step chose.
        """
        count = min(len(tokens), len(sampler.rows))
        newest = sampler.columns["last_token"][sampler.rows[:count]]
        tokens[:count] = np.where(tokens[:count] < 0, newest, tokens[:count])

    def write_step(self, target: Array, values: np.ndarray, num_tokens: int, sampler: SamplerState) -> None:
        """:meth:`write` the integers of a step, then :meth:`insert_last_tokens` into the first ``num_tokens`` of them.

        ``target`` and ``values`` are int32 ``[n]``, and hold ``sampler.rows`` too.
        """
        self.write(target, values)
        self.insert_last_tokens(target[:num_tokens], sampler)

    def insert_guesses(self, tokens: Array, drafts: Array, guesses: Array) -> Array:
        """Replace ``-1 - i`` among a step's drafts by guess ``i``, and the token at the same place too, in place.

        Returns the drafts again, in an array that is used for nothing else, so that they can be fetched.

        ``drafts`` is int32 ``[B]``, ``tokens`` int32 with at least as many, and ``guesses`` int32, contiguous. So the
        host can launch a step before it knows the guesses that the step checks.
        """
        places = np.flatnonzero(drafts < 0)
        drafts[places] = tokens[places] = guesses.reshape(-1)[-1 - drafts[places]]
        return drafts.copy()

    def insert_positions(self, positions: Array, sampler: SamplerState) -> None:
        """Replace ``-1 - p`` by ``p`` and the number of tokens that the sequence has been given, in place.

        ``positions`` is int32 ``[..., B]``, contiguous; the sequences are those of ``sampler.rows``. So the host can
        launch a step before it knows how many drafts the previous step accepted.
        """
        moved = -1 - positions + sampler.columns["step"][sampler.rows]
        positions[...] = np.where(positions < 0, moved, positions)
