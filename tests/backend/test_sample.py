"""The sampling operation of every backend draws the tokens that the definition draws, and advances the same state."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checked import repeats
from hypothesis import given
from hypothesis import strategies as st
from random_values import SEEDS, random_sampler
from tolerances import assert_close

from bminf_lite.backend import sampling
from bminf_lite.backend.base import Backend
from bminf_lite.backend.sampling import (
    MAX_LOGPROBS,
    NULL_ROW,
    Choice,
    SamplerState,
    SamplerVariant,
    SequenceSampling,
    TokenScores,
    random_words,
    state_of,
)
from bminf_lite.backend.values import GUESS_HEAT
from bminf_lite.cuda.kernels import constants
from bminf_lite.cuda.kernels.sampling.sampler import ROWS_AT_ONCE
from bminf_lite.cuda.kernels.sources import SOURCES


def padded(backend: Backend, logits: np.ndarray) -> Any:
    """``logits`` on the device, where NaN pads the rows of a GPU."""
    if not backend.name.startswith("cuda"):
        return backend.array(logits)
    x = backend.arrays.rows(*logits.shape, np.float32)  # type: ignore[attr-defined]
    whole = x if x.base is None else x.base
    values = np.full(whole.shape, np.nan, np.float32)
    values[:, : logits.shape[1]] = logits
    backend.assign(whole, values)
    return x


def check_sample(backend: Backend, draws: list[np.ndarray], state: SamplerState) -> None:
    """Draw once from each of several logits: tokens equal, log-probabilities close, state and step advanced alike."""
    expected_state, device_state, count = state.map(np.copy), state.map(backend.array), len(draws[0])
    for logits in draws:
        tokens, logprobs, *top = sampling.sample(logits, expected_state)
        result = backend.host(backend.sample(padded(backend, logits), device_state)).copy()
        assert result.dtype == np.int32 and result.shape == (2 + 2 * MAX_LOGPROBS * (top[0] is not None), count)
        found = Choice.unpack(result)
        np.testing.assert_array_equal(found.tokens, tokens)
        spread = np.abs(np.where(np.isfinite(logits), logits, 0)).max(axis=1)
        assert_close(found.logprobs, logprobs, "logprob", np.float32, 1 + spread)
        if top[0] is not None:
            np.testing.assert_array_equal(found.top_tokens, top[0])
            assert_close(found.top_logprobs, top[1], "logprob", np.float32, 1 + spread[:, None])
            same = (found.top_tokens == tokens[:, None]) & (tokens >= 0)[:, None]
            np.testing.assert_array_equal(found.top_logprobs[same], found.logprobs[same.any(axis=1)])
    np.testing.assert_array_equal(backend.host(device_state.table), expected_state.table)
    if state.counts is not None:
        np.testing.assert_array_equal(backend.host(device_state.counts), expected_state.counts)


INF, NAN = np.float32(np.inf), np.float32(np.nan)
VOCABULARIES = st.sampled_from([1, 2, 3, 31, 32, 33, 255, 256, 257, 1000, 5003])


@given(SEEDS, st.integers(1, 5), VOCABULARIES, st.booleans(), st.booleans())
def test_sample(backend, seed, count, vocab, full, with_ties):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((count, vocab)).astype(np.float32) * 4
    if with_ties:
        logits = np.rint(logits)
    check_sample(backend, [logits] * 3, random_sampler(rng, count, vocab, full))


@given(SEEDS, st.integers(1, 5), VOCABULARIES)
def test_sample_that_is_known_to_be_greedy(backend, seed, count, vocab):
    """A backend may take a shorter way; of equal logits the lowest id wins on it too."""
    rng = np.random.default_rng(seed)
    logits = np.rint(rng.standard_normal((count, vocab)) * 2).astype(np.float32)
    state = random_sampler(rng, count, vocab, False)
    state.columns["temperature"] = 0
    check_sample(backend, [logits] * 3, dataclasses.replace(state, variant=SamplerVariant.GREEDY))


def plain_choices(state: SamplerState, row: int, logits: np.ndarray) -> list[Choice]:
    """The choices of a sequence in steps without drafts, the ``j``-th with the ``j``-th mask behind the table's."""
    choices, own = [], state.columns[row]
    own_mask = own["mask_row"].copy()
    for j in range(len(logits)):
        own["mask_row"] = -1 if own_mask < 0 else own_mask + j
        alone = dataclasses.replace(state, rows=np.array([row], np.int32))
        choices.append(sampling.sample(logits[j : j + 1], alone))
        if choices[-1].tokens[0] < 0:
            break
    own["mask_row"] = own_mask
    return choices


