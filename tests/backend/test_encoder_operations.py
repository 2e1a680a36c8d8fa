"""Attention of encoders and cross-attention of every backend, against loops in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from float64_operations import attended
from hypothesis import given, settings
from hypothesis import strategies as st
from random_values import SEEDS, forbid_reading, make_batch, scattered_table
from tolerances import assert_close

from bminf_lite.backend.base import Backend
from bminf_lite.backend.functions import normalise, rotate
from bminf_lite.backend.quantization import quantize_heads
from bminf_lite.backend.values import SEGMENT, AttentionSpec, Norm, Pooling, RelativeBias, Rope

SPECS = {
    "small heads": AttentionSpec(4, 4, 8, 1.0),
    "grouped": AttentionSpec(6, 2, 12, 0.3),
    "head of 64": AttentionSpec(4, 4, 64, 0.125),
    "head of 128": AttentionSpec(2, 2, 128, 0.09),
    "rows padded to no whole head": AttentionSpec(1, 1, 48, 0.15),  # 144 columns, and 160 in a GPU's memory
}
COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def heads_of(rng: np.random.Generator, backend: Backend, tokens: int, count: int, head_dim: int) -> np.ndarray:
    """Random heads that the activation type holds exactly."""
    return rng.standard_normal((tokens, count, head_dim)).astype(backend.activation_dtype)


@settings(max_examples=min(6, settings.default.max_examples))
@given(SEEDS, COUNTS, st.sampled_from([None, 3, 16]))
@pytest.mark.parametrize("name", SPECS)
def test_encoder_attention(backend, name, seed, counts, max_distance):
    check_encoder_attention(backend, SPECS[name], np.random.default_rng(seed), counts, max_distance)


def check_encoder_attention(
    backend: Backend, spec: AttentionSpec, rng: np.random.Generator, counts: list[int], max_distance: int | None
) -> None:
    """One step of sources of ``counts`` tokens, biased by distance up to ``max_distance`` if there is one."""
    q, k, v = (heads_of(rng, backend, sum(counts), n, spec.head_dim) for n in (spec.heads, *2 * (spec.kv_heads,)))
    device_spec = spec
    if max_distance is not None:
        values = rng.standard_normal((spec.heads, 2 * max_distance + 1)).astype(np.float32)
        device_spec = replace(spec, bias=RelativeBias(backend.array(values), max_distance))
        spec = replace(spec, bias=RelativeBias(values, max_distance))
    qkv = np.concatenate([x.reshape(sum(counts), -1) for x in (q, k, v)], axis=1)
    batch = make_batch(backend, counts, [0] * len(counts))
    out = backend.host(backend.encoder_attention(backend.array(qkv), device_spec, batch))
    assert out.dtype == backend.activation_dtype
    parts = [np.split(x.astype(np.float64), np.cumsum(counts)[:-1]) for x in (q, k, v)]
    results = [attended(*rows, spec) for rows in zip(*parts, strict=True)]
    expected, magnitude = (np.concatenate(x).reshape(out.shape) for x in zip(*results, strict=True))
    assert_close(out, expected, "attention", backend.activation_dtype, magnitude)


SIZES = {"tiles": [1, 70, 300, 2, 64, 129, 65, 128], "one": [200], "segments": [SEGMENT + 70, 30]}
"""Tokens of texts: of less than a tile of keys and of several, and of more than a segment of keys."""


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("sizes", SIZES)
def test_encoder_attention_of_long_texts(backend, sizes, kv_heads, window):
    spec = AttentionSpec(2, kv_heads, 64, 0.125, window=window)
    check_encoder_attention(backend, spec, np.random.default_rng(3), SIZES[sizes], None)


def test_attention_of_a_text_does_not_depend_on_the_other_texts(backend):
    """Its bits are those of the text alone, also where the others have NaN."""
    counts, spec, rng = [100, 333, 64, 200], AttentionSpec(2, 2, 64, 0.125), np.random.default_rng(5)
    qkv = heads_of(rng, backend, sum(counts), 6, 64).reshape(sum(counts), -1)
    ends = np.cumsum(counts)

    def computed(rows: np.ndarray, counts: list[int]) -> np.ndarray:
        batch = make_batch(backend, counts, [0] * len(counts))
        return np.asarray(backend.host(backend.encoder_attention(backend.array(rows), spec, batch)))

    together = computed(qkv, counts)
    for i in range(len(counts)):
        rows = slice(ends[i] - counts[i], ends[i])
        np.testing.assert_array_equal(computed(qkv[rows], counts[i : i + 1]), together[rows])
    qkv[ends[0] : ends[1]] = np.nan
    beside_nan = computed(qkv, counts)
    for rows in (slice(0, ends[0]), slice(ends[1], None)):
        np.testing.assert_array_equal(beside_nan[rows], together[rows])


@settings(max_examples=min(4, settings.default.max_examples))
@given(SEEDS, st.lists(st.integers(1, 300), min_size=1, max_size=3), st.integers(1, 70), st.booleans())
def test_encoder_attention_with_a_window_and_rotary_positions(backend, seed, counts, window, has_norms):
    """A token sees those less than ``window`` tokens away; heads are rotated, and normalised if there are norms."""
    rng, spec = np.random.default_rng(seed), AttentionSpec(4, 2, 16, 0.25, window=window)
    frequencies = (100.0 ** -np.linspace(0, 1, 8)).astype(np.float32)
    weights = [rng.uniform(0.5, 1.5, 16).astype(np.float32) for _ in range(2)]
    q, k, v = (heads_of(rng, backend, sum(counts), n, 16) for n in (4, 2, 2))
    norms = [Norm(backend.vector(w), 1e-6) if has_norms else None for w in weights]
    device_spec = replace(spec, rope=Rope(backend.vector(frequencies)), q_norm=norms[0], k_norm=norms[1])
    qkv = np.concatenate([x.reshape(sum(counts), -1) for x in (q, k, v)], axis=1)
    batch = make_batch(backend, counts, [0] * len(counts))
    out = backend.host(backend.encoder_attention(backend.array(qkv), device_spec, batch)).astype(np.float64)
    first = 0
    for count in counts:
        own = slice(first, first + count)
        positions = np.arange(count)
        heads = []
        for x, weight in ((q, weights[0]), (k, weights[1])):
            rows = x[own].astype(np.float32)
            rows = normalise(rows, Norm(weight, 1e-6)) if has_norms else rows
            rows = rotate(rows, positions, Rope(frequencies))
            heads.append(rows.astype(backend.activation_dtype).astype(np.float64))
        keys, values = np.repeat(heads[1], 2, axis=1), np.repeat(v[own].astype(np.float64), 2, axis=1)
        scores = np.einsum("qhd,khd->hqk", heads[0], keys) * spec.scale
        scores = np.where(np.abs(positions[:, None] - positions) < window, scores, -np.inf)
        weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weight /= weight.sum(axis=-1, keepdims=True)
        expected = np.einsum("hqk,khd->qhd", weight, values).reshape(count, -1)
        magnitude = np.einsum("hqk,khd->qhd", weight, np.abs(values)).reshape(count, -1)
        assert_close(out[own], expected, "attention", backend.activation_dtype, magnitude)
        first += count


@settings(max_examples=min(8, settings.default.max_examples))
@given(SEEDS, st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any), st.integers(1, 70), st.booleans())
@pytest.mark.parametrize("pooling", Pooling)
def test_pooling(backend, pooling, seed, counts, features, skips):
    """Against sums in float64; sequences without tokens, and those of which nothing is left, have zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((sum(counts), features)).astype(np.float32)
    skipped = rng.integers(0, 12, len(counts)).astype(np.int32) if skips else np.zeros(len(counts), np.int32)
    batch = make_batch(backend, counts, [0] * len(counts))
    given_skipped = backend.array(skipped) if skips else None
    found = backend.host(backend.pool(backend.array(x), batch, pooling, given_skipped))
    assert found.dtype == np.float32 and found.shape == (len(counts), features)
    for b, (rows, skip) in enumerate(zip(np.split(x, np.cumsum(counts)[:-1]), skipped, strict=True)):
        expected = float64_pooling(rows[skip:].astype(np.float64), pooling, int(skip))
        np.testing.assert_allclose(found[b], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("bad", [0, 1, 17, 31, 32, 39])
@pytest.mark.parametrize("pooling", Pooling)
def test_a_nan_among_pooled_tokens_makes_its_column_nan(backend, pooling, bad):
    """Of its sequence alone, and also where only the largest values are kept."""
    x = np.random.default_rng(bad).standard_normal((80, 3)).astype(np.float32)
    x[bad, 1] = np.nan
    found = np.isnan(backend.host(backend.pool(backend.array(x), make_batch(backend, [40, 40], [0, 0]), pooling)))
    is_read = {Pooling.FIRST: bad == 0, Pooling.LAST: bad == 39}.get(pooling, True)
    np.testing.assert_array_equal(found, [[False, is_read, False], [False] * 3])


def float64_pooling(rows: np.ndarray, pooling: Pooling, first: int) -> np.ndarray:
    """What the words of :class:`Pooling` say, of rows at positions from ``first`` on."""
    if not len(rows):
        return np.zeros(rows.shape[1])
    weights = np.arange(first, first + len(rows))[:, None] + 1.0
    return {
        Pooling.FIRST: lambda: rows[0],
        Pooling.LAST: lambda: rows[-1],
        Pooling.MAX: lambda: rows.max(axis=0),
        Pooling.MEAN: lambda: rows.mean(axis=0),
        Pooling.MEAN_SQRT_LEN: lambda: rows.sum(axis=0) / np.sqrt(len(rows)),
        Pooling.WEIGHTED_MEAN: lambda: (rows * weights).sum(axis=0) / weights.sum(),
    }[pooling]()


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", Pooling)
def test_the_gpu_pools_in_the_order_of_the_definition(cuda_backend, pooling):
    """Bit for bit: both add the same numbers in the same order."""
    counts, rng = [1, 513, 7, 0, 64], np.random.default_rng(3)
    x = rng.standard_normal((sum(counts), 385)).astype(np.float32)
    results = []
    for ops in (cuda_backend, Backend(np.float16)):
        batch = make_batch(ops, counts, [0] * len(counts))
        results.append(np.array(ops.host(ops.pool(ops.array(x), batch, pooling, ops.array(np.full(5, 2, np.int32))))))
    assert np.array_equal(*results)


@settings(max_examples=min(6, settings.default.max_examples))
@given(SEEDS, st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=4), st.booleans())
@pytest.mark.parametrize("int8", [False, True], ids=["fp16", "int8"])
@pytest.mark.parametrize("name", SPECS)
def test_cross_attention_over_stored_sources(backend, name, int8, seed, lengths, decoding):
    tokens = [1 if decoding else m for _, m in lengths]
    rng, counts = np.random.default_rng(seed), [n for n, _ in lengths]
    check_cross_attention(backend, SPECS[name], rng, counts, tokens, 48, int8)


