"""What a draft model guesses from its logits: the definition.

The random word with which the model will draw a token is known before: it follows from the seed, the sequence and its
step. A guess is drawn with the same word. Both draws take the token in which the word's position lies, in weights that
are laid end to end by ascending token id, so they agree where both models' distributions lie over each other. The most
likely token would be right only as often as the model draws it. A draft model's distribution is one of several that the
model may have, and where they disagree about the position its likelier tokens are the better guess: so the temperature
is that of the sequence times :data:`.GUESS_HEAT`.

No result depends on a guess, only how many of them are accepted. So what is left out here costs nothing but that:
biases, penalties, masks, the least number of tokens, and what top-k, top-p and min-p drop, which are mostly tokens that
hardly weigh at the lower temperature. Sums are fp64 here and fp32 on a GPU. Where the position lies on the edge of a
token, they may guess different neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .sampling import SamplerState, random_words
from .values import GUESS_HEAT, Array, ForwardBatch


@dataclass(frozen=True)
class GuessPlace:
    """One guess of each of ``B`` sequences: ``batch`` has the token before it, ``guesses`` int32 ``[B]`` gets it.

    ``sampler`` says how the model will choose the token that is guessed: its ``offsets`` int32 ``[B]`` are the number
    of the guess, the first being 0. Its variant is of no account.
    """

    batch: ForwardBatch
    guesses: Array
    sampler: SamplerState


def guess(logits: np.ndarray, state: SamplerState) -> np.ndarray:
    """Guess what :func:`.sampling.sample` will choose, int32 ``[B]``, from a draft model's logits fp32 ``[B, V]``.

    A sequence with temperature 0 gets the most likely token, the first of equal ones. A row with a NaN, or whose
    largest logit is infinite, gets 0. Nothing of the ``state`` changes.
    """
    own = state.columns[state.rows]
    words = random_words(own["seed"], own["sequence"], own["step"] + state.offsets)
    largest = logits.max(axis=1)
    valid = np.isfinite(largest)
    tokens = np.where(valid, logits.argmax(axis=1), 0).astype(np.int32)
    for b in np.flatnonzero(valid & (own["temperature"] > 0)):
        heat = float(own["temperature"][b]) * GUESS_HEAT
        ends = np.cumsum(np.exp((logits[b].astype(np.float64) - largest[b]) / heat))
        tokens[b] = np.searchsorted(ends, ends[-1] * (int(words[b]) / 2**32), side="right")
    return tokens
