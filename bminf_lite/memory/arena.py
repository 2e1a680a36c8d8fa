"""One range of device memory that everything comes from, so that a limit on it is true.

An arena reserves as many addresses as its limit and maps memory to them page by page, as it is needed and not before.
Blocks are placed by best fit in memory that is mapped and free; only where no such range is large enough are pages
mapped, where the fewest are needed. So a limit bounds what the device is asked for, a freed block is reusable at once
together with its free neighbours, and the same calls always give the same addresses. A model asks for the same sizes
layer after layer: so a freed block first waits as it is for a call of its size, and is joined with its neighbours when
a call finds neither one of its size nor other room. Joining them at every layer would take a fifth of a short prompt's
time: so an arena may have some ``slack``, and maps memory while no more than that waits.

What is free changes at once, by one assignment: Ctrl-C, which may come at any point and which a dialogue outlives,
leaves it as it was before or as it is after, and nothing is handed out twice.

The memory is ordered by one stream: a block may be freed, and its memory handed out again, while work that uses it is
still in that stream. Whoever uses a block in another stream keeps it until that stream has caught up.

Nothing here knows of CUDA; see :mod:`.device` for pages of a GPU.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ..errors import OutOfMemory
from .intervals import Intervals, SizedIntervals
from .sizes import format_size

ALIGNMENT = 512
REMEDY = "raise the memory limit, or use a shorter context or a smaller batch"


class Pages(Protocol):
    """Reserved addresses, from ``base`` on, to which memory is mapped in multiples of ``granularity`` bytes."""

    @property
    def base(self) -> int: ...

    @property
    def granularity(self) -> int: ...

    def map(self, offset: int, nbytes: int) -> None:
        """Map memory to a range; raises ``OutOfMemory``, with nothing mapped, where there is none."""

    def unmap(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Give back what can be given back of a mapped range that is out of use: the ``(offset, nbytes)`` that were.

        Waits until the device has finished with them.
        """

    def close(self) -> None:
        """Give back everything; twice is harmless."""


_Allocation = tuple[int, int, "Block | None"]
"""Of a block: where it starts, how much it takes, and the block of a meter that stands for it."""


class Block:
    """``nbytes`` of an arena's memory from ``address`` on, its own until :meth:`free` or garbage collection."""

    __slots__ = ("__weakref__", "_allocation", "_arena", "address", "nbytes")

    def __init__(self, arena: Arena, allocation: _Allocation, address: int, nbytes: int) -> None:
        self._arena = arena
        self._allocation: _Allocation | None = allocation
        self.address = address
        self.nbytes = nbytes

    def free(self) -> None:
        """Give the memory back to the arena; twice is harmless."""
        # Garbage collection may call this at any moment, also inside the arena: so it takes no lock. If Ctrl-C comes
        # before the last line, the memory is lost, which is better than being free twice.
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            self._arena._freed.append(allocation)

    __del__ = free


