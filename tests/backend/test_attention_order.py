"""The order of sums in attention: tiles and segments change roundings only."""

from __future__ import annotations

from typing import Any

import numpy as np
from float64_operations import attended
from hypothesis import given
from hypothesis import strategies as st
from random_values import SEEDS
from tolerances import assert_close

from bminf_lite.backend.attention import PartialResult, attend, merge, segment_result
from bminf_lite.backend.values import AttentionSpec, LinearBias, RelativeBias

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 8


def random_heads(rng: np.random.Generator, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries ``[n, heads, head_dim]``, keys and values ``[kv_heads, keys, head_dim]``, with some large scores."""
    q = rng.standard_normal((queries, KV_HEADS * GROUP, HEAD_DIM)).astype(np.float32)
    k, v = rng.standard_normal((2, KV_HEADS, keys, HEAD_DIM)).astype(np.float32)
    return q * rng.choice([1, 8], (queries, 1, 1)).astype(np.float32), k, v


@given(SEEDS, st.integers(1, 70), st.integers(1, 20), st.sampled_from([(8, 16), (8, 32), (16, 16), (64, 128)]))
def test_any_tiles_and_segments_give_attention(seed: int, keys: int, queries: int, sizes: tuple[int, int]) -> None:
    """All queries see all keys; the float64 model knows neither tiles nor segments."""
    q, k, v = random_heads(np.random.default_rng(seed), queries, keys)
    found = attend(q, k, v, 0.4, causal=False, tile=sizes[0], segment=sizes[1])
    spec = AttentionSpec(KV_HEADS * GROUP, KV_HEADS, HEAD_DIM, 0.4)
    heads = (x.swapaxes(0, 1).astype(np.float64) for x in (k, v))
    expected, magnitude = attended(q.astype(np.float64), *heads, spec)
    assert_close(found, expected.reshape(found.shape), "attention", np.float32, magnitude.reshape(found.shape))


@given(SEEDS, st.integers(1, 70), st.integers(1, 40), st.data())
def test_queries_in_one_piece_and_in_several(seed: int, keys: int, queries: int, data: st.DataObject) -> None:
    """The bits of a query depend neither on the other queries of a call nor on later keys."""
    queries = min(queries, keys)
    q, k, v = random_heads(np.random.default_rng(seed), queries, keys)
    slopes = LinearBias(np.linspace(0.1, 1, KV_HEADS * GROUP, dtype=np.float32))
    window = data.draw(st.sampled_from([None, 3, 17]))
    options: dict[str, Any] = data.draw(st.sampled_from([{}, {"softcap": 2.0}, {"bias": slopes}]))
    options |= {"window": window, "tile": 8, "segment": 16}
    whole = attend(q, k, v, 0.4, keys - queries, **options)
    cut = data.draw(st.integers(0, queries - 1))
    seen = keys - queries + cut
    parts = [attend(q[cut:], k, v, 0.4, seen, **options)]
    if cut:
        parts.insert(0, attend(q[:cut], k[:, :seen], v[:, :seen], 0.4, keys - queries, **options))
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@given(SEEDS, st.integers(1, 40), st.integers(0, 60))
def test_a_linear_bias_is_a_table_of_its_values(seed: int, queries: int, context_len: int) -> None:
    rng, keys = np.random.default_rng(seed), context_len + queries
    q, k, v = random_heads(rng, queries, keys)
    slopes = rng.uniform(0, 1, KV_HEADS * GROUP).astype(np.float32)
    table = RelativeBias(slopes[:, None] * np.arange(-keys, keys + 1, dtype=np.float32), keys)
    found, expected = (attend(q, k, v, 0.4, context_len, bias=bias) for bias in (LinearBias(slopes), table))
    np.testing.assert_array_equal(found, expected)


@given(SEEDS, st.integers(1, 40))
def test_a_soft_cap_far_above_the_scores_changes_nothing(seed: int, keys: int) -> None:
    q, k, v = random_heads(np.random.default_rng(seed), 3, keys)
    found, expected = (attend(q, k, v, 0.4, causal=True, softcap=cap) for cap in (1e5, None))
    assert_close(found, expected, "attention", np.float32, np.abs(v).max() * (1 + np.abs(q).max() * np.abs(k).max()))


def test_a_soft_cap_bounds_the_ratio_of_weights() -> None:
    """Scores of plus and minus infinity are the cap and minus the cap."""
    q, k = np.full((1, 1, 2), 1e6, np.float32), np.array([[[1.0, 1.0], [-1.0, -1.0]]], np.float32)
    found = attend(q, k, np.array([[[1.0, 0.0], [0.0, 1.0]]], np.float32), 1.0, context_len=1, softcap=2.0)
    np.testing.assert_allclose(found.ravel(), np.array([1, np.exp(-4)]) / (1 + np.exp(-4)), rtol=1e-6)


@given(SEEDS, st.integers(1, 30))
def test_an_empty_side_leaves_the_other_unchanged(seed: int, keys: int) -> None:
    rng = np.random.default_rng(seed)
    scores, values = rng.standard_normal((1, 4, keys)).astype(np.float32), rng.standard_normal((1, keys, 5))
    part = segment_result(scores, values.astype(np.float32), 2, 8, np.float32)
    empty = segment_result(np.full_like(scores, -np.inf), values.astype(np.float32), 2, 8, np.float32)
    for merged in (merge(empty, part), merge(part, empty)):
        for name in PartialResult.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(merged, name), getattr(part, name))


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, k, v = random_heads(np.random.default_rng(0), 2, 5)
    np.testing.assert_array_equal(attend(q, k[:, :0], v[:, :0], 1.0, causal=False), 0)


def test_a_sequence_without_queries_gets_no_outputs() -> None:
    q, k, v = random_heads(np.random.default_rng(0), 0, 5)
    assert attend(q, k, v, 1.0).shape == q.shape


@given(SEEDS, st.integers(1, 70))
def test_a_sink_is_a_key_whose_value_is_zero(seed: int, keys: int) -> None:
    """A key of zeros has the score 0, which a sink of 0 stands for."""
    q, k, v = random_heads(np.random.default_rng(seed), 3, keys)
    padded = [np.concatenate([np.zeros_like(x[:, :1]), x], axis=1) for x in (k, v)]
    expected = attend(q, *padded, 0.3, causal=False)
    found = attend(q, k, v, 0.3, causal=False, sinks=np.zeros(q.shape[1], np.float32))
    assert_close(found, expected, "attention", np.float32, np.abs(v).max())


def test_a_sink_of_minus_infinity_changes_no_bit() -> None:
    q, k, v = random_heads(np.random.default_rng(1), 5, 200)
    sinks = np.full(q.shape[1], -np.inf, np.float32)
    np.testing.assert_array_equal(attend(q, k, v, 0.3, 195, sinks=sinks), attend(q, k, v, 0.3, 195))
