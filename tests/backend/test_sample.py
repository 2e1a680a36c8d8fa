"""The sampling operation of every backend draws the tokens that the definition draws, and advances the same state."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_values import SEEDS, make_batch, random_sampler
from tolerances import assert_close

from bminf_lite.backend import sampling
from bminf_lite.backend.base import Backend
from bminf_lite.backend.sampling import SamplerState


def check_sample(backend: Backend, logits: np.ndarray, state: SamplerState, draws: int = 3) -> None:
    """A few draws in a row: tokens equal, log-probabilities close, state and step advanced alike."""
    expected_state, device_state = state.map(np.copy), state.map(backend.array)
    batch = make_batch(backend, [1] * len(logits), [7] * len(logits), list(range(len(logits))))
    for i in range(draws):
        tokens, logprobs = sampling.sample(logits, expected_state)
        result = backend.host(backend.sample(backend.array(logits), device_state, batch)).copy()
        assert result.dtype == np.int32 and result.shape == (2, len(logits))
        np.testing.assert_array_equal(result[0], tokens)
        spread = np.abs(np.where(np.isfinite(logits), logits, 0)).max(axis=1)
        assert_close(result[1].view(np.float32), logprobs, "logprob", np.float32, 1 + spread)
        np.testing.assert_array_equal(backend.host(batch.tokens), np.maximum(tokens, 0))
        np.testing.assert_array_equal(backend.host(batch.context_lens), 8 + i)
    np.testing.assert_array_equal(backend.host(device_state.step), expected_state.step)
    if state.counts is not None:
        np.testing.assert_array_equal(backend.host(device_state.counts), expected_state.counts)


VOCABULARIES = st.sampled_from([1, 2, 3, 31, 32, 33, 255, 256, 257, 1000, 5003])


@given(SEEDS, st.integers(1, 5), VOCABULARIES, st.booleans(), st.booleans())
def test_sample(backend, seed, count, vocab, penalties, with_ties):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((count, vocab)).astype(np.float32) * 4
    if with_ties:
        logits = np.rint(logits)
    check_sample(backend, logits, random_sampler(rng, count, vocab, penalties))


@given(SEEDS, st.integers(1, 5), VOCABULARIES)
def test_sample_that_is_known_to_be_greedy(backend, seed, count, vocab):
    """A backend may take a shorter way; of equal logits the lowest id wins on it too."""
    rng = np.random.default_rng(seed)
    logits = np.rint(rng.standard_normal((count, vocab)) * 2).astype(np.float32)
    state = random_sampler(rng, count, vocab, False)
    state.temperature[:] = 0
    check_sample(backend, logits, dataclasses.replace(state, greedy=True))


def test_sample_without_a_step(backend):
    """As after a prefill: the state advances all the same."""
    rng = np.random.default_rng(0)
    logits, state = rng.standard_normal((3, 50)).astype(np.float32), random_sampler(rng, 3, 50, True)
    expected_state, device_state = state.map(np.copy), state.map(backend.array)
    tokens, _ = sampling.sample(logits, expected_state)
    result = backend.host(backend.sample(backend.array(logits), device_state))
    np.testing.assert_array_equal(result[0], tokens)
    np.testing.assert_array_equal(backend.host(device_state.step), expected_state.step)


def test_sample_of_unusable_logits(backend):
    """A row with a NaN or without a finite maximum gives -1 and NaN; the other rows do not notice."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((6, 70)).astype(np.float32)
    logits[0, 69] = np.nan
    logits[1, :] = -np.inf
    logits[2, 5] = np.inf
    logits[4, 1:] = -np.inf
    check_sample(backend, logits, random_sampler(rng, 6, 70, False), draws=1)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("vocab", [32000, 128256, 151936])
@pytest.mark.parametrize("penalties", [False, True])
def test_real_vocabularies(cuda_backend, count, vocab, penalties):
    rng = np.random.default_rng(vocab)
    for _ in range(4):
        logits = rng.standard_normal((count, vocab)).astype(np.float32) * 3
        check_sample(cuda_backend, logits, random_sampler(rng, count, vocab, penalties))
