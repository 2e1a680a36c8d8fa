"""The pools of a model's cache: groups of layers by window, room for sequences, and growth that keeps contents."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import BLOCK_SIZE, AllTokens, Window
from bminf_lite.layers.cache import CacheLayout, KVCache


@given(st.integers(1, 5), st.integers(1, 3000))
def test_sequences_have_blocks_of_their_own(sequences: int, tokens: int) -> None:
    shape = CacheLayout.uniform(layers=2, kv_heads=1, head_dim=2)
    cache = KVCache.for_sequences(Backend(), shape, sequences, tokens)
    (table,) = cache.tables(sequences, tokens)
    assert tokens <= table.shape[1] * BLOCK_SIZE < tokens + BLOCK_SIZE
    assert sorted(table.ravel()) == list(range(1, cache.num_blocks[0]))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == cache.num_blocks[0] * BLOCK_SIZE * shape.bytes_per_token(4)


@given(st.lists(st.sampled_from([None, 4, 16]), min_size=1, max_size=6))
def test_layers_with_equal_windows_form_a_group(windows: list[int | None]) -> None:
    shape = CacheLayout.uniform(len(windows), 1, 2, windows)
    kept = [AllTokens() if window is None else Window(window) for window in windows]
    assert [shape.groups[shape.group_of(i)] for i in range(len(windows))] == kept
    assert sum(len(shape.layers_of(g)) for g in range(len(shape.groups))) == len(windows)
    cache = KVCache(Backend(), shape, range(2, 2 + len(shape.groups)))
    assert [layer.num_blocks - 2 for layer in cache.layers] == [layer.group for layer in cache.layers]


def test_contents_survive() -> None:
    cache = KVCache(Backend(), CacheLayout.uniform(2, 1, 2), [2], [7])
    cache.layers[1].keys[1, 0, :5] = np.arange(10).reshape(5, 2)
    cache.grow(0, 7)
    assert cache.num_blocks == [7] and cache.layers[0].num_blocks == 7
    np.testing.assert_array_equal(cache.layers[1].keys[1, 0, :5], np.arange(10).reshape(5, 2))
