"""Choosing the next token from logits: the definition that every backend reproduces token for token.

The steps for each row of fp32 logits follow. Every fp32 operation is rounded on its own (no fused multiply-add).

1. The sequence's ``logit_bias`` is added. Then repetition penalty ``r`` over the tokens of prompt and completion, as in
   Hugging Face transformers: ``x / r`` where ``x > 0``, else ``x * r``. Then, over generated tokens and as in OpenAI's
   definition, ``x - frequency * n`` where ``n`` says how often the token was generated, and ``x - presence`` where
   ``n > 0``. Last, tokens that the sequence's bit mask forbids, and its end-of-sequence tokens until ``min_tokens``
   tokens are drawn, become -inf (but NaN and +inf stay, so that they are noticed).
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

Log-probabilities are the log-softmax of the logits as given, before step 1. Their order of sums is a function of the
vocabulary's size alone.

A draw depends on the logits and on the sequence's own row of the table, never on its place in the step or on the rest
of the batch: the generator is keyed by the seed, the sequence and its step.

A step may check drafts, tokens that a sequence is expected to generate. Then the sequence has a row of logits behind
its newest token and one behind each draft, and each row chooses as if the drafts before it had been generated: ``step``
has advanced by their number, the penalties count them, and the row has a mask of its own. The drafts that equal the
choices are accepted, up to the first that differs. So the accepted choices are the tokens that the sequence gets
without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import ceil, factorial, log
from typing import NamedTuple

import numpy as np

from .values import Array

NULL_ROW = 0
"""The row of a sequence that only pads a step: nothing is chosen for it, and nothing changes."""
MAX_LOGPROBS = 20
"""The most likely tokens that a step can report for each sequence; OpenAI's bound."""
MAX_LOGIT_BIAS = 300
"""Tokens with a bias, for each sequence."""
MAX_END_TOKENS = 15
"""End-of-sequence tokens that ``min_tokens`` can forbid, for each sequence. With 15 a row has 128 bytes."""

PROMPT_FLAG = 1 << 30
"""Set in ``SamplerState.counts`` for a token of the prompt; the bits below say how often it was generated."""

WEIGHT_BITS = 40
"""The most likely token weighs ``2**WEIGHT_BITS``; sums of up to 2**23 tokens stay within int64."""

LOG2_E = np.float32(1 / log(2))
EXP2_COEFFICIENTS = tuple(np.float32(log(2) ** k / factorial(k)) for k in range(6, -1, -1))
"""Taylor series of ``2**f`` for ``|f| <= 1/2``, highest power first: within 2e-7 of the function, and exact at 0."""

ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int32),  # 0: off
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("sequence", np.int32),  # tells the sequences of one seed apart
        ("step", np.int32),  # tokens drawn so far; sampling advances it
        ("last_token", np.int32),  # the newest token, 0 for -1; sampling writes it
        ("min_tokens", np.int32),
        ("num_logprobs", np.int32),  # of the most likely tokens, 0 to MAX_LOGPROBS
        ("num_bias", np.int32),  # entries of SamplerState.bias
        ("count_row", np.int32),  # of SamplerState.counts; -1: no penalties
        ("mask_row", np.int32),  # of SamplerState.masks; -1: every token is allowed
        ("end_tokens", np.int32, MAX_END_TOKENS),  # filled with -1
    ]
)
"""One sequence's row of :attr:`SamplerState.table`: 128 bytes, so that one copy writes it and one access reads it."""
ROW_WORDS = ROW.itemsize // 4


class SamplerVariant(IntEnum):
    """What the rows of a step need at most. A step of a greater variant gives the same tokens and log-probabilities."""

    GREEDY = 0
    """Every temperature is 0, and nothing changes the logits."""
    DRAW = 1
    """Nothing changes the logits: no bias, penalties, masks or ``min_tokens``. No row reports most likely tokens."""
    ADJUST = 2
    """Biases, penalties, masks and ``min_tokens`` too. No row reports most likely tokens."""
    FULL = 3
    """Everything."""