@given(SEEDS, st.integers(1, 4), VOCABULARIES, st.booleans())
def test_drafts_get_the_tokens_of_steps_without_drafts(backend, seed, count, vocab, full):
    """Drafts are right for a while, then wrong. Tokens, log-probabilities and the state are those of plain steps."""
    rng, most = np.random.default_rng(seed), 4
    state = random_sampler(rng, count, vocab, full)
    if state.masks is not None:
        masks = rng.integers(0, 2**32, (len(state.masks) * (most + 1), state.masks.shape[1]), np.uint32)
        state = dataclasses.replace(state, masks=masks | np.uint32(1))
        state.columns["mask_row"][state.columns["mask_row"] > 0] *= most + 1
    before, plain = state.map(np.copy), state
    logits, rows, offsets, drafts, expected = [], [], [], [], []
    for row in state.rows.tolist():
        num_drafts = 0 if row == NULL_ROW else int(rng.integers(0, most + 1))
        num_right = num_drafts if vocab == 1 else int(rng.integers(0, num_drafts + 1))
        own = np.rint(rng.standard_normal((num_drafts + 1, vocab)) * 2).astype(np.float32)
        choices = [] if row == NULL_ROW else plain_choices(plain, row, own[: num_right + 1])
        tokens = [int(choice.tokens[0]) for choice in choices]
        right = tokens[:num_right] if min(tokens, default=0) >= 0 else tokens[:-1]
        wrong = [(tokens[-1] + 1) % vocab] * (num_drafts - len(right)) if tokens else []
        expected += [(len(rows) + j, choice) for j, choice in enumerate(choices)]
        logits.append(own)
        drafts += [0, *right, *wrong]
        rows += [row] * (num_drafts + 1)
        offsets += range(num_drafts + 1)
    in_step = (np.array(x, np.int32) for x in (rows, offsets, drafts))
    checked = dataclasses.replace(before, **dict(zip(("rows", "offsets", "drafts"), in_step, strict=True)))
    device_state = checked.map(backend.array)
    found = Choice.unpack(backend.host(backend.sample(padded(backend, np.concatenate(logits)), device_state)))
    for place, choice in expected:
        assert found.tokens[place] == choice.tokens[0]
        assert_close(found.logprobs[place], choice.logprobs[0], "logprob", np.float32, 12)
        if choice.top_tokens is not None:
            np.testing.assert_array_equal(found.top_tokens[place], choice.top_tokens[0])
    np.testing.assert_array_equal(backend.host(device_state.table), plain.table)
    if plain.counts is not None:
        np.testing.assert_array_equal(backend.host(device_state.counts), plain.counts)


@given(SEEDS, st.integers(1, 40), st.sampled_from([31, 256, 2500]))
def test_the_variant_of_a_step_changes_no_bit(backend, seed, count, vocab):
    """So a sequence gets the same log-probabilities whatever its neighbours need."""
    rng = np.random.default_rng(seed)
    logits = backend.array(rng.standard_normal((count, vocab)).astype(np.float32) * 4)
    state = random_sampler(rng, count, vocab, False)
    results = []
    for variant in (SamplerVariant.DRAW, SamplerVariant.ADJUST, SamplerVariant.FULL):
        own = dataclasses.replace(state, variant=variant).map(np.copy).map(backend.array)
        results.append(backend.host(backend.sample(logits, own))[:2].tolist())
    assert results[0] == results[1] == results[2]


@given(SEEDS, st.integers(1, 9), st.sampled_from([31, 256, 2500]))
def test_changed_logits_without_most_likely_tokens(backend, seed, count, vocab):
    """The variant ADJUST is FULL without them."""
    rng = np.random.default_rng(seed)
    logits, state = rng.standard_normal((count, vocab)).astype(np.float32) * 4, random_sampler(rng, count, vocab, True)
    state.columns["num_logprobs"] = 0
    results = []
    for variant in (SamplerVariant.ADJUST, SamplerVariant.FULL):
        own = dataclasses.replace(state, variant=variant).map(np.copy).map(backend.array)
        results.append(backend.host(backend.sample(backend.array(logits), own)))
    assert len(results[0]) == 2
    np.testing.assert_array_equal(results[0], results[1][:2])


