"""Gains of norms of heads for an int8 cache: the same scores, with smaller errors."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.backend.functions import rotate
from bminf_lite.backend.quantization import quantize_heads
from bminf_lite.backend.rotation import rotated_heads
from bminf_lite.backend.values import Rope
from bminf_lite.layers.norm import balanced_gains

ROPE = Rope((1 / 100 ** (np.arange(32) / 32)).astype(np.float32))


def drawn(seed: int) -> tuple[np.ndarray, ...]:
    """Gains of queries and keys of 64 elements, some of them large, and normalised queries and keys."""
    random = np.random.default_rng(seed)
    gains = np.exp(random.standard_normal((2, 64))).astype(np.float32)
    return (*gains, *random.standard_normal((2, 40, 1, 64)).astype(np.float32))


@given(st.integers(0, 2**32 - 1))
def test_scores_stay_the_same_and_their_errors_get_smaller(seed: int) -> None:
    query, key, q, k = drawn(seed)

    def prepared(query_gain: np.ndarray, key_gain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(len(q))
        return rotated_heads(rotate(q * query_gain, positions, ROPE)), rotated_heads(
            rotate(k * key_gain, positions, ROPE)
        )

    def scores(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return np.asarray(queries[:, 0].astype(np.float64) @ keys[:, 0].T)

    exact, errors = scores(*prepared(query, key)), []
    for gains in ((query, key), balanced_gains(query, key)):
        queries, keys = prepared(*gains)
        np.testing.assert_allclose(scores(queries, keys), exact, atol=1e-4 * np.abs(exact).max())
        codes, scale = quantize_heads(keys)
        errors.append(np.square(scores(queries, scale[..., None].astype(np.float32) * codes) - exact).mean())
    assert errors[1] < 0.9 * errors[0]


def test_gains_of_zeros_and_of_odd_heads_stay_as_they_are() -> None:
    for query, key in ((np.zeros(8), np.ones(8)), (np.arange(7), np.ones(7))):
        for found, gain in zip(balanced_gains(query, key), (query, key), strict=True):
            np.testing.assert_array_equal(found, gain.astype(np.float32))
