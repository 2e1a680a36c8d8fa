"""The arena over pages that only keep account: random sequences of calls, and single cases."""

import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count, pairwise
from linecache import getline
from random import Random
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as RuleBundle
from hypothesis.stateful import RuleBasedStateMachine, invariant, multiple, precondition, rule

from bminf_lite.errors import OutOfMemory
from bminf_lite.memory import arena as arena_module
from bminf_lite.memory.arena import ALIGNMENT, Arena, Block

PAGE = 4 * ALIGNMENT
PAGES = 32
BASE = 1 << 20


class FakePages:
    """Pages that check every call; ``available`` is how much memory the device has for them."""

    granularity = PAGE
    base = BASE

    def __init__(self, available: int = PAGES * PAGE, chunk: int = 3 * PAGE) -> None:
        self.available = available
        self.chunk = chunk
        self.chunks: dict[int, int] = {}
        self.closed = 0

    @property
    def mapped(self) -> int:
        return sum(self.chunks.values())

    def covers(self, start: int, end: int) -> bool:
        for offset, size in sorted(self.chunks.items()):
            if offset <= start < offset + size:
                start = offset + size
        return start >= end

    def map(self, offset: int, nbytes: int, at_once: int = 0) -> None:
        assert nbytes > 0 and offset % PAGE == nbytes % PAGE == 0
        assert all(offset + nbytes <= start or start + size <= offset for start, size in self.chunks.items())
        if self.mapped + nbytes > self.available:
            raise OutOfMemory("the device refused")
        chunk = at_once or self.chunk
        for start in range(offset, offset + nbytes, chunk):
            self.chunks[start] = min(chunk, offset + nbytes - start)

    def unmap(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        inside = [(o, n) for o, n in self.chunks.items() if offset <= o and o + n <= offset + nbytes]
        for start, _ in inside:
            del self.chunks[start]
        return inside

    def close(self) -> None:
        self.closed += 1
        self.chunks.clear()


def units(block: Block) -> range:
    """The multiples of ``ALIGNMENT`` that a block takes."""
    first = (block.address - BASE) // ALIGNMENT
    return range(first, first + max(1, -(-block.nbytes // ALIGNMENT)))


class ArenaMachine(RuleBasedStateMachine):
    slack = 0
    blocks = RuleBundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.pages = FakePages()
        self.arena = Arena(self.pages, PAGES * PAGE + PAGE // 2, slack=self.slack)
        self.live: set[Block] = set()
        self.peak = 0

    @rule(target=blocks, nbytes=st.one_of(st.integers(0, 3 * PAGE), st.integers(0, PAGES * PAGE)))
    def allocate(self, nbytes: int) -> object:
        size = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        fits_in_mapped, chunks = self.longest_run(mapped=True) >= size, dict(self.pages.chunks)
        try:
            block = self.arena.allocate(nbytes)
        except OutOfMemory:
            assert not fits_in_mapped
            assert self.longest_run() < size or self.pages.mapped + size > self.pages.available - PAGE
            return multiple()
        mapped = self.pages.chunks != chunks
        assert mapped != fits_in_mapped or (mapped and self.slack)
        assert block.nbytes == nbytes and block.address % ALIGNMENT == 0
        self.live.add(block)
        self.peak = max(self.peak, sum(len(units(b)) for b in self.live) * ALIGNMENT)
        return block

    @rule(block=blocks)
    def free(self, block: Block) -> None:
        """Also again, when another block may have the memory."""
        self.live.discard(block)
        block.free()

    @rule()
    def trim(self) -> None:
        before = self.pages.mapped
        assert self.arena.trim() == before - self.pages.mapped

    @rule(pages=st.integers(0, PAGES + 1), at_once=st.integers(1, 8))
    def map_ahead(self, pages: int, at_once: int) -> None:
        """As much as the device has room for, from the first address on."""
        mapped = {page for page in range(PAGES) if self.pages.covers(page * PAGE, (page + 1) * PAGE)}
        self.arena.map_ahead(pages * PAGE, at_once * PAGE)
        missing = set(range(min(pages, PAGES))) - mapped
        if self.pages.available >= self.pages.mapped + PAGE * len(missing):
            assert self.pages.covers(0, min(pages, PAGES) * PAGE)

    @rule(available=st.integers(0, PAGES))
    def another_process_changes_what_is_available(self, available: int) -> None:
        self.pages.available = max(available * PAGE, self.pages.mapped)

    @precondition(lambda self: not self.live)
    @rule()
    def everything_is_reusable(self) -> None:
        self.pages.available = PAGES * PAGE
        self.arena.allocate(self.arena.limit).free()
        self.arena.trim()
        assert self.pages.mapped == 0
        self.peak = self.arena.limit

    @invariant()
    def blocks_have_memory_of_their_own_and_figures_are_true(self) -> None:
        taken = [unit for block in self.live for unit in units(block)]
        assert len(taken) == len(set(taken))
        assert all(self.pages.covers(unit * ALIGNMENT, (unit + 1) * ALIGNMENT) for unit in taken)
        assert self.arena.used == len(taken) * ALIGNMENT
        assert self.arena.used <= self.arena.reserved == self.pages.mapped <= self.arena.limit == PAGES * PAGE
        assert self.arena.peak_used == self.peak
        assert self.arena.peak_reserved >= self.arena.reserved

    def longest_run(self, mapped: bool = False) -> int:
        """The longest run of free bytes, or of free and mapped ones."""
        taken = {unit for block in self.live for unit in units(block)}
        longest = run = 0
        for unit in range(self.arena.limit // ALIGNMENT):
            there = not mapped or self.pages.covers(unit * ALIGNMENT, (unit + 1) * ALIGNMENT)
            run = run + 1 if unit not in taken and there else 0
            longest = max(longest, run)
        return longest * ALIGNMENT


class SlackMachine(ArenaMachine):
    slack = 6 * PAGE


TestArenaMachine = ArenaMachine.TestCase
TestSlackMachine = SlackMachine.TestCase


def test_blocks_wait_for_what_is_mapped_ahead() -> None:
    class SlowPages(FakePages):
        def map(self, offset: int, nbytes: int, at_once: int = 0) -> None:
            assert at_once, "a block has mapped memory itself"
            began.set()
            may_go_on.wait()
            super().map(offset, nbytes, at_once)

    began, may_go_on = threading.Event(), threading.Event()
    arena = Arena(SlowPages(), PAGES * PAGE)
    with ThreadPoolExecutor() as threads:
        ahead = threads.submit(arena.map_ahead, 4 * PAGE, PAGE)
        began.wait()
        blocks = [threads.submit(arena.allocate, PAGE) for _ in range(4)]
        assert arena.used == 0 and not any(block.done() for block in blocks)
        may_go_on.set()
        assert sorted(block.result().address for block in blocks) == [BASE + page * PAGE for page in range(4)]
        ahead.result()


def test_closing_ends_mapping_ahead() -> None:
    class SlowPages(FakePages):
        def map(self, offset: int, nbytes: int, at_once: int = 0) -> None:
            assert not self.closed
            began.set()
            may_go_on.wait()
            super().map(offset, nbytes, at_once)

    began, may_go_on = threading.Event(), threading.Event()
    pages = SlowPages()
    arena = Arena(pages, PAGES * PAGE)
    with ThreadPoolExecutor() as threads:
        ahead = threads.submit(arena.map_ahead, PAGES * PAGE, PAGE)
        began.wait()
        closed = threads.submit(arena.close)
        assert not pages.closed
        may_go_on.set()
        closed.result()
        ahead.result()
    assert pages.closed == 1 and not pages.mapped


def test_maps_where_the_fewest_pages_are_needed() -> None:
    arena = Arena(FakePages(chunk=PAGE), PAGES * PAGE)
    first, wall = arena.allocate(4 * PAGE), arena.allocate(PAGE + ALIGNMENT)
    first.free()
    arena.trim()
    block = arena.allocate(2 * PAGE + PAGE // 2)
    assert block.address == wall.address + wall.nbytes, "two pages more, and not three at the beginning"
    assert arena.reserved == 4 * PAGE


def layer(arena: Arena) -> int:
    """Blocks of several sizes, each freed once the next is there; returns the bytes reserved by then."""
    before = arena.allocate(0)
    for size in (6, 4, 4, 1, 1, 14, 7):
        block = arena.allocate(size * ALIGNMENT)
        before.free()
        before = block
    before.free()
    return arena.reserved


def test_with_slack_each_layer_finds_what_the_one_before_it_freed() -> None:
    arena = Arena(FakePages(), PAGES * PAGE, slack=12 * PAGE)
    assert len({layer(arena) for _ in range(5)}) == 1


def test_slack_bounds_what_freed_blocks_keep() -> None:
    arena = Arena(FakePages(), PAGES * PAGE, slack=2 * PAGE)
    most = max(layer(arena) for _ in range(8))
    assert most <= arena.peak_used + 3 * PAGE, "the slack, and what is left of the last page"


def test_a_refusal_halfway_loses_no_memory() -> None:
    """A block needs pages at two places, of which the device refuses the second."""
    pages = FakePages(chunk=PAGE)
    arena = Arena(pages, 6 * PAGE, slack=ALIGNMENT)
    blocks = [arena.allocate(PAGE) for _ in range(6)]
    blocks[2].free()
    blocks[4].free()
    arena.trim()
    blocks[1].free()
    blocks[3].free()
    arena.allocate(ALIGNMENT).free()
    pages.available = pages.mapped + PAGE
    assert arena.allocate(3 * PAGE).address == BASE + PAGE


def test_garbage_collection_frees() -> None:
    arena = Arena(FakePages(), PAGES * PAGE)
    block = arena.allocate(100)
    cycle: list[object] = [block]
    cycle.append(cycle)
    del block, cycle
    gc.collect()
    assert arena.used == 0


def test_running_out_says_everything_and_leaves_everything_usable() -> None:
    arena = Arena(FakePages(), PAGES * PAGE)
    blocks = [arena.allocate(PAGE) for _ in range(PAGES)]
    for block in blocks[::2]:
        block.free()
    with pytest.raises(OutOfMemory) as caught:
        arena.allocate(PAGE + 1)
    message = str(caught.value)
    for part in ("2.0 KiB requested", "32.0 KiB in use", "32.0 KiB free", "2.0 KiB in one piece", "64.0 KiB allowed"):
        assert part in message
    assert "raise the memory limit" in message
    blocks += [arena.allocate(PAGE) for _ in range(PAGES // 2)]
    assert arena.used == arena.limit


def test_free_pages_elsewhere_make_up_for_a_device_that_refuses() -> None:
    pages = FakePages(available=6 * PAGE, chunk=PAGE)
    arena = Arena(pages, PAGES * PAGE)
    first = arena.allocate(3 * PAGE)
    with pytest.raises(OutOfMemory, match=r"8\.0 KiB requested.*the device refused.*raise"):
        arena.allocate(4 * PAGE)
    arena_end = arena.allocate(PAGE)
    first.free()
    large = arena.allocate(5 * PAGE)
    assert large.address > arena_end.address
    assert pages.mapped == arena.reserved == 6 * PAGE


def test_peaks_start_again() -> None:
    arena = Arena(FakePages(), PAGES * PAGE)
    arena.allocate(5 * PAGE).free()
    keep = arena.allocate(PAGE)
    assert (arena.peak_used, arena.peak_reserved) == (5 * PAGE, 5 * PAGE)
    arena.trim()
    arena.reset_peaks()
    assert arena.peak_used == keep.nbytes
    assert arena.peak_reserved == arena.reserved


def test_pages_are_closed_once_and_while_no_block_is_alive() -> None:
    pages = FakePages()
    arena = Arena(pages, PAGES * PAGE)
    block = arena.allocate(1)
    del arena
    gc.collect()
    assert not pages.closed
    del block
    gc.collect()
    assert pages.closed == 1
    other = Arena(pages, PAGES * PAGE)
    other.close()
    other.close()
    assert pages.closed == 2


def test_scratch_lies_within_one_block_and_gives_it_back() -> None:
    arena = Arena(FakePages(), PAGES * PAGE)
    arena.allocate(ALIGNMENT)
    scratch = arena.scratch(2 * PAGE + 1)
    assert arena.used == scratch.limit == 2 * PAGE + ALIGNMENT
    blocks = [scratch.allocate(PAGE), scratch.allocate(PAGE), scratch.allocate(1)]
    with pytest.raises(OutOfMemory, match="too small"):
        scratch.allocate(1)
    assert arena.used == scratch.limit, "what the scratch hands out is the arena's already"
    end = max(block.address + block.nbytes for block in blocks)
    assert end <= min(block.address for block in blocks) + scratch.limit
    scratch.free()
    scratch.free()
    assert arena.used == 0


calls = st.lists(st.tuples(st.integers(0, 3 * PAGE), st.lists(st.integers(0, 30), max_size=3)), max_size=30)


@given(noise=calls, measured=calls)
def test_what_was_measured_is_enough_and_no_more(noise: list, measured: list) -> None:
    def serve(arena: Arena, sequence: list) -> list[Block]:
        blocks = []
        for nbytes, freed in sequence:
            blocks.append(arena.allocate(nbytes))
            for i in freed:
                if i < len(blocks):
                    blocks[i].free()
        return blocks

    limit = 256 * PAGE
    arena = Arena(FakePages(available=limit), limit)
    held = serve(arena, noise)
    with arena.measure() as meter:
        held += serve(arena, measured)
    serve(arena, noise)
    scratch = Arena(FakePages(available=limit), limit).scratch(meter.peak)
    serve(scratch, measured)
    assert scratch.peak_reserved == meter.peak or not measured
    assert scratch.peak_used <= meter.peak


def test_threads_never_share_memory() -> None:
    arena = Arena(FakePages(), PAGES * PAGE)
    owners: dict[int, int] = {}

    def work(me: int) -> None:
        for i in range(300):
            block = arena.allocate(1 + (me * 37 + i * 91) % PAGE)
            assert owners.setdefault(block.address, me) == me
            del owners[block.address]
            block.free()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert arena.used == 0


def _work(arena: Arena, random: Random, blocks: list[Block], calls: int) -> None:
    for _ in range(calls):
        choice = random.random()
        if choice < 0.03:
            arena.trim()
        if choice < 0.5 or not blocks:
            with suppress(OutOfMemory):
                blocks.append(arena.allocate(random.choice((1, 2, 3, 8, 11)) * ALIGNMENT))
        else:
            block = blocks.pop(random.randrange(len(blocks)))
            if choice < 0.75:
                block.free()


def _interrupt(work: Callable[[], None], after: int) -> None:
    """Raise ``KeyboardInterrupt`` in ``work`` after ``after`` lines of the arena."""
    lines = count()

    def local(frame: FrameType, event: str, _: object) -> Callable | None:
        text = getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "with " not in text and next(lines) == after:  # Python guards how a lock is taken
            sys.settrace(None)
            raise KeyboardInterrupt
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: local if frame.f_code.co_filename == arena_module.__file__ else None)
    with suppress(KeyboardInterrupt):
        work()
    sys.settrace(before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupted while garbage is collected
def test_an_interrupt_leaves_no_memory_with_two_owners() -> None:
    """At any line; memory may be lost by it."""
    for after in range(0, 2000, 13):
        random, blocks = Random(after), list[Block]()
        pages = FakePages(chunk=PAGE)
        arena = Arena(pages, PAGES * PAGE, slack=after % 2 * 4 * PAGE)
        _interrupt(partial(_work, arena, random, blocks, 120), after)
        _work(arena, random, blocks, 200)
        places = sorted((b.address, b.address + b.nbytes) for b in blocks)
        assert all(end <= start for (_, end), (start, _) in pairwise(places)), after
        assert all(pages.covers(start - BASE, end - BASE) for start, end in places), after