@given(SEEDS, st.integers(1, 20), st.sampled_from([1000, 3001]))
def test_a_part_of_the_sequences_gets_the_same_bits(backend, seed, count, vocab):
    rng = np.random.default_rng(seed)
    logits, state = rng.standard_normal((count, vocab)).astype(np.float32) * 4, random_sampler(rng, count, vocab, True)
    together = backend.host(backend.sample(backend.array(logits), state.map(backend.array)))
    for first in rng.permutation(count)[:4]:
        part = slice(first, first + rng.integers(1, count + 1))
        alone = dataclasses.replace(state, rows=state.rows[part]).map(np.copy).map(backend.array)
        found = backend.host(backend.sample(backend.array(logits[part]), alone))
        np.testing.assert_array_equal(found, together[:, part])


def test_sample_of_unusable_logits(backend):
    """A row with a NaN or without a finite maximum gives -1 and NaN; the other rows do not notice."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((6, 70)).astype(np.float32)
    logits[0, 69] = np.nan
    logits[1, :] = -np.inf
    logits[2, 5] = np.inf
    logits[4, 1:] = -np.inf
    check_sample(backend, [logits], random_sampler(rng, 6, 70, False))


@given(SEEDS, st.integers(1, 40), st.sampled_from([1, 31, 2500]))
def test_log_probabilities_of_given_tokens_are_the_bits_that_sampling_reports(backend, seed, count, vocab):
    """Whatever is done between them: they share their scratch."""
    rng = np.random.default_rng(seed)
    logits = backend.array(rng.standard_normal((count, vocab)).astype(np.float32) * 4)
    state = random_sampler(rng, count, vocab, False)
    state.columns["temperature"] = 0
    state.variant = SamplerVariant.GREEDY
    chosen = Choice.unpack(backend.host(backend.sample(logits, state.map(np.copy).map(backend.array))))
    for _ in range(2):
        found = TokenScores.unpack(backend.host(backend.token_logprobs(logits, backend.array(chosen.tokens))))
        np.testing.assert_array_equal(found.logprobs, chosen.logprobs)


@given(SEEDS, st.integers(1, 600), st.integers(1, 600))
def test_the_newest_tokens_take_the_places_of_minus_one(backend, seed, count, tokens):
    rng = np.random.default_rng(seed)
    state = random_sampler(rng, count, 9, False)
    state.columns["last_token"] = rng.integers(0, 1000, len(state.table))
    before = rng.choice(np.array([-1, 3, 4], np.int32), tokens)
    after = backend.array(before)
    backend.insert_last_tokens(after, state.map(backend.array))
    newest = np.append(state.columns["last_token"][state.rows], np.full(tokens, -1))[:tokens]
    np.testing.assert_array_equal(backend.host(after), np.where(before < 0, newest, before))


def guessing(rng, count):
    """A state for guesses, half of them with a temperature, and a logit at the edge of each row's draw is unlikely."""
    state = random_sampler(rng, count, 9, False)
    state.columns["temperature"] = rng.choice(np.array([0, 0.1, 0.7, 1, 5], np.float32), len(state.table))
    return dataclasses.replace(state, offsets=rng.integers(0, 5, count).astype(np.int32))


