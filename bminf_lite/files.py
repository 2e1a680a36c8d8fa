"""Paths and small files that a user names: ``~`` is expanded, and only regular files of a sensible size are read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import UsageError

MAX_TEXT_BYTES = 1 << 28
"""The most bytes of a JSON or text file of a checkpoint; the largest vocabularies take a tenth of it."""
MAX_THREADS = 16
"""More threads would wait for the disk."""


def expand(path: str | Path, what: str = "path") -> Path:
    """``path`` with ``~`` expanded; ``UsageError`` for a value that is no path."""
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"{what} is {path!r}, but must be the path of a folder, as text or a pathlib.Path")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{what} is {str(path)!r}: {error}") from error


def read_small_file(path: Path) -> bytes:
    """The content of a regular file. Raises ``OSError``, also for a device or a pipe and for a file of absurd size."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is not a regular file", str(path))
        if status.st_size > MAX_TEXT_BYTES:
            raise OSError(0, f"it has {status.st_size:,} bytes, and {MAX_TEXT_BYTES:,} are allowed", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def read_file_or_pipe(path: Path) -> bytes:
    """The content of a file or a pipe of any size. Raises ``OSError``, also for a device, which may be endless."""
    with open(path, "rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode) and not file.isatty():
            raise OSError(0, "it is a device", str(path))
        return file.read()


def thread_count() -> int:
    """Threads for work that is spread over cores: reading, hashing and converting files, masks of grammars."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS)
