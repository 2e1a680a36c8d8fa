"""Choosing the next token from logits: the definition that every backend reproduces token for token.

The steps for each row of fp32 logits follow. Every fp32 operation is rounded on its own (no fused multiply-add).

1. Repetition penalty ``r`` over the tokens of prompt and completion, as in Hugging Face transformers: ``x / r`` where
   ``x > 0``, else ``x * r``. Then, over generated tokens and as in OpenAI's definition, ``x - frequency * n`` where
   ``n`` says how often the token was generated, and ``x - presence`` where ``n > 0``.
2. Temperature 0 takes the largest ``x``; of equals (0 equals -0), the lowest id.
3. Otherwise each token has an integer weight, ``rint(2**40 * exp((x - max x) / temperature))``, see :func:`weights`.
   Integers add up to the same sum in any order, so a parallel kernel needs no particular order of summation to choose
   the same token. Rounding changes a weight by at most ``2**-41`` of the most likely token's.
4. Tokens are ranked by ``x`` descending, of equals the lower id first. Top-k keeps the first ``k``. Top-p keeps the
   shortest prefix whose weight is at least ``p`` times the weight of the tokens that top-k kept. Min-p keeps the
   tokens at least ``min_p`` times as likely as the first one. The first is always kept.
5. One 32-bit word ``u`` of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), with
   the seed as key and ``(step, sequence, 0, 0)`` as counter, selects the position ``floor(u * total / 2**32)`` in
   the kept weights laid end to end by ascending token id.

The generator is keyed by the sequence and its step, so the draws of a sequence do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import ceil, factorial, log

import numpy as np

from .values import Array

PROMPT_FLAG = 1 << 30
"""Set in ``SamplerState.counts`` for a token of the prompt; the bits below say how often it was generated."""

WEIGHT_BITS = 40
"""The most likely token weighs ``2**WEIGHT_BITS``; sums of up to 2**23 tokens stay within int64."""

LOG2_E = np.float32(1 / log(2))
EXP2_COEFFICIENTS = tuple(np.float32(log(2) ** k / factorial(k)) for k in range(6, -1, -1))
"""Taylor series of ``2**f`` for ``|f| <= 1/2``, highest power first: within 2e-7 of the function, and exact at 0."""


@dataclass
class SamplerState:
    """Sampling parameters and progress of ``B`` sequences: arrays of any device, which ``sample`` changes in place.

    ``temperature``, ``top_p``, ``min_p``, ``repetition_penalty``, ``presence_penalty`` and ``frequency_penalty`` are
    fp32 ``[B]``, ``top_k`` is int32 ``[B]`` (0: off), ``seed`` is uint64 ``[B]``. ``sequence`` int32 ``[B]`` tells the
    sequences of one seed apart; ``step`` int32 ``[B]`` counts the tokens drawn so far. ``counts`` is int32 ``[B, V]``:
    how often each token was generated, plus ``PROMPT_FLAG`` where the prompt holds it; None without any penalty.
    ``greedy`` is known on the host and implies that each temperature is 0 and no row has penalties, so each row's
    token is that of the largest logit.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array
    seed: Array
    sequence: Array
    step: Array
    counts: Array = None
    greedy: bool = False

    def map(self, function: Callable[[Array], Array]) -> SamplerState:
        """The state with ``function`` applied to each of its arrays: to copy them, or to move them to a device."""
        names = [f.name for f in fields(self) if f.name != "greedy" and getattr(self, f.name) is not None]
        return replace(self, **{name: function(getattr(self, name)) for name in names})