@given(SEEDS, st.integers(1, 40), st.sampled_from([1, 31, 2500]), st.booleans())
def test_guesses_or_what_stands_for_them(backend, seed, count, vocab, with_ids):
    """Of greedy sequences the most likely token, the first of equal ones; 0 for a row without one."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 9, (count, vocab)).astype(np.float32)
    logits[rng.random(count) < 0.2, rng.integers(vocab)] = np.nan
    logits[rng.random(count) < 0.1] = -np.inf
    ids, state = rng.integers(0, 1000, vocab).astype(np.int32), guessing(rng, count)
    state.columns["temperature"] *= rng.random(len(state.table)) < 0.3
    out, on_device = backend.array(np.full((2, count), -5, np.int32)), state.map(backend.array)
    backend.guess(padded(backend, logits), out[1], on_device, backend.array(ids) if with_ids else None)
    usable = np.isfinite(logits.max(axis=1))
    expected = np.where(usable, logits.argmax(axis=1), 0)
    certain = ~usable | (state.columns["temperature"][state.rows] == 0)
    found = backend.host(out)
    np.testing.assert_array_equal(found[1][certain], (ids[expected] if with_ids else expected)[certain])
    assert (found[0] == -5).all()
    np.testing.assert_array_equal(backend.host(on_device.table), state.table)  # nothing is drawn


@given(SEEDS, st.integers(1, 40), st.sampled_from([1, 600, 2048, 32_000, 50_257]))
def test_a_guess_is_the_draw_of_a_lower_temperature(backend, seed, count, vocab):
    """Where the random word of the draw lies among the weights of all tokens, up to the rounding of sums."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((count, vocab)) * rng.choice([0.01, 1, 4])).astype(np.float32)
    logits[:, rng.integers(0, vocab, 3)] += rng.choice([0, 3, 12])
    logits[rng.random(logits.shape) < rng.choice([0, 0.5])] = -np.inf
    logits[:, rng.integers(vocab)] = 1
    state = guessing(rng, count)
    out = backend.array(np.full(count, -5, np.int32))
    backend.guess(padded(backend, logits), out, state.map(backend.array))
    own = state.columns[state.rows]
    words = random_words(own["seed"], own["sequence"], own["step"] + state.offsets) / 2**32
    for x, token, word, temperature in zip(logits, backend.host(out), words, own["temperature"], strict=True):
        if temperature == 0:
            assert token == x.argmax()
            continue
        ends = np.cumsum(np.exp((x.astype(np.float64) - x.max()) / (GUESS_HEAT * temperature)))
        ends /= ends[-1]
        begin = ends[token - 1] if token else 0
        # the exponential of a GPU is off by about 2e-6 at -87, and fp32 sums of 512 numbers by less
        assert begin - 1e-4 <= word <= ends[token] + 1e-4 and (ends[token] > begin or vocab == 1)


@given(SEEDS, st.integers(1, 600), st.integers(1, 9))
def test_guesses_take_the_places_that_name_them(backend, seed, count, guesses):
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 1000, (guesses, 3)).astype(np.int32)
    before = rng.integers(-made.size, 5, count).astype(np.int32)
    tokens, drafts = backend.array(np.full(count + 2, 7, np.int32)), backend.array(before)
    copy = backend.insert_guesses(tokens, drafts, backend.array(made))
    guessed = before < 0
    expected = np.where(guessed, made.reshape(-1)[np.where(guessed, -1 - before, 0)], before)
    np.testing.assert_array_equal(backend.host(drafts), expected)
    np.testing.assert_array_equal(backend.host(copy), expected)
    np.testing.assert_array_equal(backend.host(tokens), np.append(np.where(guessed, expected, 7), [7, 7]))


@given(SEEDS, st.integers(1, 300), st.integers(1, 9))
def test_positions_follow_from_the_tokens_that_a_sequence_has(backend, seed, count, places):
    rng = np.random.default_rng(seed)
    state = random_sampler(rng, count, 9, False)
    state.columns["step"] = rng.integers(0, 1000, len(state.table))
    before = rng.integers(-9, 9, (places, len(state.rows))).astype(np.int32)
    after = backend.array(before)
    backend.insert_positions(after, state.map(backend.array))
    moved = -1 - before + state.columns["step"][state.rows]
    np.testing.assert_array_equal(backend.host(after), np.where(before < 0, moved, before))


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def test_the_constants_are_the_definitions() -> None:
    source = SOURCES.source("sampling/sample.cuh")

    def values(name: str) -> list[float]:
        match = re.search(rf"{name}\S* = ([^;]+);", source)
        assert match is not None
        return [float.fromhex(text) for text in re.findall(r"(0x[\d.a-f]+p[+-]?\d+)f", match[1])]

    assert values("LOG2_E") == [float(sampling.LOG2_E)]
    assert values("EXP2") == [float(c) for c in sampling.EXP2_COEFFICIENTS]
    assert f"WEIGHT_BITS = {sampling.WEIGHT_BITS};" in source
    assert sampling.PROMPT_FLAG == 1 << 30 and "PROMPT_FLAG = 1 << 30;" in source
    for name in ("NULL_ROW", "MAX_LOGPROBS", "MAX_LOGIT_BIAS", "MAX_END_TOKENS"):
        assert f"{name} = {getattr(sampling, name)};" in source


