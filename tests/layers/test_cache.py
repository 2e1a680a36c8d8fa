"""The pools of a model's cache: groups of layers by window, room for sequences, and growth that keeps contents."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.backend.base import Backend
from bminf_lite.backend.cache_values import AllTokens, LatestState, StateArray, StateCache, Window
from bminf_lite.backend.communicator import simulated_ranks
from bminf_lite.backend.values import BLOCK_SIZE
from bminf_lite.layers.cache import CacheLayout, KeyValues, KVCache, State


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


def hybrid() -> CacheLayout:
    """Attention, a recurrence with a chunk of 8 tokens, a short convolution, and attention with a window."""
    recurrence = State(
        (
            StateArray("state", (4, 6), is_sharded=True),
            StateArray("inputs", (10,), None, ring=8),
            StateArray("end", (), "int32"),
        )
    )
    convolution = State((StateArray("inputs", (12,), None, ring=3),))
    return CacheLayout((KeyValues(2, 4), recurrence, convolution, KeyValues(2, 4, window=9)))


def test_states_form_one_group_whose_sequences_have_one_slot_each() -> None:
    layout = hybrid()
    assert layout.groups == (AllTokens(), LatestState(), Window(9))
    assert [layout.group_of(i) for i in range(4)] == [0, 1, 1, 2]
    cache = KVCache.for_sequences(Backend(), layout, 3, 200)
    assert [table.tolist() for table in cache.tables(3, 200)][1] == [[1], [2], [3]]
    assert cache.num_blocks == [13, 4, 13]
    states = [layer for layer in cache.layers if isinstance(layer, StateCache)]
    held = sum(array[1:].nbytes for layer in states for array in layer.arrays)
    assert 0 <= 3 * layout.bytes_per_sequence(4) - held < 3 * 4 * 16, "the plan pads slots to 16 bytes"
    assert layout.bytes_per_token(4) == 2 * 2 * 2 * 4 * 4


def test_rings_hold_the_drafts_of_a_step_too() -> None:
    layout = hybrid()
    more = layout.with_drafts(5)
    assert [array.ring for layer in more.layers[1:3] for array in layer.arrays] == [0, 13, 0, 8]
    assert more.layers[0] == layout.layers[0] and layout.with_drafts(0) == layout
    assert layout.with_int8().layers[1] == layout.layers[1]


def test_slots_are_copied_and_kept_when_their_pools_grow() -> None:
    cache = KVCache(Backend(), hybrid(), [2, 3, 2], [9, 9, 9])
    state = cache.layers[1]["state"]
    state[1], state[2] = 1, 2
    cache.copy_blocks([(0, 0), (2, 1), (0, 0)])
    assert (cache.layers[1]["state"][1:] == 2).all() and not cache.layers[1]["state"][0].any()
    cache.grow(1, 7)
    assert cache.num_blocks == [2, 7, 2] and (cache.layers[1]["state"][1:3] == 2).all()
    cache.prepare_copies()
    cache.close()
    assert not cache.layers


def test_ranks_divide_the_heads_of_a_state() -> None:
    ranks = [Backend() for _ in range(2)]
    for ops, communicator in zip(ranks, simulated_ranks(2), strict=True):
        ops.communicator = communicator
    caches = [KVCache.for_sequences(ops, hybrid(), 1, 1) for ops in ranks]
    assert [cache.layers[1]["state"].shape for cache in caches] == [(2, 2, 6)] * 2
    assert caches[0].layers[1]["inputs"].shape == (2, 8, 10)
    assert [layer.num_shards for layer in hybrid().layers] == [2, 4, 0, 2]
