"""Checksums that find damaged files: XXH3 with 128 bits (https://xxhash.com), of parts of a file at a time.

The checksum of a file is XXH3-128 of the joined XXH3-128 digests of its parts of 16 MiB, so that threads can share a
file. It finds damage and changes made by mistake. It does not find forgery, because a forger can compute it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ..errors import CheckpointError

PART_BYTES = 16 << 20
_READ_BYTES = 1 << 20  # stays in a core's cache between reading and hashing


@dataclass(frozen=True)
class FileRecord:
    """A file with its size in bytes and its checksum in hexadecimal, empty where it was not computed."""

    name: str
    bytes: int
    xxh3: str


class PartDigest:
    """The digest of the bytes ``start`` to ``end`` of a file, some of which the caller has in memory."""

    def __init__(self, file: Path, start: int, end: int):
        self._file = file
        self._position = start
        self._end = end
        self._state = xxhash.xxh3_128()

    def update(self, data: memoryview, offset: int) -> None:
        """Hash ``data``, the bytes of the file from ``offset`` on. Calls are in the order of the file.

        Bytes before ``offset`` that were not given are read, and bytes outside of the part are ignored.
        """
        self._read_up_to(min(offset, self._end))
        data = data[max(self._position - offset, 0) : max(self._end - offset, 0)]
        self._state.update(data)
        self._position += len(data)

    def digest(self) -> bytes:
        """The digest; reads the bytes that were not given. Raises :class:`CheckpointError` if that fails."""
        self._read_up_to(self._end)
        return bytes(self._state.digest())

    def _read_up_to(self, end: int) -> None:
        if self._position >= end:
            return
        buffer = memoryview(bytearray(min(_READ_BYTES, end - self._position)))
        try:
            with open(self._file, "rb", buffering=0) as file:
                while self._position < end:
                    count = os.preadv(file.fileno(), [buffer[: end - self._position]], self._position)
                    if count == 0:
                        problem = "became shorter while it was read; nothing else may write to it"
                        raise CheckpointError(f"{self._file}: {problem}")
                    self._state.update(buffer[:count])
                    self._position += count
        except OSError as error:
            raise CheckpointError(f"{self._file}: cannot be read: {error.strerror}") from error


class FileChecksums:
    """Computes the checksums of ``files``, under names relative to ``folder``.

    :meth:`take_part` gives a part to a caller that reads its bytes anyway, so that they are read once. :meth:`start`
    hashes the other parts on the threads of ``pool``, and :meth:`records` waits for them.
    """

    def __init__(self, files: Sequence[Path], folder: Path, pool: ThreadPoolExecutor):
        self._folder = folder
        self._pool = pool
        self._sizes = {file: file.stat().st_size for file in files}
        self._taken: dict[tuple[Path, int], PartDigest] = {}
        self._digests: dict[Path, list[Future[bytes]]] = {}

    def take_part(self, file: Path, index: int) -> PartDigest | None:
        """The part of ``file`` with this number, or None if it was taken already or the file has no such part."""
        if (file, index) in self._taken or index * PART_BYTES >= self._sizes[file]:
            return None
        return self._taken.setdefault((file, index), self._part(file, index))

    def start(self) -> None:
        """Begin with all parts that were not taken, after the caller has finished those that were."""
        for file, size in self._sizes.items():
            count = -(-size // PART_BYTES)
            parts = [self._taken.get((file, index)) or self._part(file, index) for index in range(count)]
            self._digests[file] = [self._pool.submit(part.digest) for part in parts]

    def records(self) -> list[FileRecord]:
        """The records of all files, in their order. Raises :class:`CheckpointError` if one cannot be read."""
        if not self._digests:
            self.start()
        return [
            FileRecord(
                file.relative_to(self._folder).as_posix(), size, _joined(part.result() for part in self._digests[file])
            )
            for file, size in self._sizes.items()
        ]

    def _part(self, file: Path, index: int) -> PartDigest:
        start = index * PART_BYTES
        return PartDigest(file, start, min(start + PART_BYTES, self._sizes[file]))


def file_checksum(file: Path) -> str:
    """The checksum of one file, in hexadecimal. Raises :class:`CheckpointError` if it cannot be read."""
    size = file.stat().st_size
    parts = (PartDigest(file, start, min(start + PART_BYTES, size)) for start in range(0, size, PART_BYTES))
    return _joined(part.digest() for part in parts)


def array_checksum(values: np.ndarray) -> str:
    """XXH3-128 of the bytes of an array, in hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data))


def _joined(digests: Iterable[bytes]) -> str:
    return str(xxhash.xxh3_128_hexdigest(b"".join(digests)))
