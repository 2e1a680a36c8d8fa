"""Arrays in an arena's memory, laid out as the kernels require.

Rows are padded to a multiple of ``PAD`` elements, so that kernels can load and store whole vectors. An array of another
width is a view of a padded one.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import PAD, is_aligned, is_padded, round_up

MIN_STAGING_BYTES = 4096
MAX_STAGINGS = 4
"""The most unused pinned buffers of a size that are kept when another buffer is made.

Sizes are powers of two, so all that are kept have less than ``4 * MAX_STAGINGS`` times the bytes of the largest copy.
"""


class Allocator(Protocol):
    """Memory for arrays: an arena, or scratch within one."""

    def allocate(self, nbytes: int) -> Any:
        """A block with an ``address``, which is freed with its last reference."""
        ...


class Staging:
    """Pinned memory of the host for a copy to or from the device, and an event behind the copy.

    Making an event and a view takes the host longer than using them, so each buffer keeps its own.
    """

    def __init__(self, size: int):
        self.size = size
        self.event = cp.cuda.Event(disable_timing=True)
        self._memory = cp.cuda.alloc_pinned_memory(size)
        self.address: int = self._memory.ptr
        self.bytes = np.frombuffer(self._memory, np.uint8, size)


class Arrays:
    """Makes CuPy arrays from ``allocator`` for work on ``stream``.

    Results go to the host on a stream of their own, so that the next work on ``stream`` does not wait for their copies.
    """

    def __init__(self, allocator: Allocator, stream: cp.cuda.Stream, device: int):
        self.allocator = allocator
        self.stream = stream
        self.device = device
        with cp.cuda.Device(device):
            self._downloads = cp.cuda.Stream(non_blocking=True)
            self._written = cp.cuda.Event(disable_timing=True)  # behind what is downloaded next
        self._stagings: defaultdict[int, deque[Staging]] = defaultdict(deque)
        self._downloaded: deque[tuple[cp.cuda.Event, Any]] = deque()  # what copies to the host may read and write
        self._held: deque[tuple[cp.cuda.Event, Any]] = deque()  # what the stream's work may read

    def memory(self, nbytes: int) -> cp.cuda.MemoryPointer:
        """Memory that is freed with its last reference; CuPy's own operations use it as their allocator."""
        block = self.allocator.allocate(nbytes)
        return cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(block.address, nbytes or 1, block, self.device), 0)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> cp.ndarray:
        """An array without padding."""
        return cp.ndarray(shape, dtype, self.memory(math.prod(shape) * np.dtype(dtype).itemsize))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> cp.ndarray:
        """An array of zeros without padding."""
        array = self.empty(shape, dtype)
        array.data.memset_async(0, array.nbytes, self.stream)
        return array

    def rows(self, rows: int, columns: int, dtype: Any) -> cp.ndarray:
        """A matrix ``[rows, columns]`` with padded rows: zeros if there is padding, else undefined."""
        pitch = round_up(columns, PAD)
        if pitch == columns:
            return cp.ndarray((rows, columns), dtype, self.memory(rows * columns * np.dtype(dtype).itemsize))
        return self.zeros((rows, pitch), dtype)[:, :columns]

    def vector(self, values: np.ndarray) -> cp.ndarray:
        """fp32 ``[n]`` from the host, padded with zeros."""
        padded = np.zeros(round_up(len(values), PAD), np.float32)
        padded[: len(values)] = values
        return self.upload(padded)[: len(values)]

    def upload(self, values: np.ndarray) -> cp.ndarray:
        """A copy of a host array."""
        array = self.empty(values.shape, values.dtype)
        if array.size:
            array.set(np.ascontiguousarray(values), self.stream)
        return array

    def padded(self, x: cp.ndarray) -> cp.ndarray:
        """``x`` ``[rows, columns]`` with padded, aligned rows: itself, or a copy."""
        if is_padded(x):
            return x
        if len(x) == 1 and is_aligned(x):  # one row has no pitch
            return x[0].reshape(1, -1)
        copy = self.rows(x.shape[0], x.shape[1], x.dtype)
        with self.current():
            copy[...] = x
        return copy

    def aligned(self, x: cp.ndarray) -> cp.ndarray:
        """The same for a kernel that takes rows at any pitch: columns of wider rows stay where they are."""
        return x if len(x) > 1 and is_aligned(x) else self.padded(x)

    def download(self, x: cp.ndarray) -> Callable[[], np.ndarray]:
        """Start copying a contiguous array to pinned host memory, beside later work, which must not change it.

        The returned function waits for the copy. The memory of both is kept until the copy is complete.
        """
        staging, runtime = self._take_staging(x.nbytes), cp.cuda.runtime
        self._written.record(self.stream)
        self._downloads.wait_event(self._written)
        runtime.memcpyAsync(staging.address, x.data.ptr, x.nbytes, runtime.memcpyDeviceToHost, self._downloads.ptr)
        copied = staging.event
        copied.record(self._downloads)
        _drop_complete(self._downloaded)
        self._downloaded.append((copied, (x, staging)))  # also if wait is never called
        shape, dtype, nbytes = x.shape, x.dtype, x.nbytes

        @functools.cache  # the pinned memory is given back once
        def wait() -> np.ndarray:
            copied.synchronize()
            _drop_complete(self._downloaded)
            values: np.ndarray = staging.bytes[:nbytes].view(dtype).reshape(shape).copy()
            self._give_staging(staging)
            return values

        return wait

    def hold(self, sources: Any) -> None:
        """Keep what owns memory of the host until the stream's work up to here, which may read it, is complete."""
        _drop_complete(self._held)
        self._held.append((self.stream.record(cp.cuda.Event(disable_timing=True)), sources))

    def close(self) -> None:
        """Wait until all copies to the host are complete, and the work that reads what is held."""
        self._downloads.synchronize()
        self._downloaded.clear()
        if self._held:
            self._held[-1][0].synchronize()
            self._held.clear()

    def write(
        self, target: cp.ndarray, values: np.ndarray, stream: cp.cuda.Stream | None = None,
        copy: Callable[[int, int, int], None] | None = None,
    ) -> cp.cuda.Event:  # fmt: skip
        """Start copying a host array to a contiguous array of its shape and dtype, by way of pinned host memory.

        The copy is work of ``stream``, by default that of this object. The event is recorded behind it; wait for it at
        once, because a later copy by way of the same memory records it again. Instead of the
        copy engine, ``copy(to, from, nbytes)`` may copy.
        """
        assert (target.shape, target.dtype) == (values.shape, values.dtype) and target.flags.c_contiguous, target.shape
        nbytes, stream = values.nbytes, stream or self.stream
        staging = self._take_staging(nbytes)
        staging.bytes[:nbytes] = values.reshape(-1).view(np.uint8)
        if copy is not None and nbytes:
            copy(target.data.ptr, staging.address, nbytes)
        elif nbytes:
            runtime = cp.cuda.runtime
            runtime.memcpyAsync(target.data.ptr, staging.address, nbytes, runtime.memcpyHostToDevice, stream.ptr)
        staging.event.record(stream)
        self._give_staging(staging)
        return staging.event

    def _take_staging(self, nbytes: int) -> Staging:
        """Pinned memory whose last copy is complete. Sizes are powers of two, so it is mostly there already."""
        size = max(MIN_STAGING_BYTES, 1 << (nbytes - 1).bit_length())
        kept = self._stagings[size]
        if kept and kept[0].event.done:
            return kept.popleft()
        for others in self._stagings.values():
            while len(others) > MAX_STAGINGS and others[0].event.done:
                others.popleft()
        return Staging(size)

    def _give_staging(self, staging: Staging) -> None:
        """Keep pinned memory for other copies, which use it when its event is complete."""
        self._stagings[staging.size].append(staging)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within the context, CuPy's own operations run on this stream and allocate from this memory."""
        with cp.cuda.Device(self.device), self.stream, cp.cuda.using_allocator(self.memory):
            yield

    @contextmanager
    def within(self, allocator: Allocator) -> Iterator[None]:
        """Within the context, allocate from ``allocator``."""
        before, self.allocator = self.allocator, allocator
        try:
            yield
        finally:
            self.allocator = before


def _drop_complete(kept: deque[tuple[cp.cuda.Event, Any]]) -> None:
    """Let go of what the work before the events has read."""
    while kept and kept[0][0].done:
        kept.popleft()


class ZeroedScratch:
    """Scratch memory that kernels find zeroed and leave zeroed. It never moves, because graphs hold its addresses."""

    def __init__(self, arrays: Arrays, allocator: Allocator):
        self._arrays = arrays
        self._allocator = allocator
        self._kept: dict[tuple[str, int], cp.ndarray] = {}

    def zeros(self, purpose: str, count: int, dtype: Any) -> cp.ndarray:
        """``count`` zeros; equal arguments always return the same array."""
        found = self._kept.get((purpose, count))
        if found is None:
            with self._arrays.within(self._allocator):
                found = self._kept[purpose, count] = self._arrays.zeros((count,), dtype)
        return found

    def at_least(self, purpose: str, nbytes: int) -> cp.ndarray:
        """At least ``nbytes`` zero bytes for ``purpose``."""
        known = [count for name, count in self._kept if name == purpose and count >= nbytes]
        return self.zeros(purpose, max(known, default=nbytes), np.uint8)

    def clear(self) -> None:
        """Give the memory back."""
        self._kept.clear()
