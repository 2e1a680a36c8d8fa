"""Allocates blocks in one reserved range of device addresses, and never takes more from the device than a limit.

An arena reserves as many addresses as its limit and maps memory to them in pages, when a block needs them. A block goes
to the smallest range that is mapped, free and large enough. If there is none, pages are mapped where the fewest are
missing. Free neighbours serve larger blocks together, and the same calls always return the same addresses.

A model allocates the same sizes in every layer. A freed block is therefore kept as it is, in a bin of blocks of its
size, and the next block of that size takes it: joining neighbours at every layer would take a fifth of a short prompt's
time. The bins are joined with the rest of the free memory when a block finds no other room; with some ``slack``, more
memory is mapped instead as long as the bins hold no more than that.

The memory is ordered by one stream: a block may be freed, and its memory allocated again, while work that uses it is
still queued on that stream. A block that another stream uses must be kept until that stream has caught up.

``KeyboardInterrupt`` may be raised inside any method and leaves the arena consistent. Memory is removed from one list
before it is added to another, so an interrupt can lose a block's memory but never give it to two blocks.

Nothing here depends on CUDA; :mod:`.device` has the pages of a GPU.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ..errors import OutOfMemory
from .sizes import format_size

ALIGNMENT = 512
REMEDY = "raise the memory limit, or use a shorter context or a smaller batch"

Range = tuple[int, int]
"""Offsets ``[start, end)``."""


class Pages(Protocol):
    """Reserved addresses from ``base`` on, to which memory is mapped in multiples of ``granularity`` bytes."""

    base: int
    granularity: int

    def map(self, offset: int, nbytes: int, at_once: int = 0) -> None:
        """Map memory to a range, in chunks of ``at_once`` bytes or of the pages' own size.

        Raises ``OutOfMemory``, with nothing mapped, if the device has none left.
        """

    def unmap(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Give back the whole chunks in a mapped, unused range; returns the ``(offset, nbytes)`` of each.

        Waits until the device has finished with them.
        """

    def close(self) -> None:
        """Give back everything; twice is harmless."""


class Block:
    """``nbytes`` of an arena's memory from ``address`` on, until :meth:`free` or garbage collection.

    ``shadow`` is the block of a :class:`Meter` that stands for this one, if the arena is being measured.
    """

    __slots__ = ("__weakref__", "_allocation", "_arena", "address", "nbytes")

    def __init__(self, arena: Arena, start: int, size: int, nbytes: int, shadow: Block | None) -> None:
        self._arena = arena
        self._allocation: tuple[int, int, Block | None] | None = (start, size, shadow)
        self.address = arena._base + start
        self.nbytes = nbytes

    def free(self) -> None:
        """Give the memory back to the arena; twice is harmless."""
        # No lock: garbage collection may call this inside the arena's own methods.
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            self._arena._freed.append(allocation)

    __del__ = free


