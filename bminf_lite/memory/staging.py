"""From a file to devices through a few buffers of pinned memory: threads read while the links copy.

A device copies from pageable memory at a fraction of its link's speed, because the driver first copies to pinned memory
of its own, with one thread. Here, threads read pieces of files straight into pinned buffers, and the copy of a buffer
is queued when it is full. Reading, copying and building layers overlap: no matrix waits for the one before it.

The ranks of a model share the buffers and the threads. Of a matrix whose columns are divided among them, whole rows are
read once, and each device copies its own columns from the buffer. So the host copies each byte of a file once, however
many ranks there are, and a link carries only what its device keeps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

THREADS = 16
"""Threads that read for one device. More devices have more, but not more than there are cores."""
BUFFERS_PER_THREAD = 2
BUFFER_BYTES = 4 << 20

Read = Callable[[memoryview, int], None]


def thread_count(ranks: int) -> int:
    """How many threads read for ``ranks`` devices together."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(THREADS, min(THREADS * ranks, cores))


@dataclass(frozen=True)
class Columns:
    """Neighbouring columns of a row-major matrix: ``width`` bytes of each row of ``pitch`` bytes, from ``first`` on."""

    first: int
    width: int
    pitch: int


class UploadsStopped(RuntimeError):
    """Another rank has failed, so what is read for several is not read."""


class Uploads(Protocol):
    """Copies from staging buffers to a device, callable from any thread. Only :meth:`wait` waits."""

    def copy(self, buffer: int, nbytes: int, address: int) -> None:
        """Copy the first ``nbytes`` of a buffer to ``address``, after all work that is queued already."""

    def copy_columns(self, buffer: int, columns: Columns, rows: int, address: int) -> None:
        """Copy some columns of the ``rows`` in a buffer to ``address``, row behind row, likewise."""

    def wait(self, buffer: int) -> None:
        """Wait for the last copy from a buffer, if there was one."""


Copy = tuple[Uploads, Callable[[int], None]]
"""A device, and a function that queues its copy from a buffer."""


class StagingBuffers:
    """Buffers of one size, and the threads that fill them, for ``ranks`` devices."""

    def __init__(self, buffers: Sequence[memoryview], threads: int = THREADS, ranks: int = 1) -> None:
        self.buffers = buffers
        self.ranks = ranks
        self.buffer_bytes = len(buffers[0])
        self.is_stopped = False
        self._threads = ThreadPoolExecutor(threads, "bminf-lite-read")
        self._lock = threading.Lock()
        self._divided: dict[int, _DividedUpload] = {}
        self._last: list[list[Uploads]] = [[] for _ in buffers]
        """The devices that copy, or have copied, from each buffer."""
        self._free: SimpleQueue[int] = SimpleQueue()
        for buffer in range(len(buffers)):
            self._free.put(buffer)

    def submit(self, read: Read, offset: int, count: int, copies: Sequence[Copy]) -> Future[None]:
        """Start to read ``count`` bytes from ``offset`` on into a buffer, from which devices then copy."""
        return self._threads.submit(self._copy_piece, read, offset, count, copies)

    def divide(self, number: int, read: Read, rows: int, columns: Columns, own: _Own) -> _DividedUpload:
        """Take part in the upload ``number`` of a matrix whose columns are divided; it starts when all ranks do.

        Every rank calls this with the same numbers, rows and pitch. Raises :class:`UploadsStopped`.
        """
        with self._lock:
            if self.is_stopped:
                raise UploadsStopped("another rank has failed")
            found = self._divided.setdefault(number, _DividedUpload(read, rows, columns.pitch))
            assert (found.rows, found.pitch) == (rows, columns.pitch), "ranks load different matrices"
            found.parts.append((columns, own))
            if len(found.parts) < self.ranks:
                return found
            del self._divided[number]
        found.start(self)
        return found

    def abort(self) -> None:
        """Let no rank wait for another one: :class:`UploadsStopped` is raised until :meth:`reset`."""
        with self._lock:
            self.is_stopped = True
            waiting = list(self._divided.values())
            self._divided.clear()
        for upload in waiting:
            upload.started.set()

    def reset(self) -> None:
        """Begin anew after :meth:`abort`. No rank may be loading."""
        with self._lock:
            self.is_stopped = False
            self._divided.clear()

    def close(self) -> None:
        """End the threads, and wait for the copies; twice is harmless. What was not read yet is not read."""
        self._threads.shutdown(cancel_futures=True)
        for buffer in range(len(self.buffers)):
            self._wait(buffer)

    def _copy_piece(self, read: Read, offset: int, count: int, copies: Sequence[Copy]) -> None:
        buffer = self._free.get()
        try:
            self._wait(buffer)
            read(self.buffers[buffer][:count], offset)
            for device, copy in copies:
                self._last[buffer].append(device)
                copy(buffer)
        finally:
            self._free.put(buffer)

    def _wait(self, buffer: int) -> None:
        for device in self._last[buffer]:
            device.wait(buffer)
        self._last[buffer].clear()