@dataclass
class SamplerState:
    """Sampling parameters and progress of up to ``R - 1`` sequences, and which of them take part in a step.

    Arrays are those of any device. ``table`` is int32 ``[R, ROW_WORDS]``, a :data:`ROW` for each sequence; row
    ``NULL_ROW`` belongs to none. ``rows`` is int32 ``[B]``: the rows of a step's sequences, or ``NULL_ROW`` where a
    sequence only pads the step. Without drafts, each occurs at most once. ``variant`` bounds what these rows need.

    The other arrays may be None while no row needs them. ``bias`` is int32 ``[R, 2, MAX_LOGIT_BIAS]``: for each row of
    ``table`` the ids of tokens, ascending, and the bits of what is added to their logits, fp32. ``counts`` is int32
    ``[C, V]``: how often each token was generated, plus ``PROMPT_FLAG`` where the prompt holds it. ``masks`` is uint32
    ``[M, ceil(V / 32)]``: token ``t`` is allowed if bit ``t % 32`` of word ``t // 32`` is set. A row of the table names
    its row of ``counts`` and of ``masks``, so that only sequences that need one take its memory.

    A step that checks drafts has ``offsets`` and ``drafts``, int32 ``[B]``; else both are None. Then a sequence has one
    or more consecutive rows with the offsets 0, 1, 2, ..., and the same entry of ``rows``. A row with the offset ``j >
    0`` follows the draft ``drafts[b]``, and those of the ``j - 1`` rows before it that have drafts. Its mask is the
    ``j``-th behind the one that the table names.

    ``sample`` changes ``table`` and ``counts`` in place. Nothing of a step's geometry depends on their contents, so a
    captured step stays valid while rows are written.
    """

    table: Array
    rows: Array
    variant: SamplerVariant
    bias: Array = None
    counts: Array = None
    masks: Array = None
    offsets: Array = None
    drafts: Array = None

    @property
    def columns(self) -> np.ndarray:
        """The table as an array of :data:`ROW` ``[R]``; its fields are views. For NumPy arrays."""
        columns: np.ndarray = self.table.view(ROW)[:, 0]
        return columns

    def map(self, function: Callable[[Array], Array]) -> SamplerState:
        """The state with ``function`` applied to each of its arrays: to copy them, or to move them to a device."""
        names = ("table", "rows", "bias", "counts", "masks", "offsets", "drafts")
        return replace(self, **{n: function(getattr(self, n)) for n in names if getattr(self, n) is not None})

    def drafts_before(self, row: int) -> np.ndarray:
        """The drafts that row ``row`` of a step follows, in order. For NumPy arrays."""
        if self.drafts is None:
            return np.zeros(0, np.int32)
        drafts: np.ndarray = self.drafts[row - self.offsets[row] + 1 : row + 1]
        return drafts


@dataclass(frozen=True)
class SequenceSampling:
    """One sequence's part of a :class:`SamplerState`, on the host.

    ``row`` is one :data:`ROW`, whose ``num_bias``, ``count_row`` and ``mask_row`` are filled in where it is stored.
    ``bias`` holds up to ``MAX_LOGIT_BIAS`` pairs of a token, ascending, and what is added to its logit. With
    ``penalized``, ``prompt`` and ``generated`` are the token ids that the penalties count.
    """

    row: np.ndarray
    bias: Sequence[tuple[int, float]] = ()
    penalized: bool = False
    prompt: Sequence[int] = field(default=(), repr=False)
    generated: Sequence[int] = field(default=(), repr=False)

    @property
    def variant(self) -> SamplerVariant:
        """The least variant that serves the sequence, unless it has a mask."""
        row = self.row
        if row["num_logprobs"]:
            return SamplerVariant.FULL
        if self.bias or self.penalized or row["step"] < row["min_tokens"]:
            return SamplerVariant.ADJUST
        return SamplerVariant.DRAW if row["temperature"] > 0 else SamplerVariant.GREEDY

    def packed_bias(self) -> np.ndarray:
        """int32 ``[2, MAX_LOGIT_BIAS]``, as :attr:`SamplerState.bias` holds it."""
        packed = np.zeros((2, MAX_LOGIT_BIAS), np.int32)
        packed[0, : len(self.bias)] = [token for token, _ in self.bias]
        packed[1, : len(self.bias)] = np.array([value for _, value in self.bias], np.float32).view(np.int32)
        return packed

    def counted(self, vocab_size: int) -> np.ndarray:
        """int32 ``[V]``, as :attr:`SamplerState.counts` holds it."""
        counts = np.bincount(np.asarray(self.generated, np.int64), minlength=vocab_size).astype(np.int32)
        counts[np.asarray(self.prompt, np.int64)] |= PROMPT_FLAG
        return counts


