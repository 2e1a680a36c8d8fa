"""A GPU's memory: how much of it may be used, its pages for an arena, and its speed.

With the driver's virtual memory management, addresses are reserved first and memory is mapped to them later, so an
arena takes no more from the GPU than it needs. Without it, the whole amount is allocated at once.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ..cuda.runtime import driver
from ..cuda.runtime.bindings import LibraryError
from ..cuda.runtime.driver import AccessDescription, AllocationProperties, Device, DeviceAttribute, Location, Status
from ..errors import OutOfMemory, UsageError
from .arena import Arena, Block, Pages
from .cache_memory import grows, lane_bytes
from .sizes import format_size, parse_size

CHUNK_BYTES, CHUNKS = 64 << 20, 1024
"""Memory is mapped in chunks of about 1 / ``CHUNKS`` of the limit, ``CHUNK_BYTES`` at most. A chunk can only be
given back as a whole, so a block for which the free memory suffices may find no room if chunks are large.
"""
MARGIN = 256 << 20
"""Bytes left free by default, for the display, the libraries' own needs and kernels' local memory."""
SLACK = 128 << 20
"""Bytes of freed blocks that need not be joined (see :mod:`.arena`). Larger blocks cannot use them, so they are at most
1 / 1024 of the limit. On a GPU of 96 GB they hold what a layer of a 1B model frees for 2,048 tokens (88 MB), where the
GPU would wait for the host."""

_ON_DEVICE, _PINNED, _READ_AND_WRITE, _MINIMUM_GRANULARITY = 1, 1, 3, 0


def device_limit(memory_limit: int | str | None, free_bytes: int, total_bytes: int) -> int:
    """Bytes that may be used of a GPU: ``memory_limit`` (``"6GiB"``, ``"500MB"``, bytes), or with None the free memory
    less a margin. A limit may exceed the memory that is free now.

    Raises ``UsageError`` for a text that is no size, and for a limit larger than the GPU.
    """
    if memory_limit is None:
        return max(0, free_bytes - MARGIN)
    limit = parse_size(memory_limit)
    if limit > total_bytes:
        raise UsageError(f"the memory limit is {format_size(limit)}, but the GPU has {format_size(total_bytes)}")
    return limit


def device_arena(device: Device, memory_limit: int | str | None = None) -> Arena:
    """An arena of the GPU's memory under ``memory_limit``, as :func:`device_limit` takes it."""
    limit = device_limit(memory_limit, *device.memory())
    maps = device.attribute(DeviceAttribute.VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
    pages: Pages = MappedPages(device, limit) if maps else WholePages(device, limit)
    return Arena(pages, limit, slack=min(SLACK, limit // 1024))


def page_bytes(device: Device) -> int:
    """The least memory that can be mapped, on a device with virtual memory management."""
    granularity = ctypes.c_size_t()
    with device.current():
        driver.load().cuMemGetAllocationGranularity(granularity, _properties(device), _MINIMUM_GRANULARITY)
    return granularity.value


def _properties(device: Device) -> AllocationProperties:
    return AllocationProperties(type=_PINNED, location=Location(type=_ON_DEVICE, id=device.index))


class MappedPages:
    """``nbytes`` of addresses, rounded up to ``granularity``, with memory mapped to them in chunks."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._driver = driver.load()
        self._properties = _properties(device)
        self._access = AccessDescription(location=self._properties.location, flags=_READ_AND_WRITE)
        self.granularity = page_bytes(device)
        self._nbytes = max(1, -(-nbytes // self.granularity)) * self.granularity
        self.chunk_bytes = min(CHUNK_BYTES, max(1, nbytes // CHUNKS // self.granularity) * self.granularity)
        base = ctypes.c_uint64()
        with device.current():
            self._driver.cuMemAddressReserve(base, self._nbytes, 0, 0, 0)
        self.base = base.value
        self._chunks: dict[int, tuple[int, int]] = {}  # offset -> bytes, allocation handle

    def map(self, offset: int, nbytes: int, at_once: int = 0) -> None:
        done: list[int] = []
        chunk_bytes = at_once or self.chunk_bytes
        with self._device.current():
            try:
                for start in range(offset, offset + nbytes, chunk_bytes):
                    self._map_chunk(start, min(chunk_bytes, offset + nbytes - start))
                    done.append(start)
            except LibraryError as error:
                for start in done:
                    self._unmap_chunk(start)
                if error.status != Status.OUT_OF_MEMORY:
                    raise
                raise _refused(self._device, nbytes) from error

    def unmap(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        end = offset + nbytes
        inside = [
            (start, size) for start, (size, _) in list(self._chunks.items()) if offset <= start and start + size <= end
        ]
        if inside:
            with self._device.current():
                self._device.synchronize()
                for start, _ in inside:
                    self._unmap_chunk(start)
        return inside

    def close(self) -> None:
        if self._nbytes:
            self.unmap(0, self._nbytes)
            self._driver.cuMemAddressFree(self.base, self._nbytes)
            self._nbytes = 0

    def _map_chunk(self, offset: int, nbytes: int) -> None:
        handle = ctypes.c_uint64()
        self._driver.cuMemCreate(handle, nbytes, self._properties, 0)
        try:
            self._driver.cuMemMap(self.base + offset, nbytes, 0, handle, 0)
        except LibraryError:
            self._driver.cuMemRelease(handle)
            raise
        self._chunks[offset] = (nbytes, handle.value)
        try:
            self._driver.cuMemSetAccess(self.base + offset, nbytes, self._access, 1)
        except LibraryError:
            self._unmap_chunk(offset)
            raise

    def _unmap_chunk(self, offset: int) -> None:
        nbytes, handle = self._chunks.pop(offset)
        self._driver.cuMemUnmap(self.base + offset, nbytes)
        self._driver.cuMemRelease(handle)


class GrowingMemory:
    """Ranges of addresses ("lanes") for arrays that grow together and never move.

    Lane ``i`` holds up to ``most`` items of ``item_bytes[i]`` bytes. The lanes lie one behind the other. Memory is
    mapped to the start of each lane, in whole pages, and counts towards the limit of ``arena``. If a page would hold
    all lanes, and on a device that cannot map memory, they are one block of ``arena``. Raises ``OutOfMemory`` if there
    is no room for it.
    """

    def __init__(self, device: Device, arena: Arena, item_bytes: Sequence[int], most: int) -> None:
        self._arena = arena
        self._item_bytes = tuple(item_bytes)
        self.most = most
        sizes = [lane_bytes(nbytes, most) for nbytes in self._item_bytes]
        self._offsets = [sum(sizes[:lane]) for lane in range(len(sizes))]
        maps = device.attribute(DeviceAttribute.VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
        self._page = page_bytes(device) if maps else 0
        self._mapped: set[int] = set()  # numbers of pages
        self._count = 0
        self._pages: MappedPages | None = None
        self._block: Block | None = None
        if maps and grows(sum(sizes), self._page):
            self._pages = MappedPages(device, sum(sizes))
            self._finalizer = weakref.finalize(self, self._pages.close)
            self._finalizer.atexit = False  # the end of the process frees everything
        else:
            self._block = arena.allocate(sum(sizes))

    @property
    def lanes(self) -> int:
        """How many lanes there are."""
        return len(self._item_bytes)

    @property
    def mapped(self) -> list[int]:
        """Bytes of each lane that can be used; an empty list if the lanes are a block of the arena."""
        return [] if self._pages is None else [self._count * nbytes for nbytes in self._item_bytes]

    def address(self, lane: int) -> int:
        """The first address of a lane."""
        if self._block is not None:
            return self._block.address + self._offsets[lane]
        assert self._pages is not None
        return self._pages.base + self._offsets[lane]

    def grow(self, count: int) -> None:
        """Map memory for ``count`` items or more in each lane. Raises ``OutOfMemory`` with nothing changed."""
        if count > self.most:
            raise ValueError(f"{count} items, but addresses were reserved for {self.most}")
        if self._pages is None or count <= self._count:
            return
        missing = sorted(self._pages_of(count) - self._mapped)
        self._arena.charge(len(missing) * self._page)
        done: list[tuple[int, int]] = []
        try:
            for first, last in runs(missing):
                offset, nbytes = first * self._page, (last + 1 - first) * self._page
                self._pages.map(offset, nbytes)
                done.append((offset, nbytes))
        except BaseException:
            for offset, nbytes in done:
                self._pages.unmap(offset, nbytes)
            self._arena.charge(-len(missing) * self._page)
            raise
        self._mapped.update(missing)
        self._count = count

    def free(self) -> None:
        """Give the memory back. The device must have finished with it; twice is harmless."""
        if self._block is not None:
            self._block.free()
        elif self._finalizer.alive:
            self._finalizer()
            self._arena.charge(-len(self._mapped) * self._page)

    def _pages_of(self, count: int) -> set[int]:
        """The pages that ``count`` items in each lane lie in."""
        pages: set[int] = set()
        for offset, nbytes in zip(self._offsets, self._item_bytes, strict=True):
            pages.update(range(offset // self._page, -(-(offset + count * nbytes) // self._page)))
        return pages


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last of each run of successive numbers, which are sorted."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] + 1 == number:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


class WholePages:
    """``nbytes`` allocated at once: one page, mapped until :meth:`close`."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._driver = driver.load()
        self.granularity = max(1, nbytes)
        base = ctypes.c_uint64()
        try:
            with device.current():
                self._driver.cuMemAlloc_v2(base, self.granularity)
        except LibraryError as error:
            if error.status != Status.OUT_OF_MEMORY:
                raise
            raise _refused(device, nbytes) from error
        self.base = base.value

    def map(self, offset: int, nbytes: int, at_once: int = 0) -> None: ...

    def unmap(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        return []

    def close(self) -> None:
        if self.base:
            with self._device.current():
                self._driver.cuMemFree_v2(self.base)
            self.base = 0


def _refused(device: Device, nbytes: int) -> OutOfMemory:
    free, total = device.memory()
    return OutOfMemory(
        f"GPU {device.index} refused {format_size(nbytes)}: of its {format_size(total)}, {format_size(free)} are free; "
        f"another process may have taken memory"
    )


@dataclass(frozen=True)
class Speeds:
    """Bytes per second: ``link`` from pinned host memory to the device, ``bandwidth`` of the device's own memory."""

    link: float
    bandwidth: float


def measure_speeds(device: Device, nbytes: int = 256 << 20, runs: int = 5) -> Speeds:
    """Copy ``nbytes`` to the device and within it, and take the fastest of ``runs``.

    A copy within the device counts twice, as it reads and writes.
    """
    import cupy as cp

    runtime = cp.cuda.runtime
    with cp.cuda.Device(device.index), cp.cuda.Stream(non_blocking=True) as stream:
        host = cp.cuda.PinnedMemory(nbytes)
        source, target = cp.cuda.Memory(nbytes), cp.cuda.Memory(nbytes)  # a pool would keep the memory

        def seconds(address: int, kind: int) -> float:
            before, after = cp.cuda.Event(), cp.cuda.Event()
            before.record(stream)
            runtime.memcpyAsync(target.ptr, address, nbytes, kind, stream.ptr)
            after.record(stream)
            after.synchronize()
            return float(cp.cuda.get_elapsed_time(before, after)) / 1e3

        link = min(seconds(host.ptr, runtime.memcpyHostToDevice) for _ in range(runs))
        within = min(seconds(source.ptr, runtime.memcpyDeviceToDevice) for _ in range(runs))
    return Speeds(nbytes / link, 2 * nbytes / within)
