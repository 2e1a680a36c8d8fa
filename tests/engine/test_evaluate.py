"""Perplexity: what its definition gives in fp64, and errors for what has none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_kit import make_model, prompt_of

from bminf_lite.engine.evaluate import losses_of, perplexity
from bminf_lite.errors import UsageError

MODEL = make_model()


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
    spread = np.std(losses, ddof=1) / np.sqrt(len(losses)) if len(losses) > 1 else 0
    np.testing.assert_allclose(result.standard_error, result.value * spread, rtol=1e-4, atol=1e-9)
    assert f"{result.tokens:,} tokens" in str(result)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary():
    losses = losses_of(np.full((4, 50), 3e4, np.float32), np.array([0, 7, 49, 3]))
    np.testing.assert_allclose(np.exp(losses), 50, rtol=1e-6)


def test_certainty_and_its_opposite():
    logits = np.zeros((2, 8), np.float32)
    logits[:, 3] = 2e4
    np.testing.assert_array_equal(losses_of(logits, np.array([3, 4])), [0, 2e4])


@pytest.mark.parametrize(("tokens", "window"), [(1, 8), (0, 8), (9, 1), (9, 97), (9, -2)])
def test_what_cannot_be_scored(tokens, window):
    with pytest.raises(UsageError, match=r"at least|2 to the model's context, 96"):
        perplexity(MODEL, prompt_of(tokens), window)
