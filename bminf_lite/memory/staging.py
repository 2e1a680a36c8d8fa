"""From a file to a device through a few buffers of pinned memory: threads read while the link copies.

A device copies from pageable memory at a fraction of its link's speed, because the driver first copies to pinned memory
of its own, with one thread. Here some threads read pieces of files straight into pinned buffers, each of which is given
to the device as soon as it is full. Nobody waits for anybody between one matrix and the next: a model's layers are made
while the pieces of earlier ones are still on their way.
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
    """Copies from staging buffers to the device, from any thread. Only :meth:`wait` waits."""

    def copy(self, buffer: int, nbytes: int, address: int) -> None:
        """Copy the first ``nbytes`` of a buffer to ``address``, after everything that the device was given before."""

    def wait(self, buffer: int) -> None:
        """Return when the device has finished with the last copy from a buffer, if there was one."""


class Staging:
    """Buffers of one size, and the threads that fill them. Close it when everything was given to the device."""

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
        """Begin to bring ``nbytes`` from where ``read(buffer, offset)`` gets them to ``address`` on the device.

        What the device is given after :meth:`finish` finds them there; until then nothing else may use that memory.
        """
        for offset in range(0, nbytes, self._size):
            count = min(self._size, nbytes - offset)
            self._futures.append(self._threads.submit(self._copy_piece, read, offset, count, address + offset))

    def finish(self) -> None:
        """Return when all pieces were given to the device, or raise what reading one of them raised."""
        parts = self._futures
        try:
            wait(parts)
        finally:
            wait(parts)  # after Ctrl-C too: as long as they run they use the memory at their addresses
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
