"""From a file to devices through a few buffers of pinned memory: threads read while the links copy.

A device copies from pageable memory at a fraction of its link's speed, because the driver first copies to pinned memory
of its own, with one thread. Here, threads read pieces of files straight into pinned buffers, and a thread for each
device queues the copy of a buffer when it is full. Reading, copying and building layers overlap: no matrix waits for
the one before it.

Python runs one thread at a time, and so does the driver for a device. More threads that read, or that queue copies for
one device, would wait for each other, and the thread that builds layers for them.

The ranks of a model share the buffers and the threads. Of a matrix whose columns are divided among them, whole rows are
read once, and each device copies its own columns from the buffer. So the host copies each byte of a file once, however
many ranks there are, and a link carries only what its device keeps.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

THREADS = 12
"""Threads that read, for however many devices."""
BUFFERS_PER_THREAD = 2
BUFFER_BYTES = 8 << 20

STOPPED = "another rank has failed"

Read = Callable[[memoryview, int], None]


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


class StagingBuffers:
    """Buffers of one size, and the threads that fill them and queue their copies, for ``ranks`` devices."""

    def __init__(self, buffers: Sequence[memoryview], threads: int = THREADS, ranks: int = 1) -> None:
        self.buffers = buffers
        self.ranks = ranks
        self.buffer_bytes = len(buffers[0])
        self.is_stopped = False
        self._lock = threading.Lock()
        self._incomplete: dict[int, _Upload] = {}
        """Uploads of divided matrices for which not all ranks have come, by their number."""
        self._copying: list[list[Uploads]] = [[] for _ in buffers]
        """The devices that may still copy from each buffer."""
        self._free: SimpleQueue[int] = SimpleQueue()
        for buffer in range(len(buffers)):
            self._free.put(buffer)
        self._pieces: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._copies: list[SimpleQueue[Callable[[], None] | None]] = []
        """The copies that the thread of each device is to queue."""
        self._readers = [_start_thread(f"bminf-lite-read-{i}", self._pieces) for i in range(threads)]
        self._copiers: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end_all, self._pieces, threads, self._copies)

    def copies(self) -> SimpleQueue[Callable[[], None] | None]:
        """What a new thread for a device calls, one after another."""
        with self._lock:
            found: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            self._copiers.append(_start_thread(f"bminf-lite-copy-{len(self._copies)}", found))
            self._copies.append(found)
            return found

    def start(self, upload: _Upload) -> None:
        """Let the threads read the pieces of an upload, after those of earlier ones."""
        if not upload.count:
            upload.done.set()
        work = partial(self._read_next, upload)
        for _ in range(upload.count):
            self._pieces.put(work)

    def divide(self, number: int, upload: _Upload) -> _Upload:
        """Join the upload ``number`` of a matrix whose columns are divided; it starts when all ranks have come.

        Every rank calls this with the same numbers, for the same matrices. Raises :class:`UploadsStopped`.
        """
        with self._lock:
            if self.is_stopped:
                raise UploadsStopped(STOPPED)
            found = self._incomplete.setdefault(number, upload)
            if found is not upload:
                assert (found.nbytes, found.piece_bytes) == (upload.nbytes, upload.piece_bytes), "not one matrix"
                found.targets += upload.targets
            if len(found.targets) < self.ranks:
                return found
            del self._incomplete[number]
        self.start(found)
        return found

    def abort(self) -> None:
        """Let no rank wait for another one: all uploads end with :class:`UploadsStopped`, until :meth:`reset`."""
        with self._lock:
            self.is_stopped = True
            incomplete = list(self._incomplete.values())
            self._incomplete.clear()
        for upload in incomplete:
            upload.fail(UploadsStopped(STOPPED))
            upload.done.set()

    def reset(self) -> None:
        """Begin anew after :meth:`abort`. No rank may be loading."""
        self.is_stopped = False

    def close(self) -> None:
        """Wait for what is read and copied, and end the threads; twice is harmless."""
        if self._end.detach() is not None:
            _end_threads(self._pieces, len(self._readers))
            for thread in self._readers:
                thread.join()
            for copies, thread in zip(self._copies, self._copiers, strict=True):
                _end_threads(copies, 1)
                thread.join()
        for buffer in range(len(self.buffers)):
            self._wait(buffer)

    def _read_next(self, upload: _Upload) -> None:
        """Read the next piece of an upload, and hand it to the threads of the devices that want it."""
        try:
            offset = next(upload.piece) * upload.piece_bytes
            if self.is_stopped or upload.has_failed:
                raise UploadsStopped(STOPPED)
            piece = _Piece(upload, offset, min(upload.piece_bytes, upload.nbytes - offset), self._free.get())
        except BaseException as error:
            upload.fail(error)
            upload.end_piece()
            return
        try:
            self._wait(piece.buffer)
            upload.read(self.buffers[piece.buffer][: piece.nbytes], offset)
        except BaseException as error:
            upload.fail(error)
            self._end_piece(piece)
            return
        for target in upload.targets:
            target.copies.put(partial(self._copy, target, piece))

    def _copy(self, target: _Target, piece: _Piece) -> None:
        """Queue the copy of a piece to a device."""
        try:
            self._copying[piece.buffer].append(target.device)
            target.copy(piece.buffer, piece.offset, piece.nbytes)
        except BaseException as error:
            piece.upload.fail(error)
        if piece.is_copied():
            self._end_piece(piece)

    def _end_piece(self, piece: _Piece) -> None:
        self._free.put(piece.buffer)
        piece.upload.end_piece()

    def _wait(self, buffer: int) -> None:
        for device in self._copying[buffer]:
            device.wait(buffer)
        self._copying[buffer].clear()


class Uploader:
    """Reads for one device through the buffers that it shares with those of the other ranks."""

    def __init__(self, staging: StagingBuffers, device: Uploads):
        self.staging = staging
        self.device = device
        self._copies = staging.copies()
        self._uploads: list[_Upload] = []
        self._batch = _Batch()
        self._divided = 0

    def upload(self, read: Read, nbytes: int, address: int) -> None:
        """Start to copy ``nbytes`` that ``read(buffer, offset)`` reads to ``address`` on the device.

        Work that is queued after :meth:`finish` finds them there. Until then nothing else may use that memory.
        """
        target = _Target(self.device, self._copies, self._batch, address)
        upload = _Upload(read, nbytes, self.staging.buffer_bytes, [target])
        self._uploads.append(upload)
        self.staging.start(upload)

    def upload_columns(self, read: Read, rows: int, columns: Columns, address: int) -> None:
        """Start to copy some columns of a matrix of ``rows``, whose bytes ``read`` reads, likewise.

        Every rank calls this for the same matrices in the same order. A buffer has room for a row. Raises
        :class:`UploadsStopped`.
        """
        target = _Target(self.device, self._copies, self._batch, address, columns)
        at_once = self.staging.buffer_bytes // columns.pitch * columns.pitch
        upload = _Upload(read, rows * columns.pitch, at_once, [target])
        self._uploads.append(self.staging.divide(self._divided, upload))
        self._divided += 1

    def finish(self) -> None:
        """Wait until all pieces are queued for the device.

        Raises the first error of reading a piece, after which no others are read, or :class:`UploadsStopped`.
        """
        error = self._end()
        if error is not None:
            if self.staging.ranks > 1:
                self.staging.abort()
            raise error

    def cancel(self) -> None:
        """Drop what is not read yet, for all ranks, and wait for what is, because it is written to the device."""
        self._drop()
        self._end()

    def reset(self) -> None:
        """Begin anew, as all ranks do, after one has failed."""
        self._divided = 0

    def _end(self) -> BaseException | None:
        """Wait for all pieces, after Ctrl-C for those that have begun. Returns the first error."""
        batch = self._batch
        try:
            for upload in self._uploads:
                upload.done.wait()
        except BaseException:
            self._drop()
            raise
        finally:
            for upload in self._uploads:
                upload.done.wait()
            self._uploads, self._batch = [], _Batch()
        return batch.error

    def _drop(self) -> None:
        self._batch.fail(UploadsStopped(STOPPED))
        if self.staging.ranks > 1:
            self.staging.abort()


class _Batch:
    """What one device has uploaded since it waited last, with the first error."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error


