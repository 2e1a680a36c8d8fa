"""Perplexity: what its definition gives in fp64, and errors for what has none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_kit import make_model, prompt_of

from bminf_lite.backend.base import Backend
from bminf_lite.errors import UsageError
from bminf_lite.evaluation.corpus import sliding_windows
from bminf_lite.evaluation.perplexity import Perplexity, cross_entropy, mean_and_error, perplexity, window_losses

MODEL = make_model(Backend())


@given(st.integers(2, 90), st.integers(2, 96))
def test_the_definition(tokens, window):
    ids = prompt_of(tokens)
    losses = []
    for start in range(0, tokens, window):
        part = ids[start : start + window]
        logits = MODEL.logits(part).astype(np.float64)
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        losses += [-np.log(probabilities[i, token]) for i, token in enumerate(part[1:])]
    result = perplexity(MODEL, ids, window)
    assert result.tokens == len(losses)
    np.testing.assert_allclose(result.value, np.exp(np.mean(losses)), rtol=1e-5)
    assert f"{result.tokens:,} tokens" in str(result)


@given(st.integers(2, 90), st.integers(2, 96), st.data())
def test_a_stride_scores_every_token_after_the_first_with_its_own_context(tokens, window, data):
    stride = data.draw(st.integers(1, window - 1))
    ids = prompt_of(tokens)
    losses = np.concatenate(list(window_losses(MODEL, sliding_windows([ids], window, stride))))
    assert len(losses) == tokens - 1
    whole = cross_entropy(MODEL.logits(ids)[:-1], np.array(ids[1:]))
    np.testing.assert_allclose(losses[: window - 1], whole[: window - 1], rtol=1e-4, atol=1e-5)


def test_the_error_is_that_of_independent_values():
    """Repeating each of n values adds nothing, so the error is that of the n values."""
    values = np.random.default_rng(0).standard_normal(40_000)
    mean, error = mean_and_error(values)
    assert mean == values.mean()
    np.testing.assert_allclose(error, 1 / 200, rtol=0.15)
    np.testing.assert_allclose(mean_and_error(np.repeat(values[:2500], 10))[1], 1 / 50, rtol=0.15)


def test_the_error_of_few_values():
    for n in (2, 3, 4, 5):
        assert mean_and_error(np.arange(n, dtype=float))[1] > 0
        assert mean_and_error(np.ones(n)) == (1, 0)
    assert np.isnan(mean_and_error(np.ones(1))[1])
    assert str(Perplexity.from_losses(np.zeros(1))) == "1.0000 over 1 tokens"


def test_uniform_and_certain_predictions():
    uniform = cross_entropy(np.full((4, 50), 3e4, np.float32), np.array([0, 7, 49, 3]))
    np.testing.assert_allclose(np.exp(uniform), 50, rtol=1e-6)
    logits = np.zeros((2, 8), np.float32)
    logits[:, 3] = 2e4
    np.testing.assert_array_equal(cross_entropy(logits, np.array([3, 4])), [0, 2e4])


@pytest.mark.parametrize(("tokens", "window"), [(1, 8), (0, 8), (9, 1), (9, 97), (9, -2)])
def test_what_cannot_be_scored(tokens, window):
    with pytest.raises(UsageError, match=r"2 tokens at least|2 to the model's context, 96"):
        perplexity(MODEL, prompt_of(tokens), window)
