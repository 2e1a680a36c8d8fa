"""The memory of a key-value cache: whole pages, and as many blocks as a sequence may hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.backend.cache_values import AllTokens, LatestState, Retention, Window
from bminf_lite.engine.block_manager import BlockManager
from bminf_lite.memory.cache_memory import (
    BALANCED_CONTEXT,
    MIN_SNAPSHOTS,
    PAGE_BYTES,
    CacheGroup,
    cache_blocks,
    layer_bytes,
)

windows = st.none() | st.integers(1, 4096)
groups = st.builds(
    CacheGroup,
    layers=st.lists(
        st.tuples(st.lists(st.integers(1, 1 << 18), min_size=2, max_size=4).map(tuple), st.integers(1, 40)),
        min_size=1,
        max_size=2,
    ).map(tuple),
    retention=st.builds(AllTokens, st.none() | st.integers(1, 4096))
    | st.builds(Window, st.integers(1, 4096))
    | st.just(LatestState()),
)


def retention(window: int | None, most: int | None = None) -> Retention:
    return AllTokens(most) if window is None else Window(window)


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=4), st.integers(1, 100))
def test_a_layer_takes_what_it_needs_up_to_a_page_and_whole_pages_beyond(items: list[int], count: int) -> None:
    taken, needed = layer_bytes(items, count), sum(items) * count
    assert needed <= taken < needed + PAGE_BYTES + 512 * len(items)
    assert taken <= PAGE_BYTES or taken % PAGE_BYTES == 0


@given(windows, st.integers(1, 10_000), st.integers(1, 2048))
def test_a_sequence_fits_into_the_blocks_of_its_group_and_into_no_fewer(
    window: int | None, tokens: int, piece: int
) -> None:
    kept = retention(window)
    blocks = CacheGroup.of([(1,)], kept).blocks(tokens, piece)
    assert BlockManager([kept], [1 + blocks], max_piece=piece).shortage(tokens) is None
    assert BlockManager([kept], [blocks], max_piece=piece).shortage(tokens) is not None


@given(st.lists(groups, min_size=1, max_size=3), st.integers(1, 10_000), st.integers(1, 2048), st.integers(0, 1 << 36))
def test_the_blocks_fit_in_the_room_unless_one_sequence_needs_more(
    groups: list[CacheGroup], context: int, piece: int, room: int
) -> None:
    blocks = cache_blocks(groups, context, piece, room, 50)
    least = [1 + group.blocks(context, piece) for group in groups]
    most = [1 + 50 * (least[i] - 1 + group.retention.per_sequence) for i, group in enumerate(groups)]
    assert all(least[i] <= count <= most[i] for i, count in enumerate(blocks)), "a snapshot beside each sequence"
    if list(blocks) != least:
        assert cache_bytes(groups, blocks) <= room


@given(st.lists(groups, min_size=1, max_size=3), st.integers(1, 200_000), st.integers(1, 2048), st.integers(0, 1 << 36))
def test_no_more_sequences_would_fit_beside_the_longest(
    groups: list[CacheGroup], context: int, piece: int, room: int
) -> None:
    """Sequences of the planned context, or of the length for which pools of longer ones are balanced."""
    blocks = cache_blocks(groups, context, piece, room, 50)
    needed = [group.blocks(min(context, BALANCED_CONTEXT), piece) + group.retention.per_sequence for group in groups]
    held = min((count - 1) // n for count, n in zip(blocks, needed, strict=True))
    one_more = [1 + max((held + 1) * n, group.blocks(context, piece)) for group, n in zip(groups, needed, strict=True)]
    assert held >= 50 or cache_bytes(groups, one_more) > room


def cache_bytes(groups: list[CacheGroup], blocks: Sequence[int]) -> int:
    return sum(group.nbytes(count) for group, count in zip(groups, blocks, strict=True))


def test_few_sequences_have_slots_for_several_snapshots() -> None:
    """If there is room: a chat with one user keeps the states of its earlier turns and of other conversations."""
    group = CacheGroup.of([(64 << 20,)], LatestState())
    assert cache_blocks([group], 8192, 2048, 1 << 40, 1) == (1 + 1 + MIN_SNAPSHOTS,)
    assert cache_blocks([group], 8192, 2048, 0, 1) == (2,)
    assert cache_blocks([group], 8192, 2048, 1 << 40, 5, snapshots=False) == (6,)
    assert (group.sequence_bytes, group.token_bytes, group.is_int8) == (64 << 20, 0, False)
    assert group.bytes_read(10) == group.bytes_read(10_000) == 64 << 20


@pytest.mark.parametrize(("window", "most", "expected"), [(None, None, 100), (30, None, 30), (None, 7, 7)])
def test_a_token_reads_no_more_than_its_window(window: int | None, most: int | None, expected: int) -> None:
    assert CacheGroup.of([(1,)], retention(window, most)).tokens_read(100) == expected
