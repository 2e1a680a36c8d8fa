"""Blocks of the cache: exact accounts, reuse of prefixes, windows, eviction."""

from __future__ import annotations

from array import array
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.backend.cache_values import AllTokens, LatestState, Window, block_bytes
from bminf_lite.engine import block_manager
from bminf_lite.engine.block_manager import Admission, BlockManager, SequenceBlocks
from bminf_lite.engine.prefix_index import RUN_BLOCKS, append_keys, block_key, root_key
from bminf_lite.memory.cache_memory import CacheGroup

SIZE = 4
STATE = -1
"""Stands for a group of layers with states where windows are listed."""
SLOT = -2
"""Stands for one of states that no result depends on."""


def manager(blocks: int = 20, windows: tuple[int | None, ...] = (None,), slots: int = 0, **options) -> BlockManager:
    kinds = {None: AllTokens(), STATE: LatestState(), SLOT: LatestState(has_snapshots=False)}
    kept = [kinds[window] if window in kinds else Window(window) for window in windows]
    counts = [slots or blocks if window in (STATE, SLOT) else blocks for window in windows]
    return BlockManager(kept, counts, max_piece=8, block_size=SIZE, **options)


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def start(blocks: BlockManager, ids: list[int], **options) -> tuple[SequenceBlocks, int] | None:
    """A sequence whose prompt is admitted, and how many of its tokens were cached."""
    sequence = blocks.new_sequence(options.pop("salt", ""), options.pop("source", ()))
    blocks.compute_keys(sequence, ids)
    admission = blocks.admit(sequence, len(ids), 8, token_ids=options.pop("token_ids", lambda *_: ()), **options)
    return None if admission is None else (sequence, admission.num_cached_tokens)


def run(blocks: BlockManager, ids: list[int], **options) -> int:
    """Compute a prompt and let it end; returns how many of its tokens were cached."""
    started = start(blocks, ids, **options)
    assert started is not None
    sequence, cached = started
    for computed in range(cached, len(ids), 8):
        assert blocks.extend(sequence, computed, min(computed + 8, len(ids)))
        blocks.enter(sequence, ids[: computed + 8])
    blocks.release(sequence)
    blocks.check([])
    return cached


def test_a_key_depends_on_every_token_on_their_order_and_on_the_root():
    roots = [root_key(""), root_key("a"), root_key("", [1]), root_key("", [1, 2])]
    keys = [block_key(root, ids) for root in roots for ids in ([1, 2, 3, 4], [1, 2, 4, 3], [1, 2, 3, 5])]
    assert len({*roots, *keys}) == len(roots) + len(keys)


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: array("i", ids)])
def test_the_keys_of_a_prompt_are_a_chain_of_sha256(kind):
    """Over the bytes of the parent and of the tokens, int32, whatever holds them; a partial block has no key."""
    keys: list[bytes] = []
    append_keys(keys, root := root_key("tenant", [3, 1]), kind([*range(7)]), 4)
    append_keys(keys, root, kind([4, 5, 6, 7, 8]), 4)
    assert keys[0] == sha256(root + bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])).digest()
    assert [key.hex()[:16] for key in keys] == ["5922fb6144097249", "679bccf696c4ffb8"]
    assert keys[1] == block_key(keys[0], [4, 5, 6, 7])