class Arena:
    """Blocks of ``pages``, never more than ``limit`` bytes (rounded down to whole pages). Safe to use from any thread.

    ``remedy`` is what the error says to do when the limit is reached. ``slack`` is how many bytes of freed blocks may
    wait while more memory is mapped, as long as the limit and the device allow it.
    """

    def __init__(self, pages: Pages, limit: int, remedy: str = REMEDY, slack: int = 0) -> None:
        self.limit = limit // pages.granularity * pages.granularity
        self.remedy = remedy
        self._slack = slack
        self._pages = pages
        self._base = pages.base
        self._lock = threading.Lock()
        self._freed: deque[_Allocation] = deque()
        self._mapped = Intervals()
        self._ready = SizedIntervals()  # free and mapped, but for what waits
        self._waiting: dict[int, list[int]] = {}  # starts of freed blocks, by size
        self._meter: Meter | None = None
        self._used = 0
        self._peak_used = 0
        self._peak_reserved = 0
        self._finalizer = weakref.finalize(self, pages.close)
        self._finalizer.atexit = False  # a process that ends gives everything back by ending

    @property
    def used(self) -> int:
        """Bytes in blocks that are not freed, each rounded up to ``ALIGNMENT``."""
        with self._lock:
            self._collect()
            return self._used

    @property
    def reserved(self) -> int:
        """Bytes mapped: what the device has lent to this arena."""
        return self._mapped.total

    @property
    def peak_used(self) -> int:
        return self._peak_used

    @property
    def peak_reserved(self) -> int:
        return self._peak_reserved

    def reset_peaks(self) -> None:
        """Let the peaks start again from what is used and reserved now."""
        with self._lock:
            self._collect()
            self._peak_used, self._peak_reserved = self._used, self._mapped.total

    def allocate(self, nbytes: int) -> Block:
        """A block of ``nbytes``, aligned to ``ALIGNMENT`` bytes; its contents are undefined.

        Raises ``OutOfMemory``, with every block as it was, where the limit leaves no room or the device has none left.
        """
        if nbytes < 0:
            raise ValueError(f"a block of {nbytes} bytes")
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        with self._lock:
            if self._freed:
                self._collect()
            waiting = self._waiting.get(size)
            start = waiting.pop() if waiting else self._find_range(size, nbytes)
            self._used += size
            if self._used > self._peak_used:
                self._peak_used = self._used
            shadow = None if self._meter is None else self._meter.allocate(nbytes)
            return Block(self, (start, size, shadow), self._base + start, nbytes)

    def scratch(self, nbytes: int) -> Scratch:
        """An arena within one block of ``nbytes`` of this one; raises ``OutOfMemory`` as :meth:`allocate` does."""
        return Scratch(self.allocate(nbytes))

    @contextmanager
    def measure(self) -> Iterator[Meter]:
        """Learn how large a :class:`Scratch` must be to serve the calls that this arena serves inside the ``with``.

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

    def close(self) -> None:
        """Give everything back to the device. Blocks that are not freed lose their memory; twice is harmless."""
        self._finalizer()

    def _collect(self) -> None:
        while self._freed:
            start, size, shadow = self._freed.popleft()
            self._used -= size
            waiting = self._waiting.get(size)
            if waiting is None:
                self._waiting[size] = [start]
            else:
                waiting.append(start)
            if shadow is not None:
                shadow.free()

    def _add_waiting(self, ready: SizedIntervals) -> None:
        ready.add_all(sorted((start, start + size) for size, starts in self._waiting.items() for start in starts))

    def _free(self) -> Intervals:
        """What no block has: memory that is ready, and addresses without memory."""
        return Intervals(*self._ready, *self._mapped.missing(0, self.limit))

    def _find_range(self, size: int, nbytes: int) -> int:
        """Where a block goes that no waiting one is as large as; memory is mapped to it."""
        ready = self._ready.copy()
        start = ready.take(size)
        if start is None and self._waiting and self._map_more(size):
            ready = self._ready.copy()
            start = ready.take(size)
        elif start is None and self._waiting:
            self._add_waiting(ready)
            start = ready.take(size)
            self._ready, self._waiting = ready, {}
        if start is None:
            start = self._find_range_to_map(size)
            if start is None:
                raise OutOfMemory(self._explain(nbytes, "no free range is large enough"))
            self._map(start, size, nbytes)
            ready = self._ready.copy()
            ready.remove(start, start + size)
        self._ready = ready
        return start

    def _map_more(self, size: int) -> bool:
        """Whether memory was mapped for a block so that what waits, no more than the slack, can go on waiting."""
        if self._mapped.total - self._used - self._ready.total > self._slack:
            return False
        start = self._find_range_to_map(size)
        if start is None:
            return False
        try:
            self._map_missing(start, size)
        except OutOfMemory:
            self._slack = 0  # asking in vain each time would take longer than joining
            return False
        return True

    def _find_range_to_map(self, size: int) -> int | None:
        """The start of the free range that is large enough and needs the fewest bytes mapped."""
        best = None
        for start, end in self._free():
            if end - start >= size:
                needed = sum(high - low for low, high in self._mapped.missing(*self._whole_pages(start, start + size)))
                if best is None or needed < best[0]:
                    best = (needed, start)
        return best and best[1]

    def _whole_pages(self, start: int, end: int) -> tuple[int, int]:
        granularity = self._pages.granularity
        return start // granularity * granularity, -(-end // granularity) * granularity

    def _map(self, start: int, size: int, nbytes: int) -> None:
        try:
            self._map_missing(start, size)
        except OutOfMemory as error:
            # Another process has taken memory that the limit allows: pages that are free here may make up for it.
            if not self._trim():
                raise OutOfMemory(self._explain(nbytes, str(error))) from error
            try:
                self._map_missing(start, size)
            except OutOfMemory as again:
                raise OutOfMemory(self._explain(nbytes, str(again))) from again

    def _map_missing(self, start: int, size: int) -> None:
        for low, high in self._mapped.missing(*self._whole_pages(start, start + size)):
            mapped, ready = self._mapped.copy(), self._ready.copy()
            mapped.add(low, high)
            ready.add(low, high)
            self._pages.map(low, high - low)
            self._mapped, self._ready = mapped, ready
            self._peak_reserved = max(self._peak_reserved, self._mapped.total)

    def _trim(self) -> int:
        """Give pages that are wholly free back to the device, which it must have finished with; returns the bytes."""
        self._collect()
        joined = self._ready.copy()
        self._add_waiting(joined)
        self._ready, self._waiting = joined, {}
        granularity, before = self._pages.granularity, self._mapped.total
        for start, end in list(self._ready):
            first, last = -(-start // granularity) * granularity, end // granularity * granularity
            for offset, nbytes in self._pages.unmap(first, last - first) if first < last else ():
                mapped, ready = self._mapped.copy(), self._ready.copy()
                mapped.remove(offset, offset + nbytes)
                ready.remove(offset, offset + nbytes)
                self._mapped, self._ready = mapped, ready
        return before - self._mapped.total

    def _explain(self, nbytes: int, reason: str) -> str:
        free = self._free()
        largest = max((end - start for start, end in free), default=0)
        return (
            f"out of device memory: {format_size(nbytes)} asked for, {format_size(self._used)} in use, "
            f"{format_size(free.total)} free of which {format_size(largest)} in one piece, "
            f"{format_size(self.limit)} allowed; {reason}; {self.remedy}"
        )


class _MappedRange:
    """Pages that are there already: mapping them only records how far they are in use."""

    granularity = ALIGNMENT

    def __init__(self, base: int) -> None:
        self.base = base

    def map(self, offset: int, nbytes: int) -> None: ...

    def unmap(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        return []

    def close(self) -> None: ...


class Scratch(Arena):
    """An arena within one block of another, such as what a CUDA graph's work allocates and owns as long as it lives."""

    def __init__(self, block: Block) -> None:
        size = -(-block.nbytes // ALIGNMENT) * ALIGNMENT  # a block ends where the next aligned one may begin
        super().__init__(_MappedRange(block.address), size, remedy="this block was made too small for its use")
        self._block = block

    def free(self) -> None:
        """Give the block back to its arena, with everything in it; twice is harmless."""
        self._block.free()


class Meter(Arena):
    """An arena without memory or limit that serves the calls another one serves: ``peak`` is the room they need."""

    def __init__(self) -> None:
        super().__init__(_MappedRange(0), 1 << 62)

    @property
    def peak(self) -> int:
        """Bytes that a :class:`Scratch` must have to serve the same calls."""
        return self.peak_reserved