class Uploader:
    """Reads for one device through the buffers that it shares with the other ranks."""

    def __init__(self, staging: StagingBuffers, device: Uploads):
        self.staging = staging
        self.device = device
        self._futures: list[Future[None]] = []
        self._divided: list[_DividedUpload] = []
        self._divided_count = 0

    def upload(self, read: Read, nbytes: int, address: int) -> None:
        """Start to copy ``nbytes`` that ``read(buffer, offset)`` reads to ``address`` on the device.

        Work that is queued after :meth:`finish` finds them there. Until then nothing else may use that memory.
        """
        size = self.staging.buffer_bytes
        for offset in range(0, nbytes, size):
            count = min(size, nbytes - offset)
            copy = partial(self.device.copy, nbytes=count, address=address + offset)
            self._futures.append(self.staging.submit(read, offset, count, [(self.device, copy)]))

    def upload_columns(self, read: Read, rows: int, columns: Columns, address: int) -> None:
        """Start to copy some columns of a matrix of ``rows``, whose bytes ``read`` reads, likewise.

        Every rank calls this for the same matrices in the same order. A buffer holds a row.
        """
        own = _Own(self.device, address)
        self._divided.append(self.staging.divide(self._divided_count, read, rows, columns, own))
        self._divided_count += 1

    def finish(self) -> None:
        """Wait until all pieces are queued for the device.

        Raises the first error of reading a piece, and then reads no others; or :class:`UploadsStopped`.
        """
        try:
            for upload in self._divided:
                self._futures += upload.wait(self.staging)
            wait(self._futures, return_when=FIRST_EXCEPTION)
            self._raise_first_error()
        except BaseException:
            self.cancel()
            raise
        self._futures, self._divided = [], []

    def cancel(self) -> None:
        """Drop what is not read yet, and wait for what is, because it is written to the device.

        The other ranks are stopped.
        """
        if self.staging.ranks > 1:
            self.staging.abort()
        parts = [*self._futures, *(future for upload in self._divided for future in upload.futures)]
        for part in parts:
            part.cancel()
        try:
            wait(parts)
        finally:
            wait(parts)  # also after Ctrl-C
            self._futures, self._divided = [], []

    def reset(self) -> None:
        """Begin anew, as all ranks do, after one has failed."""
        self._divided_count = 0

    def _raise_first_error(self) -> None:
        ended = [future for future in self._futures if future.done()]
        for future in ended:
            if not future.cancelled():
                future.result()
        if any(future.cancelled() for future in ended):
            raise UploadsStopped("another rank has failed")


@dataclass(frozen=True)
class _Own:
    """Where a rank's columns go."""

    device: Uploads
    address: int


class _DividedUpload:
    """A matrix of which each rank gets some columns."""

    def __init__(self, read: Read, rows: int, pitch: int) -> None:
        self.read, self.rows, self.pitch = read, rows, pitch
        self.parts: list[tuple[Columns, _Own]] = []
        self.futures: list[Future[None]] = []
        self.started = threading.Event()

    def start(self, staging: StagingBuffers) -> None:
        """Read as many whole rows at a time as a buffer holds."""
        step = staging.buffer_bytes // self.pitch
        for first in range(0, self.rows, step):
            rows = min(step, self.rows - first)
            copies = [
                (own.device, partial(
                    own.device.copy_columns, columns=columns, rows=rows, address=own.address + first * columns.width
                ))
                for columns, own in self.parts
            ]  # fmt: skip
            self.futures.append(staging.submit(self.read, first * self.pitch, rows * self.pitch, copies))
        self.started.set()

    def wait(self, staging: StagingBuffers) -> list[Future[None]]:
        """The futures, once all ranks have come."""
        self.started.wait()
        if len(self.parts) < staging.ranks:
            raise UploadsStopped("another rank has failed")
        return self.futures