def test_remembered_keys_are_those_of_the_chain():
    """The prompts begin alike and then differ: in any block of a run, behind any root, appended in any pieces."""
    length, rng = 3 * RUN_BLOCKS * 4, np.random.default_rng(0)
    for root in (root_key(""), root_key("tenant")):
        for differs in (length, *rng.integers(0, length, 8)):
            ids = tokens(length)
            ids[differs:] = [99] * (length - differs)
            keys: list[bytes] = []
            for stop in (*sorted(4 * rng.integers(0, length // 4, 2)), length):
                append_keys(keys, root, ids[4 * len(keys) : stop], 4)
            parents = [root, *keys[:-1]]
            assert keys == [block_key(parent, ids[4 * i : 4 * i + 4]) for i, parent in enumerate(parents)]


def test_a_prefix_is_reused_up_to_its_last_full_block_and_never_the_last_token():
    blocks = manager()
    assert run(blocks, tokens(11)) == 0
    assert run(blocks, tokens(11)) == 8
    assert run(blocks, tokens(8)) == 4, "the last token is computed"
    assert run(blocks, tokens(9)) == 8
    assert run(blocks, [*tokens(6), 99, 99, 99]) == 4
    assert run(blocks, tokens(11), salt="another tenant") == 0
    assert run(blocks, tokens(11), max_cached_tokens=0) == 0
    assert run(manager(prefix_cache=False), tokens(11)) == 0


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_block_that_starts_like_the_next_tokens_is_copied(windows):
    """A full block, or the last block of a sequence that has ended, also while another sequence holds it."""
    blocks = manager(windows=windows)

    def admit(ids: list[int], **options) -> tuple[SequenceBlocks, Admission]:
        sequence = blocks.new_sequence()
        blocks.compute_keys(sequence, ids)
        admission = blocks.admit(sequence, len(ids), 8, token_ids=lambda start, stop: ids[start:stop], **options)
        blocks.check([sequence])
        return sequence, admission

    first, admission = admit(tokens(7))
    assert admission.num_cached_tokens == 0 and not admission.copies
    blocks.enter(first, tokens(7), has_ended=True)
    tables = [list(table) for table in first.tables]
    blocks.release(first)
    second, admission = admit([*tokens(6), 99, 99, 99, 99])
    assert admission.num_cached_tokens == 6
    assert admission.copies == [(old[1], new[1]) for old, new in zip(tables, second.tables, strict=True)]
    assert all(old[1] != new[1] for old, new in zip(tables, second.tables, strict=True))
    blocks.enter(second, [*tokens(6), 99, 99], has_ended=True)
    blocks.release(second)
    for ids, cached in ([*tokens(6), 99, 88], 7), (tokens(7), 6), (tokens(8), 6), ([*tokens(4), 99], 4):
        third, admission = admit(ids)
        assert admission.num_cached_tokens == cached and bool(admission.copies) == (cached % SIZE > 0)
        blocks.release(third)
    assert admit([*tokens(6), 99], max_cached_tokens=5)[1].num_cached_tokens == 5


def test_running_sequences_share_blocks():
    blocks = manager(6)
    first, _ = start(blocks, tokens(10))
    blocks.enter(first, tokens(10))
    second, cached = start(blocks, tokens(10))
    assert cached == 8 and first.tables[0][:2] == second.tables[0][:2] and first.tables[0][2] != second.tables[0][2]
    blocks.check([first, second])
    blocks.release(first)
    assert blocks.pools[0].num_used == 3
    blocks.check([second])
    blocks.release(second)
    assert (blocks.pools[0].num_used, blocks.pools[0].num_idle) == (0, 2)


def test_the_least_recently_used_prefix_is_evicted_first_and_from_its_end():
    blocks = manager(7)
    for first in (0, 100, 200):
        assert run(blocks, tokens(8, first)) == 0
    assert run(blocks, tokens(9)) == 8, "six blocks hold all three"
    assert run(blocks, tokens(9, 200)) == 8
    assert run(blocks, tokens(9, 100)) == 4, "one block was needed: its second one"


def test_admission_is_whole_or_not_at_all():
    blocks = manager(6)
    first, _ = start(blocks, tokens(8))
    assert start(blocks, tokens(13, 50)) is None and start(blocks, tokens(12, 50), spare=1) is None
    blocks.check([first])
    second, _ = start(blocks, tokens(12, 50))
    assert not blocks.extend(first, 8, 9)
    blocks.check([first, second])
    blocks.release(second)
    assert blocks.extend(first, 8, 9)
    assert "21 tokens need 6 blocks of 4 tokens in the key-value cache, which has 5" in blocks.shortage(21)
    assert blocks.shortage(20) is None


@pytest.mark.parametrize("int8", [False, True])
def test_the_cache_takes_little_more_than_the_tokens_need(int8):
    """256 ragged sequences of 100 to 4,000 tokens at once, of the 8B shape: blocks and pages in 2 % more."""
    group = CacheGroup.of([block_bytes(kv_heads=8, head_dim=128, int8=int8)] * 32, AllTokens(), int8)
    lengths = np.random.default_rng(0).integers(100, 4001, 256).tolist()
    blocks = BlockManager([AllTokens()], [20_000], max_piece=2048)
    for length in lengths:
        sequence = blocks.new_sequence()
        assert blocks.admit(sequence, length // 2, 2048) is not None
        for tokens in (*range(length // 2, length, 50), length):
            assert blocks.extend(sequence, tokens - 1, tokens)
    taken = group.nbytes(1 + blocks.pools[0].num_used)
    assert 1 < taken / (sum(lengths) * group.token_bytes) < 1.02


def test_a_window_gives_back_what_it_has_passed():
    blocks = manager(windows=(None, 6))
    sequence, _ = start(blocks, tokens(40), max_cached_tokens=0)
    held = []
    for computed in range(0, 40, 8):
        assert blocks.extend(sequence, computed, computed + 8)
        blocks.enter(sequence, tokens(computed + 8))
        held.append(sum(b != 0 for b in sequence.tables[1]))
        blocks.check([sequence])
    assert len(sequence.tables[0]) == 10 and max(held) == 4
    assert sequence.tables[1][:6] == [0] * 6


def test_a_window_needs_only_the_blocks_that_the_next_token_sees():
    blocks = manager(12, windows=(6,))
    assert run(blocks, tokens(17)) == 0
    assert run(blocks, tokens(17)) == 16
    pool = blocks.pools[0]
    keys = blocks.new_sequence()
    blocks.compute_keys(keys, tokens(16))
    pool.index.forget(gone := pool.index.find(keys.keys[0]))
    pool._idle.pop(gone)
    pool._free.append(gone)
    assert run(blocks, tokens(17)) == 16, "the first block is not seen from token 16 on"
    assert run(blocks, tokens(7)) == 0


def test_a_source_is_shared_as_a_whole():
    blocks = BlockManager([AllTokens()], [9], 9, max_piece=8, block_size=SIZE)
    first, _ = start(blocks, [1], source=tokens(10))
    blocks.enter_source(first)
    second = blocks.new_sequence("", tokens(10))
    assert blocks.admit(second, 1, 8).source_is_cached and second.source_table == first.source_table
    other = blocks.new_sequence("", tokens(9))
    assert not blocks.admit(other, 1, 8).source_is_cached
    blocks.check([first, second, other])
    another = blocks.new_sequence("", tokens(16))
    assert blocks.admit(another, 1, 8) is None, "five blocks are held"
    for sequence in (first, second, other):
        blocks.release(sequence)
    assert blocks.admit(another, 1, 8) is not None
    blocks.check([another])


# -- states -----------------------------------------------------------------------------------------------------------


def tables_of(blocks: BlockManager, sequence: SequenceBlocks) -> list[tuple]:
    return [*zip(blocks.groups, sequence.tables, strict=True)]


def state_turn(
    blocks: BlockManager, ids: list[int], new: int = 0, *, pieces: int = 1000, keep: bool = True
) -> tuple[int, list[tuple[int, int]]]:
    """A prompt and ``new`` tokens behind it that end; how many were cached, and the copies to and from slots."""
    answer = [*ids, *tokens(new, 1000)]

    def token_ids(start: int, stop: int) -> list[int]:
        return answer[start:stop]

    sequence = blocks.new_sequence()
    blocks.compute_keys(sequence, ids)
    admission = blocks.admit(sequence, len(ids), 8, token_ids=token_ids)
    assert admission is not None
    place = next(i for i, group in enumerate(blocks.groups) if group.has_snapshots)
    copies = [pairs[place] for pairs in [admission.copies] if pairs]
    computed = cached = admission.num_cached_tokens
    for stop in [*range(cached + pieces, len(ids), pieces), len(ids)]:
        assert blocks.extend(sequence, computed, stop)
        computed = stop
        blocks.enter(sequence, answer[:stop])
        copies += [pairs[place] for pairs in [blocks.snapshot(sequence, stop, token_ids)] if pairs]
    assert blocks.extend(sequence, len(ids), len(answer))
    blocks.enter(sequence, answer, has_ended=True)
    if keep:
        blocks.keep_state(sequence, range(max(len(answer) - 1, 1), len(answer) + 1), token_ids)
    blocks.check([sequence])
    blocks.release(sequence)
    blocks.check([])
    return cached, copies


@pytest.mark.parametrize("windows", [(None, STATE), (STATE,), (STATE, 6)])
@pytest.mark.parametrize("length", range(2, 14))
def test_a_snapshot_serves_its_prefix_and_the_one_with_a_token_less(windows, length):
    """At a prompt's end and at a turn's end, at any position of a block, and nowhere else."""
    blocks = manager(40, windows, slots=12)
    place = windows.index(STATE)
    cached, copies = state_turn(blocks, tokens(length), 5)
    assert cached == 0 and len(copies) == 1
    own, snapshot = copies[0]
    index = blocks.pools[place].index
    assert len(index) == 2 and own != snapshot
    turn = [*tokens(length), *tokens(5, 1000)]
    expected = {
        length - 1: tokens(length),
        length: [*tokens(length), 77],
        length + 4: turn,
        length + 5: [*turn, 77, 78],
        0: [*tokens(length - 2), 99, 98] if length > 2 else [99, 98],
    }
    for count, ids in expected.items():
        sequence = blocks.new_sequence()
        blocks.compute_keys(sequence, ids)
        prefix = blocks.cached_prefix(sequence, len(ids) - 1, lambda a, b, ids=ids: ids[a:b])
        assert prefix.num_tokens == count
        if count:
            assert prefix.copied[place][1] == (snapshot if count <= length else own)


def test_snapshots_are_evicted_the_least_recently_used_first_and_never_for_one_within_a_prompt(monkeypatch):
    monkeypatch.setattr(block_manager, "SNAPSHOT_TOKENS", 4)
    blocks = manager(100, (None, STATE), slots=7)
    pool = blocks.pools[1]
    for first in (100, 200, 300):
        state_turn(blocks, tokens(9, first), 3)
    assert (pool.num_free, pool.num_idle) == (0, 6)
    assert state_turn(blocks, tokens(9, 100))[0] == 8
    cached, copies = state_turn(blocks, tokens(30, 400), pieces=6)
    assert cached == 0 and len(copies) == 1, "at the end alone: no slot was free"
    assert [state_turn(blocks, [*tokens(9, first), 7], keep=False)[0] for first in (400, 100, 300, 200)] == [0, 9, 0, 0]
    roomy = manager(100, (None, STATE), slots=20)
    assert len(state_turn(roomy, tokens(30), pieces=6)[1]) == 5
    assert [state_turn(roomy, [*tokens(n), 99, 98])[0] for n in (5, 6, 11, 12, 17, 18)] == [5, 6, 11, 12, 17, 18]


@pytest.mark.parametrize("windows", [(None, STATE), (STATE, 6), (None, STATE, 6)])
def test_a_snapshot_leaves_with_the_blocks_that_its_prefix_needs(windows):
    blocks = manager(8, windows, slots=30)
    state_pool = blocks.pools[windows.index(STATE)]
    state_turn(blocks, tokens(10), 1)
    assert len(state_pool.index) == 2
    state_turn(blocks, tokens(26, 500))
    held = state_pool.num_free
    assert state_turn(blocks, [*tokens(10), 99])[0] == 0
    assert held == 29 - 1, "the snapshot of the long prompt's end alone, for which its own slot would stand too"


def test_what_is_discarded_has_no_snapshot_any_more():
    blocks = manager(30, (None, STATE))
    ids = tokens(11)
    sequence, _ = start(blocks, ids, token_ids=lambda a, b: ids[a:b])
    blocks.enter(sequence, ids)
    assert blocks.snapshot(sequence, 11, lambda a, b: ids[a:b])
    blocks.release(sequence)
    blocks.discard(sequence)
    assert [len(pool.index) for pool in blocks.pools] == [0, 0]
    blocks.check([])


def test_a_state_that_no_result_depends_on_leaves_prefixes_as_they_are():
    """Full blocks and the start of one are found, and nothing is copied for the slot, which is given back."""
    blocks, plain = manager(windows=(None, SLOT), slots=3), manager()
    texts = [tokens(11), tokens(11), [*tokens(7), 90, 91], tokens(30)]
    cached = [[run(one, ids, token_ids=lambda a, b, ids=ids: ids[a:b]) for ids in texts] for one in (blocks, plain)]
    assert cached[0] == cached[1] == [0, 8, 7, 8]
    assert not blocks.has_snapshots and blocks.pools[1].num_free == 2
    held = [start(blocks, tokens(5, first)) for first in (100, 200, 300)]
    assert held[2] is None, "there are two slots"


def test_a_sequence_needs_a_slot_and_no_more_however_long_it_is():
    blocks = manager(100, (None, STATE), slots=3)
    first, second = (start(blocks, tokens(9, i))[0] for i in range(2))
    assert start(blocks, tokens(3, 50)) is None
    assert blocks.extend(first, 9, 100) and len(first.tables[1]) == 1
    assert not blocks.snapshot(second, 9, lambda a, b: tokens(9, 1)[a:b]), "nobody gives up a slot for a snapshot"
    assert blocks.shortage(300) is None
    assert "no slot" in manager(100, (None, STATE), slots=1).shortage(3)


@pytest.mark.parametrize(
    "windows",
    [(None,), (5,), (None, 3, 9), (None, STATE), (STATE,), (5, STATE, None), (None, SLOT), (SLOT, None, STATE)],
)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 18), st.booleans()), max_size=40))
def test_accounts_are_exact_after_every_action(windows, actions):
    """Prompts that share prefixes start, grow and end in any order."""
    blocks = manager(14, windows, slots=6)
    live: list[tuple[SequenceBlocks, list[int]]] = []
    for kind, length, flag in actions:
        if kind == 0 or not live:
            ids = [*tokens(min(length, 9)), *tokens(length - 9, 50 * flag)]
            if started := start(blocks, ids, spare=len(live), token_ids=lambda a, b, ids=ids: ids[a:b]):
                live.append((started[0], ids))
                blocks.enter(started[0], ids[: started[1]])
        elif kind == 1:
            sequence, ids = live.pop(length % len(live))
            tables = [
                table for table, window in zip(sequence.tables, windows, strict=True) if window not in (STATE, SLOT)
            ]
            computed = min([len(ids), *(len(table) * SIZE for table in tables)]) - length % 3
            blocks.enter(sequence, ids[: max(computed, 0)], has_ended=flag)
            if blocks.has_snapshots and flag:
                kept = range(max(computed - 1, 1), max(computed, 0) + 1)
                blocks.keep_state(sequence, kept, lambda a, b, ids=ids: ids[a:b])
            blocks.release(sequence)
        else:
            sequence, ids = live[length % len(live)]
            is_computed = all(group.num_missing(table, len(ids)) <= 0 for group, table in tables_of(blocks, sequence))
            if blocks.has_snapshots and is_computed:
                blocks.snapshot(sequence, len(ids), lambda a, b, ids=ids: ids[a:b])
                blocks.check([s for s, _ in live])
            if blocks.extend(sequence, len(ids), len(ids) + 1):
                blocks.enter(sequence, ids)
                ids.append(length)
        blocks.check([s for s, _ in live])


def test_every_text_can_be_a_salt():
    """Also one that UTF-8 cannot encode."""
    salts = ["", "a", "\ud800", "\udc80", "\x00"]
    assert len({root_key(salt) for salt in salts}) == len(salts)