def sample(logits: np.ndarray, state: SamplerState) -> tuple[np.ndarray, np.ndarray]:
    """The next token of each row, fp32 ``[B, V]`` -> int32 ``[B]``, and its log-probability, fp32 ``[B]``.

    The log-probability is the log-softmax of the logits as given, before penalties and temperature. A row from which
    no token can be chosen (a NaN among its logits, or a maximum of +inf or -inf after penalties) gives the token -1
    and the log-probability NaN. Advances ``state.step``, and counts the chosen tokens in ``state.counts``.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        x = penalise(logits, state)
        largest = x.max(axis=1)
        valid = np.isfinite(largest)
        tokens = np.where(valid, x.argmax(axis=1), -1).astype(np.int32)
        drawn = np.flatnonzero(valid & (state.temperature > 0))
        if drawn.size:
            w = weights(x[drawn], largest[drawn], state.temperature[drawn])
            uniform = random_words(state.seed[drawn], state.sequence[drawn], state.step[drawn])
            for i, row in enumerate(drawn):
                keep(w[i], x[row], int(state.top_k[row]), float(state.top_p[row]), float(state.min_p[row]))
                tokens[row] = draw(w[i], int(uniform[i]))
        logprobs = log_softmax_at(logits, tokens)
    state.step += 1
    if state.counts is not None:
        rows = np.flatnonzero(valid)
        state.counts[rows, tokens[rows]] += 1
    return tokens, np.where(valid, logprobs, np.float32(np.nan)).astype(np.float32)


def penalise(logits: np.ndarray, state: SamplerState) -> np.ndarray:
    """Step 1: fp32 ``[B, V]``; the logits themselves if nothing is counted."""
    if state.counts is None:
        return logits
    rows, ids = np.nonzero(state.counts)
    generated = (state.counts[rows, ids] & (PROMPT_FLAG - 1)).astype(np.float32)
    repetition = state.repetition_penalty[rows]
    x = logits[rows, ids]
    x = np.where(x > 0, x / repetition, x * repetition)
    x = x - state.frequency_penalty[rows] * generated
    x = x - np.where(generated > 0, state.presence_penalty[rows], np.float32(0))
    penalised = logits.copy()
    penalised[rows, ids] = x
    return penalised


def weights(x: np.ndarray, largest: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    """Step 3: int64 ``[B, V]`` from fp32 ``[B, V]``, its row maxima ``[B]`` and temperatures ``[B]``.

    ``exp(z)`` is ``2**n * 2**f`` with ``t = z * log2(e)``, ``n = rint(t)``, ``f = t - n`` and ``2**f`` by Horner's rule
    on ``EXP2_COEFFICIENTS``: additions and multiplications that round alike on every device, within 3e-6 of ``exp``.
    """
    t = np.maximum((x - largest[:, None]) / temperature[:, None] * LOG2_E, np.float32(-2 * WEIGHT_BITS))
    n = np.rint(t)
    f = t - n
    power = np.full_like(f, EXP2_COEFFICIENTS[0])
    for coefficient in EXP2_COEFFICIENTS[1:]:
        power *= f
        power += coefficient
    rounded: np.ndarray = np.rint(np.ldexp(power, n.astype(np.int32) + WEIGHT_BITS)).astype(np.int64)
    return rounded


def keep(w: np.ndarray, x: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    """Step 4, in place: zero the weights ``w`` int64 ``[V]`` of tokens that are not kept; ``x`` is fp32 ``[V]``."""
    if 0 < top_k < x.size:
        w[~largest_mask(x, top_k)] = 0
    if top_p < 1:
        # p as a multiple of 2**-32, so that the bound is an integer and needs no rounding
        bound = max(1, -(-int(top_p * 2**32) * int(w.sum()) >> 32))
        kept = np.zeros(x.size, bool)
        kept[shortest_prefix(x, w, bound)] = True
        w[~kept] = 0
    if min_p > 0:
        w[w < ceil(min_p * 2**WEIGHT_BITS)] = 0


def largest_mask(x: np.ndarray, k: int) -> np.ndarray:
    """A mask of the ``k`` tokens ranked first, bool ``[V]``, in linear time."""
    smallest = np.partition(x, x.size - k)[x.size - k]
    mask: np.ndarray = x > smallest
    ties = np.flatnonzero(x == smallest)
    mask[ties[: k - np.count_nonzero(mask)]] = True
    return mask


def shortest_prefix(x: np.ndarray, w: np.ndarray, bound: int) -> np.ndarray:
    """The shortest prefix of the ranked ids that weighs ``bound``. Sorts about as many tokens as it returns."""
    size = min(256, x.size)
    while True:
        ids = np.flatnonzero(largest_mask(x, size))
        ids = ids[np.argsort(-x[ids], kind="stable")]
        reached = np.cumsum(w[ids]) >= bound
        if reached[-1]:
            return ids[: reached.argmax() + 1]
        size = min(16 * size, x.size)


def draw(w: np.ndarray, uniform: int) -> int:
    """Step 5: the token at ``floor(uniform * total / 2**32)`` of the weights ``w`` int64 ``[V]``."""
    cumulative = np.cumsum(w)
    position = uniform * int(cumulative[-1]) >> 32
    return int(np.searchsorted(cumulative, position, side="right"))


def random_words(seed: np.ndarray, sequence: np.ndarray, step: np.ndarray) -> np.ndarray:
    """One uniform 32-bit word for each row, uint32 ``[B]``, from ``seed`` uint64, ``sequence`` and ``step`` int32."""
    counter = np.zeros((len(seed), 4), np.uint32)
    counter[:, 0] = step.astype(np.uint32)
    counter[:, 1] = sequence.astype(np.uint32)
    key = np.stack([seed & np.uint64(0xFFFFFFFF), seed >> np.uint64(32)], axis=1).astype(np.uint32)
    return philox4x32(counter, key)[:, 0]


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10: counter uint32 ``[B, 4]`` and key uint32 ``[B, 2]`` -> four random words, uint32 ``[B, 4]``."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = counter.astype(np.uint64).T
    k0, k1 = key.astype(np.uint64).T
    for _ in range(10):
        a = c0 * np.uint64(0xD2511F53)
        b = c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & low, (a >> half) ^ c3 ^ k1, a & low
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def log_softmax_at(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """``log softmax(logits)[b, tokens[b]]`` in fp32 ``[B]``; undefined in rows whose token is -1."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(shifted, np.maximum(tokens, 0)[:, None], axis=1)[:, 0]
    logprobs: np.ndarray = chosen - np.log(np.exp(shifted).sum(axis=1))
    return logprobs