class Choice(NamedTuple):
    """The result of :func:`sample`.

    ``tokens`` int32 ``[B]`` and their log-probabilities ``logprobs`` fp32 ``[B]``. In a step of the variant ``FULL``
    also the most likely tokens, by rank, and their log-probabilities: int32 and fp32 ``[B, MAX_LOGPROBS]``, of which a
    row has its first ``num_logprobs`` (fewer if the vocabulary has fewer). The rest is -1 and NaN.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def packed(self) -> np.ndarray:
        """All in one array for one copy to the host: int32 ``[2, B]``, or ``[2 + 2 * MAX_LOGPROBS, B]`` with the top.

        Rows: the tokens, the bits of their log-probabilities, the most likely tokens, the bits of theirs.
        """
        parts = [self.tokens[None], self.logprobs.view(np.int32)[None]]
        if self.top_tokens is not None and self.top_logprobs is not None:
            parts += [self.top_tokens.T, self.top_logprobs.T.view(np.int32)]
        return np.concatenate(parts)

    @classmethod
    def unpack(cls, packed: np.ndarray) -> Choice:
        """The opposite of :meth:`packed`."""
        if len(packed) == 2:
            return cls(packed[0], packed[1].view(np.float32))
        top_tokens, top_logprobs = packed[2 : 2 + MAX_LOGPROBS], packed[2 + MAX_LOGPROBS :].view(np.float32)
        return cls(packed[0], packed[1].view(np.float32), top_tokens.T, top_logprobs.T)

    def most_likely(self, sequence: int, count: int) -> list[tuple[int, float]]:
        """The ``count`` most likely tokens of a sequence of the step, by rank, and their log-probabilities."""
        if self.top_tokens is None or self.top_logprobs is None:
            return []
        tokens, logprobs = self.top_tokens[sequence, :count].tolist(), self.top_logprobs[sequence, :count].tolist()
        return [(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True) if token >= 0]


class TokenScores(NamedTuple):
    """The log-probabilities ``logprobs`` fp32 ``[n]`` of given tokens, and beside them the most likely tokens.

    ``best_tokens`` int32 ``[n]`` have the log-probabilities ``best_logprobs`` fp32 ``[n]``; they are -1 and NaN for a
    row that has a NaN or whose maximum is infinite.
    """

    logprobs: np.ndarray
    best_tokens: np.ndarray
    best_logprobs: np.ndarray

    def packed(self) -> np.ndarray:
        """All in one array for one copy to the host: int32 ``[3, n]`` in the order of :meth:`Choice.packed`.

        Rows: the most likely tokens, the bits of their log-probabilities, those of ``logprobs``.
        """
        return np.stack([self.best_tokens, self.best_logprobs.view(np.int32), self.logprobs.view(np.int32)])

    @classmethod
    def unpack(cls, packed: np.ndarray) -> TokenScores:
        """The opposite of :meth:`packed`."""
        return cls(packed[2].view(np.float32), packed[0], packed[1].view(np.float32))


def score(logits: np.ndarray, tokens: np.ndarray) -> TokenScores:
    """The log-probabilities of ``tokens`` int32 ``[n]``, NaN for -1, and the most likely tokens, of fp32 ``[n, V]``."""
    none = np.zeros(len(tokens), np.int32)
    with np.errstate(over="ignore", invalid="ignore"):
        best = np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), -1).astype(np.int32)
        return TokenScores(report(logits, tokens, none).logprobs, best, report(logits, best, none).logprobs)


def neutral_rows(count: int) -> np.ndarray:
    """``count`` rows of :data:`ROW` that take the token of the largest logit."""
    rows = np.zeros(count, ROW)
    rows["top_p"] = rows["repetition_penalty"] = 1
    rows["count_row"] = rows["mask_row"] = rows["end_tokens"] = -1
    return rows


def state_of(sequences: Sequence[SequenceSampling], vocab_size: int) -> SamplerState:
    """The state of some sequences alone, as NumPy arrays: sequence ``b`` has row ``b + 1``, and all take part."""
    table, penalized = neutral_rows(len(sequences) + 1), [s for s in sequences if s.penalized]
    bias = np.zeros((len(table), 2, MAX_LOGIT_BIAS), np.int32) if any(s.bias for s in sequences) else None
    counts = np.stack([s.counted(vocab_size) for s in penalized]) if penalized else None
    for row, sequence in enumerate(sequences, start=1):
        table[row] = sequence.row
        table["num_bias"][row] = len(sequence.bias)
        if bias is not None:
            bias[row] = sequence.packed_bias()
    table["count_row"][[row for row, s in enumerate(sequences, start=1) if s.penalized]] = range(len(penalized))
    variant = max((s.variant for s in sequences), default=SamplerVariant.GREEDY)
    rows = np.arange(1, len(table), dtype=np.int32)
    return SamplerState(table.view(np.int32).reshape(-1, ROW_WORDS), rows, variant, bias, counts)


def sample(logits: np.ndarray, state: SamplerState) -> Choice:
    """The next token of each row of a step, from fp32 logits ``[B, V]``.

    A row from which no token can be chosen (a NaN among its logits, or a maximum of +inf or -inf after step 1) gives
    the token -1 and the log-probability NaN. A row that is ``NULL_ROW`` gives the same, and nothing of it changes.
    Advances ``step`` and ``last_token`` of the others, and counts the chosen tokens in ``state.counts``: of a sequence
    with drafts, the tokens of the rows up to the first whose choice is not the next row's draft.
    """
    columns, used = state.columns, state.rows != NULL_ROW
    own = columns[state.rows]
    steps = own["step"] if state.offsets is None else own["step"] + state.offsets
    with np.errstate(over="ignore", invalid="ignore"):
        x = adjust(logits, state)
        largest = x.max(axis=1)
        valid = np.isfinite(largest) & used
        tokens = np.where(valid, x.argmax(axis=1), -1).astype(np.int32)
        drawn = np.flatnonzero(valid & (own["temperature"] > 0))
        if drawn.size:
            w = weights(x[drawn], largest[drawn], own["temperature"][drawn])
            uniform = random_words(own["seed"][drawn], own["sequence"][drawn], steps[drawn])
            for i, b in enumerate(drawn):
                keep(w[i], x[b], int(own["top_k"][b]), float(own["top_p"][b]), float(own["min_p"][b]))
                tokens[b] = draw(w[i], int(uniform[i]))
        choice = report(logits, tokens, own["num_logprobs"])
    commit(tokens, state)
    return choice if state.variant == SamplerVariant.FULL else Choice(choice.tokens, choice.logprobs)


def commit(tokens: np.ndarray, state: SamplerState) -> None:
    """Advance the table and the counts by what a step has chosen, ``tokens`` int32 ``[B]``, -1 for none."""
    accepted = accepted_rows(tokens, state)
    rows = state.rows[accepted]
    np.add.at(state.columns["step"], rows, 1)
    state.columns["last_token"][rows] = np.maximum(tokens[accepted], 0)  # the last of equal rows stays
    count_rows = state.columns["count_row"][rows]
    counted = (tokens[accepted] >= 0) & (count_rows >= 0)
    if counted.any():
        np.add.at(state.counts, (count_rows[counted], tokens[accepted][counted]), 1)


def accepted_rows(tokens: np.ndarray, state: SamplerState) -> np.ndarray:
    """The numbers of the rows of a step whose ``tokens`` int32 ``[B]`` the sequences get, ascending.

    A row without drafts before it is accepted, and a row behind a draft if the row before it is and has chosen that
    draft. Rows that are ``NULL_ROW`` are not.
    """
    used = state.rows != NULL_ROW
    if state.offsets is None:
        return np.flatnonzero(used)
    accepted = np.zeros(len(tokens), bool)
    for b in np.flatnonzero(used):
        accepted[b] = state.offsets[b] == 0 or (accepted[b - 1] and tokens[b - 1] == state.drafts[b])
    return np.flatnonzero(accepted)


def num_accepted(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    """How many leading ``drafts`` equal the ``tokens`` that were chosen at their places."""
    return next(
        (i for i, (token, draft) in enumerate(zip(tokens, drafts, strict=False)) if token != draft), len(drafts)
    )


def adjust(logits: np.ndarray, state: SamplerState) -> np.ndarray:
    """Step 1: fp32 ``[B, V]``; the logits themselves if nothing changes them."""
    own = state.columns[state.rows]
    offsets = np.zeros(len(own), np.int32) if state.offsets is None else state.offsets
    early = own["step"] + offsets < own["min_tokens"]
    changed = (own["num_bias"] > 0) | (own["count_row"] >= 0) | (own["mask_row"] >= 0) | early
    if not changed.any():
        return logits
    adjusted = logits.copy()
    for b, (x, row, parameters, is_early) in enumerate(zip(adjusted, state.rows, own, early, strict=True)):
        if parameters["num_bias"] > 0:
            tokens, bits = state.bias[row, :, : parameters["num_bias"]]
            x[tokens] += bits.view(np.float32)
        if parameters["count_row"] >= 0:
            counts = state.counts[parameters["count_row"]]
            if offsets[b]:
                counts = counts + np.bincount(state.drafts_before(b), minlength=x.size).astype(np.int32)
            penalise(x, counts, parameters)
        if parameters["mask_row"] >= 0:
            mask = state.masks[parameters["mask_row"] + offsets[b]]
            bits = np.unpackbits(mask.view(np.uint8), count=x.size, bitorder="little")
            forbid(x, np.flatnonzero(bits == 0))
        if is_early:
            forbid(x, parameters["end_tokens"][parameters["end_tokens"] >= 0])
    return adjusted


def penalise(x: np.ndarray, counts: np.ndarray, parameters: np.ndarray) -> None:
    """Penalise the logits ``x`` fp32 ``[V]`` in place; ``counts`` is int32 ``[V]``, ``parameters`` one :data:`ROW`."""
    ids = np.flatnonzero(counts)
    generated = (counts[ids] & (PROMPT_FLAG - 1)).astype(np.float32)
    repetition = parameters["repetition_penalty"]
    y = np.where(x[ids] > 0, x[ids] / repetition, x[ids] * repetition)
    y = y - parameters["frequency_penalty"] * generated
    x[ids] = y - np.where(generated > 0, parameters["presence_penalty"], np.float32(0))


def forbid(x: np.ndarray, ids: np.ndarray) -> None:
    """Make the logits of tokens -inf, in place, unless they are NaN or +inf."""
    x[ids] = np.where(x[ids] < np.inf, np.float32(-np.inf), x[ids])


def report(logits: np.ndarray, tokens: np.ndarray, num_logprobs: np.ndarray) -> Choice:
    """Log-probabilities of the chosen ``tokens`` int32 ``[B]`` and of the ``num_logprobs`` most likely of each row."""
    largest = logits.max(axis=1)
    log_sums = np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    chosen = np.take_along_axis(logits, np.maximum(tokens, 0)[:, None], axis=1)[:, 0]
    logprobs = np.where(tokens < 0, np.float32(np.nan), chosen - largest - log_sums).astype(np.float32)
    top_tokens = np.full((len(tokens), MAX_LOGPROBS), -1, np.int32)
    top_logprobs = np.full((len(tokens), MAX_LOGPROBS), np.nan, np.float32)
    for b in np.flatnonzero((tokens >= 0) & (num_logprobs > 0)):
        k = min(int(num_logprobs[b]), logits.shape[1])
        ids = np.flatnonzero(largest_mask(logits[b], k))
        top_tokens[b, :k] = ids[np.argsort(-logits[b, ids], kind="stable")]
        top_logprobs[b, :k] = logits[b, top_tokens[b, :k]] - largest[b] - log_sums[b]
    return Choice(tokens, logprobs, top_tokens, top_logprobs)


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
