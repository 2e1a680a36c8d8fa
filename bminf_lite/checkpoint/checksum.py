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


class FileChecksums:
    """Computes the checksums of ``files`` on the threads of ``pool``.

    :meth:`advance` begins with parts of a file that are being read anyway, so that the disk is read once;
    :meth:`records` does the rest. ``folder`` is where the names of the records are relative to.
    """

    def __init__(self, files: Sequence[Path], folder: Path, pool: ThreadPoolExecutor):
        self._folder = folder
        self._pool = pool
        self._sizes = {file: file.stat().st_size for file in files}
        self._parts: dict[Path, list[Future[bytes]]] = {file: [] for file in files}

    def advance(self, file: Path, end: int) -> None:
        """Hash the parts of ``file`` that lie before byte ``end``."""
        parts = self._parts[file]
        while (start := len(parts) * PART_BYTES) + PART_BYTES <= end and start < self._sizes[file]:
            parts.append(self._pool.submit(_part_digest, file, start, self._sizes[file]))

    def records(self) -> list[FileRecord]:
        """The records of all files, in their order. Raises :class:`CheckpointError` if one cannot be read."""
        for file, size in self._sizes.items():
            self.advance(file, size + PART_BYTES)
        return [
            FileRecord(
                file.relative_to(self._folder).as_posix(), size, _joined(part.result() for part in self._parts[file])
            )
            for file, size in self._sizes.items()
        ]


def array_checksum(values: np.ndarray) -> str:
    """XXH3-128 of the bytes of an array, in hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data))


def _joined(digests: Iterable[bytes]) -> str:
    return str(xxhash.xxh3_128_hexdigest(b"".join(digests)))


def _part_digest(file: Path, start: int, size: int) -> bytes:
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    position, end = start, min(start + PART_BYTES, size)
    try:
        with open(file, "rb", buffering=0) as opened:
            while position < end:
                count = os.preadv(opened.fileno(), [buffer[: min(_READ_BYTES, end - position)]], position)
                if count == 0:
                    raise CheckpointError(f"{file}: became shorter while it was read; nothing else may write to it")
                digest.update(buffer[:count])
                position += count
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    return bytes(digest.digest())