@dataclass(frozen=True)
class _Target:
    """Where a device gets what is read: all of it, or some columns, from ``address`` on."""

    device: Uploads
    copies: SimpleQueue[Callable[[], None] | None]
    batch: _Batch
    address: int
    columns: Columns | None = None

    def copy(self, buffer: int, offset: int, count: int) -> None:
        """Copy a piece of ``count`` bytes, which begins ``offset`` bytes into the matrix."""
        if self.columns is None:
            self.device.copy(buffer, count, self.address + offset)
            return
        first, rows = offset // self.columns.pitch, count // self.columns.pitch
        self.device.copy_columns(buffer, self.columns, rows, self.address + first * self.columns.width)


class _Upload:
    """``nbytes`` that are read in pieces, for one device or for all."""

    def __init__(self, read: Read, nbytes: int, piece_bytes: int, targets: list[_Target]) -> None:
        self.read, self.nbytes, self.piece_bytes, self.targets = read, nbytes, piece_bytes, targets
        self.count = -(-nbytes // piece_bytes)
        self.piece = itertools.count()
        self.done = threading.Event()
        self._left = self.count
        self._lock = threading.Lock()

    @property
    def has_failed(self) -> bool:
        """Whether a device no longer wants its part, or does not get it."""
        return any(target.batch.error is not None for target in self.targets)

    def fail(self, error: BaseException) -> None:
        for target in self.targets:
            target.batch.fail(error)

    def end_piece(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self.done.set()


class _Piece:
    """``nbytes`` of an upload from ``offset`` on, in a buffer from which some devices copy them."""

    def __init__(self, upload: _Upload, offset: int, nbytes: int, buffer: int) -> None:
        self.upload, self.offset, self.nbytes, self.buffer = upload, offset, nbytes, buffer
        self._left = len(upload.targets)
        self._lock = threading.Lock()

    def is_copied(self) -> bool:
        """Whether the copy to the last device has been queued, which each device tells by calling this once."""
        with self._lock:
            self._left -= 1
            return not self._left


def _start_thread(name: str, works: SimpleQueue[Any]) -> threading.Thread:
    thread = threading.Thread(target=_run_all, args=(works,), name=name, daemon=True)
    thread.start()
    return thread


def _run_all(works: SimpleQueue[Any]) -> None:
    while (work := works.get()) is not None:
        work()
        del work  # nothing of a model is kept while the thread waits


def _end_threads(works: SimpleQueue[Any], count: int) -> None:
    for _ in range(count):
        works.put(None)


def _end_all(pieces: SimpleQueue[Any], count: int, copies: list[SimpleQueue[Any]]) -> None:
    _end_threads(pieces, count)
    for works in copies:
        _end_threads(works, 1)