def check_cross_attention(
    backend: Backend,
    spec: AttentionSpec,
    rng: np.random.Generator,
    counts: list[int],
    tokens: list[int],
    capacity: int,
    int8: bool,
) -> None:
    """Sources stored together in slots in any order, of a cache that holds longer ones beside them."""
    table = rng.permutation(scattered_table(5, capacity))[: len(counts)]
    cache = backend.layer_cache(1 + scattered_table(5, capacity).size, spec.kv_heads, spec.head_dim, int8=int8)
    forbid_reading(backend, cache)
    k, v = (heads_of(rng, backend, sum(counts), spec.kv_heads, spec.head_dim) for _ in range(2))
    kv = np.concatenate([x.reshape(sum(counts), -1) for x in (k, v)], axis=1)
    backend.store_source(
        backend.array(kv), spec, cache, make_batch(backend, counts, [0] * len(counts), source_tables=table)
    )
    q = heads_of(rng, backend, sum(tokens), spec.heads, spec.head_dim)
    positions = rng.integers(0, 30, len(tokens)).tolist()
    batch = make_batch(backend, tokens, positions, source_tables=table, source_lens=counts)
    out = backend.cross_attention(backend.array(q.reshape(sum(tokens), -1)), spec, cache, batch)
    out = backend.host(out)
    assert out.dtype == backend.activation_dtype
    if int8:
        k, v = ((s.astype(np.float32)[..., None] * c).astype(k.dtype) for c, s in map(quantize_heads, (k, v)))
    parts = [np.split(x.astype(np.float64), np.cumsum(counts)[:-1]) for x in (k, v)]
    queries = np.split(q.astype(np.float64), np.cumsum(tokens)[:-1])
    results = [attended(*rows, spec) for rows in zip(queries, *parts, strict=True)]
    expected, magnitude = (np.concatenate(x).reshape(out.shape) for x in zip(*results, strict=True))
    assert_close(out, expected, "attention", backend.activation_dtype, magnitude)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[256], [300, 1, 64, 129]])
def test_encoder_attention_of_cpm2(cuda_backend, counts):
    check_encoder_attention(cuda_backend, AttentionSpec(64, 64, 64, 0.125), np.random.default_rng(1), counts, 128)


@pytest.mark.gpu
@pytest.mark.parametrize(("counts", "tokens"), [([256], [1]), ([700, 3, 64], [1] * 3), ([256, 65], [70, 3])])
@pytest.mark.parametrize("heads", [64, 3])
@pytest.mark.parametrize("int8", [False, True], ids=["fp16", "int8"])
def test_cross_attention_of_cpm2(cuda_backend, heads, counts, tokens, int8):
    """Attention of one token, also where few heads leave much of the GPU to each of them, and of several tokens."""
    spec = AttentionSpec(heads, heads, 64, 0.125)
    check_cross_attention(cuda_backend, spec, np.random.default_rng(2), counts, tokens, 768, int8)