def test_the_row_of_the_table_is_the_definitions() -> None:
    match = re.search(r"struct SamplerRow \{(.*?)\};", SOURCES.source("sampling/sample.cuh"), re.DOTALL)
    assert match is not None
    types = {"u64": np.uint64, "int": np.int32, "float": np.float32}
    members = re.findall(r"(\w+) (\w+)(\[MAX_END_TOKENS\])?;", match[1])
    shapes = [(name, types[kind], (sampling.MAX_END_TOKENS,) if array else ()) for kind, name, array in members]
    assert np.dtype(shapes) == sampling.ROW


def test_the_buckets_reach_down_to_the_last_token_of_any_weight() -> None:
    least = np.float32([[0.0, -28.8]])
    assert sampling.weights(least, np.float32([0]), np.float32([1]))[0, 1] == 0
    assert 28.8 * sampling.LOG2_E * constants.SAMPLING_BUCKETS_PER_OCTAVE < constants.SAMPLING_BUCKETS


LOGITS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "normal": lambda rng, rows, vocab: rng.normal(0, rng.uniform(0.1, 8), (rows, vocab)),
    "few values": lambda rng, rows, vocab: rng.integers(-3, 4, (rows, vocab)) * rng.choice([0.5, 3, 0.0]),
    "fp16": lambda rng, rows, vocab: rng.normal(0, 3, (rows, vocab)).astype(np.float16),
    "all equal": lambda rng, rows, vocab: np.full((rows, vocab), rng.normal()),
    "peaked": lambda rng, rows, vocab: rng.normal(0, 1, (rows, vocab)) + 30 * (rng.random((rows, vocab)) < 3 / vocab),
    "wide": lambda rng, rows, vocab: rng.normal(0, 1, (rows, vocab)) * 10.0 ** rng.uniform(-30, 30, (rows, vocab)),
    "mostly -inf": lambda rng, rows, vocab: np.where(
        rng.random((rows, vocab)) < 0.9, -np.inf, rng.normal(0, 2, (rows, vocab))
    ),
    "close": lambda rng, rows, vocab: 8 + rng.integers(0, 900, (rows, vocab)) * 2.0**-20,
}


def spoil(rng: np.random.Generator, logits: np.ndarray) -> np.ndarray:
    """Now and then a row from which no token can be chosen."""
    rows, vocab = logits.shape
    for row in np.flatnonzero(rng.random(rows) < 0.1):
        kind = rng.integers(4)
        logits[row, :] = -INF if kind == 0 else logits[row]
        logits[row, rng.integers(vocab)] = (-INF, NAN, INF, -NAN)[kind]
    return logits


def check_random(backend: Backend, seed: int, kind: str, rows: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    full, greedy = rng.random(2) < [0.5, 0.2]
    state = random_sampler(rng, rows, vocab, bool(full))
    if greedy and not full:
        state.columns["temperature"] = 0
        state = dataclasses.replace(state, variant=SamplerVariant.GREEDY)
    check_sample(backend, [spoil(rng, LOGITS[kind](rng, rows, vocab).astype(np.float32)) for _ in range(2)], state)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1, 2, 31, 1000, 2047, 2048, 2049, 5003, 128256])
@pytest.mark.parametrize("kind", ["normal", *repeats(*list(LOGITS)[1:])])
def test_draws_what_the_definition_draws(cuda_backend: Backend, kind: str, vocab: int) -> None:
    for seed in range(2 if vocab > 10000 else 8):
        rows = [1, 3, 33, 8, 2, 16, 5, 33][seed] if vocab <= 10000 else [1, 4][seed]
        check_random(cuda_backend, seed * 1000 + vocab, kind, rows, vocab)


@pytest.mark.gpu
def test_steps_of_different_sizes_share_their_scratch(cuda_backend: Backend) -> None:
    """More rows than draw at once, then fewer, then more."""
    rng = np.random.default_rng(8)
    for count in (5, 2 * ROWS_AT_ONCE + 7, 3, 300):
        logits = LOGITS["normal"](rng, count, 2500).astype(np.float32)
        check_sample(cuda_backend, [logits], random_sampler(rng, count, 2500, full=count < 300))


