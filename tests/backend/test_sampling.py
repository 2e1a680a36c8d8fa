"""The definition of sampling against known answers, slow implementations and its own statistics."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_values import random_sampler

from bminf_lite.backend.sampling import (
    MAX_LOGPROBS,
    NULL_ROW,
    PROMPT_FLAG,
    ROW,
    WEIGHT_BITS,
    Choice,
    SamplerVariant,
    SequenceSampling,
    adjust,
    keep,
    largest_mask,
    neutral_rows,
    philox4x32,
    random_words,
    sample,
    state_of,
    weights,
)


def make_state(batch, counts=None, bias=None, masks=None, **values):
    """A state of ``batch`` sequences with temperature 1, each with its own row of ``counts`` and ``masks``."""
    rows = neutral_rows(batch)
    rows["temperature"] = 1
    for name, value in values.items():
        rows[name] = value
    state = state_of([SequenceSampling(row, bias[i] if bias else ()) for i, row in enumerate(rows)], 0)
    state = dataclasses.replace(state, variant=SamplerVariant.FULL, counts=counts, masks=masks)
    for name, own in (("count_row", counts), ("mask_row", masks)):
        if own is not None:
            state.columns[name][1:] = np.arange(batch)
    return state


def bits(allowed):
    """The masks, uint32 ``[B, words]``, of rows of booleans ``[B, V]``."""
    packed = np.packbits(allowed, axis=1, bitorder="little")
    return np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4))).view(np.uint32)


# Few distinct values, so that ties and equal weights are common
tied_logits = st.lists(st.integers(-6, 6).map(lambda i: i / 2), min_size=1, max_size=40).map(
    lambda values: np.array(values, np.float32)
)
filters = st.fixed_dictionaries(
    {
        "top_k": st.integers(0, 45),
        "top_p": st.floats(2**-20, 1, width=32),
        "min_p": st.floats(0, 1, width=32),
    }
)


# -- the generator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # from Random123's kat_vectors
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    counter, key, expected = (np.array([[int(w, 16) for w in v.split()]], np.uint32) for v in (counter, key, expected))
    np.testing.assert_array_equal(philox4x32(counter, key), expected)


def test_a_seed_draws_the_same_in_every_version():
    """The counter is step, sequence, 0, 0 and the key the seed, low word first; the first of four words is taken."""
    seed, sequence, step = 0x0123456789ABCDEF, 5, 7
    words = random_words(np.array([seed], np.uint64), np.array([sequence], np.int32), np.array([step], np.int32))
    key = np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32)
    assert words == philox4x32(np.array([[step, sequence, 0, 0]], np.uint32), key)[:, 0]


# -- penalties --------------------------------------------------------------------------------------------------------


@given(
    logits=tied_logits,
    data=st.data(),
    repetition=st.floats(0.5, 2, width=32),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
)
def test_penalties_equal_their_formulas(logits, data, repetition, presence, frequency):
    times = data.draw(st.lists(st.integers(0, 3), min_size=logits.size, max_size=logits.size))
    prompt = data.draw(st.lists(st.booleans(), min_size=logits.size, max_size=logits.size))
    counts = np.array([n | PROMPT_FLAG * p for n, p in zip(times, prompt, strict=True)], np.int32)[None]
    state = make_state(1, counts, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    expected = []
    for x, n, p in zip(logits.astype(np.float64), times, prompt, strict=True):
        if n or p:
            x = x / repetition if x > 0 else x * repetition
        expected.append(x - frequency * n - presence * (n > 0))
    np.testing.assert_allclose(adjust(logits[None], state)[0], expected, rtol=1e-6, atol=1e-6)


def test_generated_tokens_are_counted_beside_the_prompt():
    state = make_state(2, np.zeros((2, 3), np.int32), temperature=0, frequency_penalty=[1, 0])
    state.counts[:, 2] = PROMPT_FLAG
    logits = np.array([[0, 0.5, 1.2]] * 2, np.float32)
    tokens = [sample(logits, state).tokens.tolist() for _ in range(4)]
    assert tokens == [[2, 2], [1, 2], [2, 2], [0, 2]]
    np.testing.assert_array_equal(state.counts, [[1, 1, PROMPT_FLAG + 2], [0, 0, PROMPT_FLAG + 4]])
    np.testing.assert_array_equal(state.columns["step"], [0, 4, 4])
    np.testing.assert_array_equal(state.columns["last_token"], [0, 0, 2])


# -- biases, masks and min_tokens --------------------------------------------------------------------------------------


@given(logits=tied_logits, data=st.data())
def test_biases_masks_and_min_tokens_equal_their_formulas(logits, data):
    """A bias is added before penalties; what is forbidden cannot be chosen whatever its logit, bias and penalty."""
    vocab = logits.size
    amounts = st.floats(-100, 100, width=32) | st.just(-np.inf)
    bias = data.draw(st.dictionaries(st.integers(0, vocab - 1), amounts, max_size=vocab))
    allowed = np.array(data.draw(st.lists(st.booleans(), min_size=vocab, max_size=vocab)))
    ends = data.draw(st.sets(st.integers(0, vocab - 1), max_size=15))
    step, least = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    repeated = data.draw(st.booleans())
    state = make_state(
        1,
        np.full((1, vocab), PROMPT_FLAG * repeated, np.int32),
        [sorted(bias.items())],
        bits(allowed[None]),
        step=step,
        min_tokens=least,
        repetition_penalty=1.5,
        end_tokens=[[*ends, *[-1] * (15 - len(ends))]],
    )
    expected = []
    for token, x in enumerate(logits):
        x = x + np.float32(bias.get(token, 0))
        if repeated:
            x = x / np.float32(1.5) if x > 0 else x * np.float32(1.5)
        forbidden = not allowed[token] or (step < least and token in ends)
        expected.append(-np.inf if forbidden else x)
    np.testing.assert_array_equal(adjust(logits[None], state)[0], np.float32(expected))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_can_be_drawn_once_min_tokens_are(temperature):
    ends = np.full((1, 15), -1)
    ends[0, :2] = 1, 3
    state = make_state(1, temperature=temperature, min_tokens=3, end_tokens=ends)
    logits = np.array([[0, 60, 0, 50]], np.float32)
    tokens = [int(sample(logits, state).tokens[0]) for _ in range(5)]
    assert all(token in (0, 2) for token in tokens[:3]) and tokens[3:] == [1, 1]


@pytest.mark.parametrize("unusable", [np.nan, np.inf])
def test_a_mask_does_not_hide_an_unusable_logit(unusable):
    logits = np.array([[1, unusable, 2]], np.float32)
    state = make_state(1, masks=bits(np.array([[True, False, True]])))
    assert sample(logits, state).tokens.tolist() == [-1]


def test_a_mask_that_allows_nothing_gives_no_token():
    state = make_state(2, masks=bits(np.array([[False] * 5, [False] * 4 + [True]])), num_logprobs=2)
    choice = sample(np.zeros((2, 5), np.float32), state)
    assert choice.tokens.tolist() == [-1, 4]
    assert choice.top_tokens[:, :3].tolist() == [[-1, -1, -1], [0, 1, -1]]


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_row_of_the_table_is_one_cache_line():
    assert ROW.itemsize == 128


@given(st.integers(0, 2**32 - 1))
def test_a_step_changes_its_own_rows_only_and_the_null_row_never(seed):
    rng = np.random.default_rng(seed)
    count, vocab = int(rng.integers(1, 9)), int(rng.integers(1, 70))
    state = random_sampler(rng, count, vocab, full=True)
    before = state.map(np.copy)
    choice = sample(rng.standard_normal((count, vocab)).astype(np.float32), state)
    used = state.rows != NULL_ROW
    assert (choice.tokens[~used] == -1).all() and np.isnan(choice.logprobs[~used]).all()
    expected = before.columns.copy()
    expected["step"][state.rows[used]] += 1
    expected["last_token"][state.rows[used]] = np.maximum(choice.tokens[used], 0)
    np.testing.assert_array_equal(state.columns, expected)
    grown = state.counts - before.counts
    counted = used & (choice.tokens >= 0) & (expected["count_row"][state.rows] >= 0)
    assert grown.sum() == counted.sum()
    assert (grown[expected["count_row"][state.rows[counted]], choice.tokens[counted]] == 1).all()


@given(st.integers(0, 2**32 - 1))
def test_a_draw_depends_on_nothing_but_its_own_row(seed):
    """Not on its place in the step or the table, on its neighbours or on the variant of the step."""
    rng = np.random.default_rng(seed)
    count, vocab = int(rng.integers(1, 9)), int(rng.integers(1, 70))
    logits = rng.standard_normal((count, vocab)).astype(np.float32) * 3
    state = random_sampler(rng, count, vocab, full=bool(rng.integers(2)))
    order = rng.permutation(count)
    moved = np.append(0, 1 + rng.permutation(len(state.table) - 1))  # the place of each row in another table
    other = state.map(np.copy)
    other.table[moved] = state.table
    if state.bias is not None:
        other.bias[moved] = state.bias
    other = dataclasses.replace(other, rows=moved[state.rows][order].astype(np.int32), variant=SamplerVariant.FULL)
    for _ in range(3):
        choice, shuffled = sample(logits, state), sample(logits[order], other)
        for part, expected in zip(shuffled, choice, strict=True):
            if expected is not None:
                np.testing.assert_array_equal(part, expected[order])


def test_a_choice_survives_packing():
    rng = np.random.default_rng(3)
    for full in (False, True):
        choice = sample(rng.standard_normal((4, 50)).astype(np.float32), random_sampler(rng, 4, 50, full))
        packed = choice.packed()
        assert packed.dtype == np.int32 and packed.shape == (2 + 2 * MAX_LOGPROBS * full, 4)
        for part, expected in zip(Choice.unpack(packed), choice, strict=True):
            np.testing.assert_array_equal(part, expected)


# -- weights ----------------------------------------------------------------------------------------------------------


def test_weights_follow_the_exponential():
    x = np.linspace(-28, 0, 100001, dtype=np.float32)[None]
    w = weights(x, np.zeros(1, np.float32), np.ones(1, np.float32))[0]
    exact = np.exp(x[0].astype(np.float64)) * 2**WEIGHT_BITS
    # 3e-6: rounding of z * log2(e), at most 41, to fp32; 0.5: rounding to an integer
    np.testing.assert_array_less(np.abs(w - exact), 3e-6 * exact + 0.5001)
    assert w[-1] == 2**WEIGHT_BITS


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1.0, 3e38])
def test_weights_of_extreme_values(temperature):
    x = np.array([[3e38, -3e38, -np.inf, 3e38]], np.float32)
    with np.errstate(over="ignore"):
        w = weights(x, x.max(axis=1), np.array([temperature], np.float32))
    assert w[0, 0] == w[0, 3] == 2**WEIGHT_BITS
    assert w[0, 2] == 0
    assert 0 <= w[0, 1] < 2**WEIGHT_BITS


# -- filters ----------------------------------------------------------------------------------------------------------


def kept_slowly(w, x, top_k, top_p, min_p):
    """The kept ids by sorting everything, in exact arithmetic."""
    ranked = sorted(range(len(x)), key=lambda i: (-x[i], i))
    ranked = ranked[: top_k or len(x)]
    total = sum(int(w[i]) for i in ranked)
    # top_p counts in multiples of 2**-32
    bound = Fraction(int(Fraction(top_p) * 2**32), 2**32) * total
    prefix, mass = [], 0
    for i in ranked:
        if prefix and mass >= bound:
            break
        prefix.append(i)
        mass += int(w[i])
    return {i for i in prefix if int(w[i]) >= Fraction(min_p) * 2**WEIGHT_BITS and w[i] > 0}


@given(logits=tied_logits, options=filters, temperature=st.sampled_from([0.1, 1.0, 10.0]))
def test_kept_tokens_equal_a_slow_implementation(logits, options, temperature):
    w = weights(logits[None], logits.max(keepdims=True), np.array([temperature], np.float32))[0]
    expected = kept_slowly(w, logits, **options)
    kept = w.copy()
    keep(kept, logits, **options)
    assert set(np.flatnonzero(kept).tolist()) == expected
    assert (kept[kept > 0] == w[kept > 0]).all()
    assert kept[logits.argmax()] == 2**WEIGHT_BITS


def test_top_k_keeps_exactly_k_tokens_and_of_equal_ones_the_first():
    for values in product((0.0, 1.0, 2.0), repeat=5):
        ranked = sorted(range(5), key=lambda i: (-values[i], i))
        for k in range(1, 6):
            mask = largest_mask(np.array(values, np.float32), k)
            assert np.flatnonzero(mask).tolist() == sorted(ranked[:k]), (values, k)


def test_top_p_over_a_large_vocabulary_equals_a_slow_implementation():
    x = np.random.default_rng(0).standard_normal(30000).astype(np.float32)
    w = weights(x[None], x.max(keepdims=True), np.ones(1, np.float32))[0]
    for top_p in (0.001, 0.5, 0.99):
        kept = w.copy()
        keep(kept, x, 0, float(np.float32(top_p)), 0.0)
        assert set(np.flatnonzero(kept).tolist()) == kept_slowly(w, x, 0, float(np.float32(top_p)), 0.0)


# -- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 0.5}])
def test_draws_have_the_probabilities_asked_for(options):
    draws = 10000
    x = np.array([0.0, 1.5, -1.0, 0.5, 1.5, -3.0, 0.2, 1.0], np.float32)
    state = make_state(draws, **options, seed=7, sequence=np.arange(draws))
    tokens = sample(np.broadcast_to(x, (draws, x.size)), state).tokens
    p = np.exp(x.astype(np.float64) / options.get("temperature", 1))
    w = np.rint(p / p.max() * 2**WEIGHT_BITS)
    allowed = kept_slowly(w, x, options.get("top_k", 0), options.get("top_p", 1), options.get("min_p", 0))
    p[[i for i in range(x.size) if i not in allowed]] = 0
    expected = p / p.sum() * draws
    seen = np.bincount(tokens, minlength=x.size)
    assert (seen[expected == 0] == 0).all()
    chi_square = ((seen - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    # 24.3 is exceeded once in a thousand times with seven degrees of freedom, less often with fewer
    assert chi_square < 24.3


def test_draws_are_independent_over_steps_sequences_and_seeds():
    x = np.zeros((4096, 16), np.float32)
    for axis in ("step", "sequence", "seed"):
        tokens = sample(x, make_state(4096, **{axis: np.arange(4096)})).tokens
        pairs = np.bincount(tokens[:-1] * 16 + tokens[1:], minlength=256)
        # mean 255, standard deviation 22.6
        assert 255 - 90 < ((pairs - 4095 / 256) ** 2).sum() / (4095 / 256) < 255 + 90


def test_log_probabilities_are_of_the_logits_as_given():
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((6, 33)).astype(np.float32) * 4
    state = make_state(6, np.full((6, 33), 2, np.int32), temperature=[0, 0, 1, 1, 5, 5], frequency_penalty=3)
    before = logits.copy()
    tokens, logprobs, *_ = sample(logits, state)
    np.testing.assert_array_equal(logits, before)
    x = logits.astype(np.float64)
    exact = x[np.arange(6), tokens] - np.log(np.exp(x).sum(axis=1))
    # fp32 sums of 33 terms, and values up to about 30
    np.testing.assert_allclose(logprobs, exact, atol=1e-5)
    assert tokens.dtype == np.int32
    assert logprobs.dtype == np.float32


@given(logits=tied_logits, count=st.integers(0, MAX_LOGPROBS), forbidden=st.integers(0, 39))
def test_the_most_likely_tokens_are_those_of_the_logits_as_given(logits, count, forbidden):
    allowed = np.arange(logits.size) != forbidden % logits.size
    allowed |= logits.size == 1
    choice = sample(logits[None], make_state(1, num_logprobs=count, masks=bits(allowed[None])))
    ranked = sorted(range(logits.size), key=lambda i: (-logits[i], i))[:count]
    found = choice.most_likely(0, count)
    assert [token for token, _ in found] == ranked
    assert (choice.top_tokens[0, len(ranked) :] == -1).all() and np.isnan(choice.top_logprobs[0, len(ranked) :]).all()
    x = logits.astype(np.float64)
    np.testing.assert_allclose([p for _, p in found], (x - np.log(np.exp(x).sum()))[ranked], atol=1e-5)
    if choice.tokens[0] in ranked:
        assert choice.top_logprobs[0, ranked.index(choice.tokens[0])] == choice.logprobs[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[np.nan, 1, 2], [1, 2, np.nan], [np.inf, 1, 2], [-np.inf] * 3, [np.nan, np.inf, 0]])
@pytest.mark.filterwarnings("error")
def test_a_row_without_a_choice_gives_minus_one_and_spares_its_neighbours(bad, temperature):
    logits = np.array([[0, 9, 0], bad, [0, -np.inf, 9]], np.float32)
    state = make_state(3, np.zeros((3, 3), np.int32), temperature=temperature, top_k=1, presence_penalty=0.5)
    tokens, logprobs, *_ = sample(logits, state)
    np.testing.assert_array_equal(tokens, [1, -1, 2])
    np.testing.assert_array_equal(np.isnan(logprobs), [False, True, False])
    np.testing.assert_array_equal(state.counts.sum(axis=1), [1, 0, 1])


def test_greedy_takes_the_lowest_of_equal_tokens_and_the_only_token():
    logits = np.array([[1, 3, 3, 2], [0.0, -0.0, 0.0, -1]], np.float32)
    np.testing.assert_array_equal(sample(logits, make_state(2, temperature=0)).tokens, [1, 0])
    tokens, logprobs, *_ = sample(np.full((1, 1), -5, np.float32), make_state(1, top_k=3, top_p=0.1, min_p=1))
    assert tokens.tolist() == [0]
    assert logprobs.tolist() == [0]


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parity
def test_penalties_and_filters_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((40, 300)).astype(np.float32) * 4
    seen = rng.integers(0, 300, (40, 17))
    counts = np.zeros(logits.shape, np.int32)
    np.put_along_axis(counts, seen, PROMPT_FLAG, axis=1)
    state = make_state(40, counts, repetition_penalty=1.3)
    x = adjust(logits, state)
    scores, ids = torch.from_numpy(logits), torch.from_numpy(seen)
    scores = process.RepetitionPenaltyLogitsProcessor(1.3)(ids, scores)
    np.testing.assert_array_equal(x, scores)
    for warp in (
        process.TemperatureLogitsWarper(0.7),
        process.TopKLogitsWarper(50),
        process.TopPLogitsWarper(0.8),
        process.MinPLogitsWarper(0.02),
    ):
        scores = warp(ids, scores)
    w = weights(x, x.max(axis=1), np.full(40, 0.7, np.float32))
    for row in range(40):
        keep(w[row], x[row], 50, 0.8, 0.02)
    np.testing.assert_array_equal(w > 0, torch.isfinite(scores))
