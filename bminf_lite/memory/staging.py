"""From a file to a device through a few buffers of pinned memory: threads read while the link copies.

A device copies from pageable memory at a fraction of its link's speed, because the driver first copies to pinned memory
of its own, with one thread. Here, threads read pieces of files straight into pinned buffers, and the copy of a buffer
is queued when it is full. Reading, copying and building layers overlap: no matrix waits for the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Protocol

THREADS = 16
BUFFERS = 2 * THREADS
BUFFER_BYTES = 4 << 20

Read = Callable[[memoryview, int], None]


class Uploads(Protocol):
    """Copies from staging buffers to the device, callable from any thread. Only :meth:`wait` waits."""

    def copy(self, buffer: int, nbytes: int, address: int) -> None:
        """Copy the first ``nbytes`` of a buffer to ``address``, after all work that is queued already."""

    def wait(self, buffer: int) -> None:
        """Wait for the last copy from a buffer, if there was one."""


class StagingBuffers:
    """Buffers of one size, and the threads that fill them."""

    def __init__(self, uploads: Uploads, buffers: Sequence[memoryview], threads: int = THREADS) -> None:
        self.uploads = uploads
        self.buffers = buffers
        self._size = len(buffers[0])
        self._threads = ThreadPoolExecutor(threads, "bminf-lite-read")
        self._futures: list[Future[None]] = []
        self._free: SimpleQueue[int] = SimpleQueue()
        for buffer in range(len(buffers)):
            self._free.put(buffer)

    def upload(self, read: Read, nbytes: int, address: int) -> None:
        """Start to copy ``nbytes`` that ``read(buffer, offset)`` reads to ``address`` on the device.

        Work that is queued after :meth:`finish` finds them there. Until then nothing else may use that memory.
        """
        for offset in range(0, nbytes, self._size):
            count = min(self._size, nbytes - offset)
            self._futures.append(self._threads.submit(self._copy_piece, read, offset, count, address + offset))

    def finish(self) -> None:
        """Wait until all pieces are queued for the device. Raises the first error of reading a piece."""
        parts = self._futures
        try:
            wait(parts)
        finally:
            wait(parts)  # also after Ctrl-C, because threads that still run write to the device
            self._futures = []
        for part in parts:
            part.result()

    def close(self) -> None:
        """Wait for the threads and the copies."""
        self._threads.shutdown()
        for buffer in range(len(self.buffers)):
            self.uploads.wait(buffer)

    def _copy_piece(self, read: Read, offset: int, count: int, address: int) -> None:
        buffer = self._free.get()
        try:
            self.uploads.wait(buffer)
            read(self.buffers[buffer][:count], offset)
            self.uploads.copy(buffer, count, address)
        finally:
            self._free.put(buffer)