@pytest.mark.gpu
@pytest.mark.repeats
def test_many_random_rows(cuda_backend: Backend) -> None:
    """Thousands of rows with parameters of their own."""
    rng = np.random.default_rng(5)
    for _ in range(4):
        logits = LOGITS["normal"](rng, 1024, 3001).astype(np.float32)
        state = random_sampler(rng, 1024, 3001, full=bool(rng.random() < 0.5))
        check_sample(cuda_backend, [spoil(rng, logits)], state)


@pytest.mark.gpu
@pytest.mark.repeats
@pytest.mark.parametrize("vocab", [300, 5003])
@pytest.mark.parametrize("spread", [0.02, 1.0, 3.0])
def test_where_the_tail_is_cut(cuda_backend: Backend, vocab: int, spread: float) -> None:
    """Logits that fall with the id, and random words near 2**32: what is drawn is the last token that is kept."""
    rows, seeds = 64, np.arange(1 << 18, dtype=np.uint64)
    zeros = np.zeros(len(seeds), np.int32)
    rng = np.random.default_rng(vocab)
    logits = -np.sort(-rng.standard_normal((rows, vocab)).astype(np.float32) * np.float32(spread), axis=1)
    logits[: rows // 4] = np.rint(4 * logits[: rows // 4]) / 4
    for _ in range(3):
        parameters = sampling.neutral_rows(rows)
        parameters["temperature"] = rng.choice(np.float32([0.7, 1, 2]), rows)
        parameters["seed"] = seeds[np.argsort(sampling.random_words(seeds, zeros, zeros))[-rows:]]
        parameters["top_k"] = rng.integers(0, vocab, rows)
        parameters["top_p"] = rng.choice(np.float32([1, 0.5, 0.9, 0.99, 1 - 2**-20]), rows)
        state = state_of([SequenceSampling(row) for row in parameters], vocab)
        check_sample(cuda_backend, [logits], state)


@given(SEEDS, st.integers(1, 9), st.sampled_from([1, 2, 45, 700]))
def test_log_probabilities_of_given_tokens(backend, seed, count, vocab):
    """Scores of chosen tokens are those that sampling reports, and a row's do not depend on other rows."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 5, (count, vocab)).astype(np.float32)
    tokens = rng.integers(0, vocab, count).astype(np.int32)
    found = TokenScores.unpack(backend.host(backend.token_logprobs(padded(backend, logits), backend.array(tokens))))
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(found.best_tokens, logits.argmax(axis=1))
    assert_close(found.logprobs, exact[np.arange(count), tokens], "logprob", np.float32, 1 + np.abs(logits).max(axis=1))
    alone = backend.token_logprobs(padded(backend, logits[-1:]), backend.array(tokens[-1:]))
    for part, whole in zip(TokenScores.unpack(backend.host(alone)), found, strict=True):
        np.testing.assert_array_equal(part, whole[-1:])


@pytest.mark.gpu
def test_a_graph_of_the_launches_draws_anew_each_time(cuda_backend: Backend) -> None:
    rng = np.random.default_rng(6)
    logits, state = rng.standard_normal((5, 4000)).astype(np.float32), random_sampler(rng, 5, 4000, full=True)
    expected_state, device_state = state.map(np.copy), state.map(cuda_backend.array)
    on_gpu = padded(cuda_backend, logits)
    work = cuda_backend.capture(lambda: cuda_backend.sample(on_gpu, device_state))
    for _ in range(5):
        tokens = sampling.sample(logits, expected_state).tokens
        np.testing.assert_array_equal(cuda_backend.host(work())[0], tokens)


@pytest.mark.gpu
def test_a_graph_stays_valid_while_rows_are_written(cuda_backend: Backend) -> None:
    """Rows of the table, their masks and the rows of the step change between replays, without another capture."""
    rng = np.random.default_rng(7)
    vocab, logits = 700, rng.standard_normal((4, 700)).astype(np.float32)
    expected, on_gpu = random_sampler(rng, 4, vocab, full=True), padded(cuda_backend, logits)
    state = expected.map(cuda_backend.array)
    work = cuda_backend.capture(lambda: cuda_backend.sample(on_gpu, state))
    for _ in range(8):
        tokens = sampling.sample(logits, expected).tokens
        np.testing.assert_array_equal(cuda_backend.host(work())[0], tokens)
        other = random_sampler(rng, 4, vocab, full=True)
        for name in ("table", "rows", "bias", "counts", "masks"):
            getattr(expected, name)[...] = getattr(other, name)
            cuda_backend.write(getattr(state, name), getattr(other, name))
