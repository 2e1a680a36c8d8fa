"""From a file to a device through a few buffers of pinned memory: some threads read while the link copies.

A device copies from pageable memory at a fraction of its link's speed, because the driver first copies to pinned memory
of its own, with one thread. Here a few threads read a piece of the file straight into a pinned buffer, and while the
device copies that, the next piece is read into another. Whatever reading raises ends the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

THREADS = 8
PIECE = 4 << 20
"""Bytes that a thread reads at once, at least."""

Read = Callable[[memoryview, int], None]


class Uploads(Protocol):
    """Copies from staging buffers to the device. Only :meth:`wait` waits."""

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
        self._piece = max(PIECE, -(-self._size // threads))
        self._threads = ThreadPoolExecutor(threads, "bminf-lite-read")
        self._next = 0

    def upload(self, read: Read, nbytes: int, address: int) -> None:
        """Bring ``nbytes`` from where ``read(buffer, offset)`` gets them to ``address`` on the device."""
        for offset in range(0, nbytes, self._size):
            buffer, self._next = self._next, (self._next + 1) % len(self.buffers)
            count = min(self._size, nbytes - offset)
            self.uploads.wait(buffer)
            self._fill(read, self.buffers[buffer][:count], offset)
            self.uploads.copy(buffer, count, address + offset)

    def close(self) -> None:
        """Wait for the copies, and end the threads."""
        for buffer in range(len(self.buffers)):
            self.uploads.wait(buffer)
        self._threads.shutdown()

    def _fill(self, read: Read, target: memoryview, offset: int) -> None:
        starts = range(0, len(target), self._piece)
        parts = [self._threads.submit(read, target[i : i + self._piece], offset + i) for i in starts]
        errors = [error for part in parts if (error := part.exception()) is not None]
        if errors:
            raise errors[0]
