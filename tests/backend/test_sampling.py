"""The definition of sampling against known answers, slow implementations and its own statistics."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_values import random_sampler

from bminf_lite.backend.sampling import (
    PROMPT_FLAG,
    WEIGHT_BITS,
    SamplerState,
    keep,
    largest_mask,
    penalise,
    philox4x32,
    random_words,
    sample,
    weights,
)

DEFAULTS = {
    "temperature": (1, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1, np.float32),
    "min_p": (0, np.float32),
    "repetition_penalty": (1, np.float32),
    "presence_penalty": (0, np.float32),
    "frequency_penalty": (0, np.float32),
    "seed": (0, np.uint64),
    "sequence": (0, np.int32),
    "step": (0, np.int32),
}


def make_state(batch, counts=None, **values):
    columns = {
        name: np.array(np.broadcast_to(values.get(name, default), batch), dtype)
        for name, (default, dtype) in DEFAULTS.items()
    }
    return SamplerState(**columns, counts=counts)


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
    np.testing.assert_allclose(penalise(logits[None], state)[0], expected, rtol=1e-6, atol=1e-6)


def test_generated_tokens_are_counted_beside_the_prompt():
    state = make_state(2, np.zeros((2, 3), np.int32), temperature=0, frequency_penalty=[1, 0])
    state.counts[:, 2] = PROMPT_FLAG
    logits = np.array([[0, 0.5, 1.2]] * 2, np.float32)
    tokens = [sample(logits, state)[0].tolist() for _ in range(4)]
    assert tokens == [[2, 2], [1, 2], [2, 2], [0, 2]]
    np.testing.assert_array_equal(state.counts, [[1, 1, PROMPT_FLAG + 2], [0, 0, PROMPT_FLAG + 4]])
    np.testing.assert_array_equal(state.step, [4, 4])


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
    tokens, _ = sample(np.broadcast_to(x, (draws, x.size)), state)
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
        tokens, _ = sample(x, make_state(4096, **{axis: np.arange(4096)}))
        pairs = np.bincount(tokens[:-1] * 16 + tokens[1:], minlength=256)
        # mean 255, standard deviation 22.6
        assert 255 - 90 < ((pairs - 4095 / 256) ** 2).sum() / (4095 / 256) < 255 + 90


def test_a_batch_equals_its_rows_alone_and_in_any_order():
    rng = np.random.default_rng(1)
    batch, vocab = 9, 50
    logits = rng.standard_normal((batch, vocab)).astype(np.float32) * 3
    state = random_sampler(rng, batch, vocab, penalties=True)
    alone = [sample(logits[i : i + 1], state.map(lambda v, i=i: v[i : i + 1].copy())) for i in range(batch)]
    order = rng.permutation(batch)
    tokens, logprobs = sample(logits[order], state.map(lambda v: v[order]))
    np.testing.assert_array_equal(tokens, [alone[i][0][0] for i in order])
    np.testing.assert_array_equal(logprobs, [alone[i][1][0] for i in order])


def test_log_probabilities_are_of_the_logits_as_given():
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((6, 33)).astype(np.float32) * 4
    state = make_state(6, np.full((6, 33), 2, np.int32), temperature=[0, 0, 1, 1, 5, 5], frequency_penalty=3)
    before = logits.copy()
    tokens, logprobs = sample(logits, state)
    np.testing.assert_array_equal(logits, before)
    x = logits.astype(np.float64)
    exact = x[np.arange(6), tokens] - np.log(np.exp(x).sum(axis=1))
    # fp32 sums of 33 terms, and values up to about 30
    np.testing.assert_allclose(logprobs, exact, atol=1e-5)
    assert tokens.dtype == np.int32
    assert logprobs.dtype == np.float32


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[np.nan, 1, 2], [1, 2, np.nan], [np.inf, 1, 2], [-np.inf] * 3, [np.nan, np.inf, 0]])
@pytest.mark.filterwarnings("error")
def test_a_row_without_a_choice_gives_minus_one_and_spares_its_neighbours(bad, temperature):
    logits = np.array([[0, 9, 0], bad, [0, -np.inf, 9]], np.float32)
    state = make_state(3, np.zeros((3, 3), np.int32), temperature=temperature, top_k=1, presence_penalty=0.5)
    tokens, logprobs = sample(logits, state)
    np.testing.assert_array_equal(tokens, [1, -1, 2])
    np.testing.assert_array_equal(np.isnan(logprobs), [False, True, False])
    np.testing.assert_array_equal(state.counts.sum(axis=1), [1, 0, 1])


def test_greedy_takes_the_lowest_of_equal_tokens_and_the_only_token():
    logits = np.array([[1, 3, 3, 2], [0.0, -0.0, 0.0, -1]], np.float32)
    np.testing.assert_array_equal(sample(logits, make_state(2, temperature=0))[0], [1, 0])
    tokens, logprobs = sample(np.full((1, 1), -5, np.float32), make_state(1, top_k=3, top_p=0.1, min_p=1))
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
    x = penalise(logits, state)
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
