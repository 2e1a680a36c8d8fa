"""The cache of a whole model: room for what was asked, growth by half at least, never past the context."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import CACHE_BLOCK
from bminf_lite.layers.cache import CacheShape, KVCache

SHAPE = CacheShape(layers=2, kv_heads=1, head_dim=2)


@given(st.integers(1, 3000), st.integers(1, 5000), st.lists(st.integers(1, 5000), max_size=6))
def test_capacity(first, limit, requests):
    first = min(first, limit)
    cache = KVCache(Backend(), SHAPE, 3, first, limit)
    for tokens in (first, *(min(r, limit) for r in requests)):
        before = cache.capacity
        cache.reserve(tokens)
        assert tokens <= cache.capacity <= limit
        assert (cache.capacity > before) == (tokens > before)
        if cache.capacity > before:
            assert cache.capacity >= min(limit, before * 3 // 2)
        assert cache.capacity % CACHE_BLOCK == 0 or cache.capacity == limit
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert held == 3 * cache.capacity * SHAPE.bytes_per_token(4)
        assert len(cache.layers) == 2 and all(layer.capacity == cache.capacity for layer in cache.layers)


def test_contents_survive():
    cache = KVCache(Backend(), SHAPE, 2, 5, 2000)
    cache.layers[1].keys[1, 0, :5] = np.arange(10).reshape(5, 2)
    cache.reserve(300)
    np.testing.assert_array_equal(cache.layers[1].keys[1, 0, :5], np.arange(10).reshape(5, 2))