class Arena:
    """Blocks of ``pages``, never more than ``limit`` bytes (rounded down to whole pages). Safe to use from any thread.

    ``remedy`` is the advice in the error when the limit is reached. Freed blocks of up to ``slack`` bytes may stay in
    their bins while more memory is mapped.
    """

    def __init__(self, pages: Pages, limit: int, remedy: str = REMEDY, slack: int = 0) -> None:
        self.limit = limit // pages.granularity * pages.granularity
        self.remedy = remedy
        self._slack = slack
        self._pages = pages
        self._base = pages.base
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        """Told whenever memory was mapped ahead."""
        self._is_mapping_ahead = False
        self._is_closing = False
        self._freed: deque[tuple[int, int, Block | None]] = deque()  # and not yet in a bin
        self._bins: dict[int, list[int]] = {}  # starts of freed blocks, by size
        self._mapped: list[Range] = []
        self._ready: list[Range] = []  # mapped, free and in no bin
        self._meter: Meter | None = None
        self._used = 0
        self._outside = 0
        self.peak_used = 0
        self.peak_reserved = 0
        self._finalizer = weakref.finalize(self, pages.close)
        self._finalizer.atexit = False  # the end of the process frees everything

    @property
    def used(self) -> int:
        """Bytes in blocks that are not freed, each rounded up to ``ALIGNMENT``."""
        with self._lock:
            self._collect()
            return self._used

    @property
    def reserved(self) -> int:
        """Bytes mapped, and charged, which other users of the device cannot have."""
        return _total(self._mapped) + self._outside

    def reset_peaks(self) -> None:
        """Set the peaks to the bytes used and reserved now."""
        with self._lock:
            self._collect()
            self.peak_used, self.peak_reserved = self._used, self.reserved

    def allocate(self, nbytes: int) -> Block:
        """A block of ``nbytes``, aligned to ``ALIGNMENT`` bytes; its contents are undefined.

        Raises ``OutOfMemory``, with every block as it was, if the limit leaves no room or the device has none left.
        """
        if nbytes < 0:
            raise ValueError(f"a block of {nbytes} bytes")
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        with self._lock:
            if self._freed:
                self._collect()
            starts = self._bins.get(size)
            start = starts.pop() if starts else self._find_room(size, nbytes)
            self._used += size
            if self._used > self.peak_used:
                self.peak_used = self._used
            return Block(self, start, size, nbytes, None if self._meter is None else self._meter.allocate(nbytes))

    def charge(self, nbytes: int) -> None:
        """Count ``nbytes`` of device memory that another allocator holds towards the limit; negative to count less.

        Free pages are given back if there is no room. Raises ``OutOfMemory``, with nothing counted, if that is not
        enough.
        """
        with self._lock:
            self._collect()
            if self.reserved + nbytes > self.limit and nbytes > 0:
                self._trim()
                if self.reserved + nbytes > self.limit:
                    raise OutOfMemory(self._explain(nbytes, "the limit is reached"))
            self._outside += nbytes
            self._used += nbytes
            self.peak_used = max(self.peak_used, self._used)
            self.peak_reserved = max(self.peak_reserved, self.reserved)

    def scratch(self, nbytes: int) -> Scratch:
        """An arena within one block of ``nbytes`` of this one; raises ``OutOfMemory`` as :meth:`allocate` does."""
        return Scratch(self.allocate(nbytes))

    @contextmanager
    def measure(self) -> Iterator[Meter]:
        """Find how large a :class:`Scratch` must be to serve the calls that this arena serves inside the ``with``.

        The same calls in the same order fit into ``scratch(meter.peak)`` exactly. One measurement at a time.
        """
        meter = Meter()
        with self._lock:
            assert self._meter is None, "this arena is being measured already"
            self._meter = meter
        try:
            yield meter
        finally:
            with self._lock:
                self._collect()
                self._meter = None

    def map_ahead(self, nbytes: int, at_once: int) -> None:
        """Map the first ``nbytes`` of the addresses, ``at_once`` bytes at a time, for blocks that will stay.

        Other threads may allocate meanwhile: a block waits for its memory rather than map some elsewhere. Ends early if
        the limit or the device leaves no room, and when the arena is closed.
        """
        with self._lock:
            if self._is_mapping_ahead or not self._finalizer.alive:
                return
            self._is_mapping_ahead = True
        try:
            end = min(nbytes, self.limit) // self._pages.granularity * self._pages.granularity
            for start in range(0, end, at_once):
                if not self._map_part(start, min(start + at_once, end), at_once):
                    return
        finally:
            with self._lock:
                self._is_mapping_ahead = False
                self._progress.notify_all()

    def _map_part(self, start: int, end: int, at_once: int) -> bool:
        """Map what is missing of a range, without the lock while the device does; returns whether that succeeded."""
        with self._lock:
            missing = _subtract([(start, end)], self._mapped)
            if self._is_closing or self.reserved + _total(missing) > self.limit:
                return False
            self._mapped = _union(self._mapped, missing)
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        done: list[Range] = []
        try:
            for low, high in missing:
                self._pages.map(low, high - low, at_once)
                done.append((low, high))
        except Exception:  # the block that needs this memory meets the error itself
            return False
        finally:
            with self._lock:
                self._mapped = _subtract(self._mapped, _subtract(missing, done))
                self._ready = _union(self._ready, done)
                self._progress.notify_all()
        return True

    def trim(self) -> int:
        """Give free pages back to the device, once it has finished with them; returns the bytes."""
        with self._lock:
            return self._trim()

    def close(self) -> None:
        """Give everything back to the device. Blocks that are not freed lose their memory; twice is harmless."""
        with self._lock:
            self._is_closing = True
            while self._is_mapping_ahead:
                self._progress.wait()
        self._finalizer()

    def _collect(self) -> None:
        """Put freed blocks into their bins."""
        while self._freed:
            start, size, shadow = self._freed.popleft()
            self._used -= size
            starts = self._bins.get(size)
            if starts is None:
                self._bins[size] = [start]
            else:
                starts.append(start)
            if shadow is not None:
                shadow.free()

    def _find_room(self, size: int, nbytes: int) -> int:
        """The start of a mapped range for a block of a size that is in no bin, taken from the free memory."""
        start = self._take(size)
        while start is None and self._is_mapping_ahead:
            self._progress.wait()
            start = self._take(size)
        if start is None and self._bins:
            if not self._map_instead_of_joining(size):
                self._join_bins()
            start = self._take(size)
        if start is None:
            self._map_for(size, nbytes)
            start = self._take(size)
            assert start is not None
        return start

    def _take(self, size: int) -> int | None:
        """The start of the smallest range that is ready and large enough, of several the first; None without any."""
        fits = [(end - start, start, i) for i, (start, end) in enumerate(self._ready) if end - start >= size]
        if not fits:
            return None
        found, start, i = min(fits)
        rest = [(start + size, start + found)] if found > size else []
        self._ready = self._ready[:i] + rest + self._ready[i + 1 :]
        return start

    def _join_bins(self) -> None:
        freed = [(start, start + size) for size, starts in self._bins.items() for start in starts]
        # One assignment: CPython raises an interrupt after a call or at the end of a loop, but not within this one.
        self._ready, self._bins = _union(self._ready, freed), {}

    def _map_instead_of_joining(self, size: int) -> bool:
        """Map memory for a block if the bins hold at most the slack; returns whether that succeeded."""
        if sum(size * len(starts) for size, starts in self._bins.items()) > self._slack:
            return False
        start = self._cheapest_range(size)
        if start is None:
            return False
        try:
            self._map_missing(start, size)
        except OutOfMemory:
            self._slack = 0  # from now on the bins are joined, which is faster than a refusal each time
            return False
        return True

    def _map_for(self, size: int, nbytes: int) -> None:
        """Map memory for a block of ``nbytes``, which takes ``size``; raises ``OutOfMemory`` if there is no room."""
        start = self._cheapest_range(size)
        if start is None:
            raise OutOfMemory(self._explain(nbytes, "no free range is large enough"))
        try:
            self._map_missing(start, size)
        except OutOfMemory as error:
            # Another process has taken memory that the limit allows. Giving back free pages elsewhere may be enough.
            if not self._trim():
                raise OutOfMemory(self._explain(nbytes, str(error))) from error
            try:
                self._map_missing(start, size)
            except OutOfMemory as again:
                raise OutOfMemory(self._explain(nbytes, str(again))) from again

    def _cheapest_range(self, size: int) -> int | None:
        """The start of the free range that is large enough and needs the fewest bytes mapped, of several the first."""
        costs = [
            (_total(_subtract([self._whole_pages(start, size)], self._mapped)), start)
            for start, end in self._free_ranges()
            if end - start >= size
        ]
        return min(costs)[1] if costs else None

    def _free_ranges(self) -> list[Range]:
        """Free memory that is in no bin, and addresses without memory."""
        return _union(self._ready, _subtract([(0, self.limit)], self._mapped))

    def _whole_pages(self, start: int, size: int) -> Range:
        granularity = self._pages.granularity
        return start // granularity * granularity, -(-(start + size) // granularity) * granularity

    def _map_missing(self, start: int, size: int) -> None:
        missing = _subtract([self._whole_pages(start, size)], self._mapped)
        if self._outside and self.reserved + _total(missing) > self.limit:
            raise OutOfMemory("the limit is reached")
        for low, high in missing:
            before, self._mapped = self._mapped, _union(self._mapped, [(low, high)])
            try:
                self._pages.map(low, high - low)
            except Exception:  # but not an interrupt, after which pages may be mapped
                self._mapped = before
                raise
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            self._ready = _union(self._ready, [(low, high)])

    def _trim(self) -> int:
        self._collect()
        self._join_bins()
        granularity, before = self._pages.granularity, self.reserved
        for start, end in self._ready:
            pages = -(-start // granularity) * granularity, end // granularity * granularity
            if pages[0] < pages[1]:
                self._ready = _subtract(self._ready, [pages])
                unmapped = [(offset, offset + n) for offset, n in self._pages.unmap(pages[0], pages[1] - pages[0])]
                self._mapped = _subtract(self._mapped, unmapped)
                self._ready = _union(self._ready, _subtract([pages], unmapped))
        return before - self.reserved

    def _explain(self, nbytes: int, reason: str) -> str:
        free = self._free_ranges()
        largest = max((end - start for start, end in free), default=0)
        return (
            f"out of device memory: {format_size(nbytes)} requested, {format_size(self._used)} in use, "
            f"{format_size(_total(free) - self._outside)} free of which {format_size(largest)} in one piece, "
            f"{format_size(self.limit)} allowed; {reason}; {self.remedy}"
        )


class _MappedPages:
    """Pages that are mapped already: mapping them only records how far they are in use."""

    granularity = ALIGNMENT

    def __init__(self, base: int) -> None:
        self.base = base

    def map(self, offset: int, nbytes: int, at_once: int = 0) -> None: ...

    def unmap(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        return []

    def close(self) -> None: ...


class Scratch(Arena):
    """An arena within one block of another, such as the memory that a CUDA graph's work uses as long as it lives."""

    def __init__(self, block: Block) -> None:
        size = -(-block.nbytes // ALIGNMENT) * ALIGNMENT  # a block ends where the next aligned one may begin
        super().__init__(_MappedPages(block.address), size, remedy="this block was made too small for its use")
        self._block = block

    def free(self) -> None:
        """Give the block back to its arena, with everything in it; twice is harmless."""
        self._block.free()


class Meter(Arena):
    """An arena without memory that repeats the allocations of another one, to find the room (``peak``) they need."""

    def __init__(self) -> None:
        super().__init__(_MappedPages(0), 1 << 62)

    @property
    def peak(self) -> int:
        """Bytes that a :class:`Scratch` must have to serve the same calls."""
        return self.peak_reserved


def _union(ranges: Iterable[Range], more: Iterable[Range]) -> list[Range]:
    """The ranges that cover the same offsets: in order, disjoint, and none touching the next."""
    joined: list[Range] = []
    for start, end in sorted([*ranges, *more]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _subtract(ranges: list[Range], holes: Iterable[Range]) -> list[Range]:
    """The parts of the ranges that are not in the holes."""
    for low, high in holes:
        left: list[Range] = []
        for start, end in ranges:
            if end <= low or high <= start:
                left.append((start, end))
                continue
            if start < low:
                left.append((start, low))
            if high < end:
                left.append((high, end))
        ranges = left
    return ranges


def _total(ranges: list[Range]) -> int:
    return sum(end - start for start, end in ranges)
