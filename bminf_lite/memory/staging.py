"""From a file to a device through a few buffers of pinned memory: some threads read while the link copies.

A device copies from pageable memory at a fraction of its link's speed, because the driver first copies to pinned memory
of its own, with one thread. Here a few threads read pieces of the file straight into pinned buffers, each into one, and
the device copies a piece when it is there, while others are read. Whatever reading raises ends the transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

THREADS = 8

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
        self._threads = ThreadPoolExecutor(threads, "bminf-lite-read")
        self._next = 0

    def upload(self, read: Read, nbytes: int, address: int) -> None:
        """Bring ``nbytes`` from where ``read(buffer, offset)`` gets them to ``address`` on the device."""
        filling: deque[tuple[Future[None], int, int, int]] = deque()
        try:
            for offset in range(0, nbytes, self._size):
                if len(filling) == len(self.buffers):
                    self._copy(*filling.popleft())
                buffer, self._next = self._next, (self._next + 1) % len(self.buffers)
                count = min(self._size, nbytes - offset)
                self.uploads.wait(buffer)
                done = self._threads.submit(read, self.buffers[buffer][:count], offset)
                filling.append((done, buffer, count, address + offset))
            while filling:
                self._copy(*filling.popleft())
        finally:
            wait([done for done, *_ in filling])

    def close(self) -> None:
        """Wait for the copies, and end the threads."""
        for buffer in range(len(self.buffers)):
            self.uploads.wait(buffer)
        self._threads.shutdown()

    def _copy(self, filled: Future[None], buffer: int, count: int, address: int) -> None:
        filled.result()
        self.uploads.copy(buffer, count, address)
