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
from bminf_lite.backend.quantization import quantize_heads
from bminf_lite.backend.values import AttentionSpec, RelativeBias

SPECS = {
    "small heads": AttentionSpec(4, 4, 8, 1.0),
    "grouped": AttentionSpec(6, 2, 12, 0.3),
    "head of 64": AttentionSpec(4, 4, 64, 0.125),
    "head of 128": AttentionSpec(2, 2, 128, 0.09),
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
