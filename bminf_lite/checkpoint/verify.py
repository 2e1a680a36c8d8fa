"""Checking a migrated checkpoint against the checksums of its manifest."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, checkpoint_error, require_function
from ..files import expand, linkable_root, thread_count
from .checksum import FileChecksums, FileRecord
from .manifest import MANIFEST_FILE, file_records
from .opened_model import open_model
from .reader import MAX_LIST_BYTES, read_json

Progress = Callable[[int, int, str], None]
"""Called with the bytes that are checked, their total and the name of a file."""


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` has checked: the number of files and their bytes."""

    files: int
    bytes: int


def verify(path: str | Path, progress: Progress | None = None) -> Verification:
    """Compare every file of the migrated checkpoint in the folder ``path`` with the size and checksum at migration.

    Reads all files once, and none outside of the folder. Raises :class:`CheckpointError`, which lists every file that
    is missing, has changed or is a link that leads out, and for a folder without checksums.
    """
    path = expand(path)
    require_function("progress", progress)
    manifest = (
        read_json(path / MANIFEST_FILE, MAX_LIST_BYTES) if path.is_dir() and (path / MANIFEST_FILE).is_file() else {}
    )
    recorded = file_records(manifest, path / MANIFEST_FILE)
    if not recorded:
        problem = f"has no checksums: {MANIFEST_FILE}, which migration writes, is missing or of an earlier version"
        raise CheckpointError(f"{path}: {problem}; migrate the checkpoint again")
    problems: list[str] = []
    total, done = sum(record.bytes for record in recorded), 0
    with ThreadPoolExecutor(thread_count(), "verify") as pool:
        for record in recorded:
            problems += _problems(record, path, pool)
            done += record.bytes
            if progress is not None:
                progress(done, total, record.name)
    if problems:
        remedy = "copy the file again from where it is intact, or migrate again; a change of your own is harmless"
        raise checkpoint_error(path, problems, remedy)
    open_model(path).close()
    return Verification(len(recorded), total)


def _problems(record: FileRecord, folder: Path, pool: ThreadPoolExecutor) -> list[str]:
    file = folder / record.name
    if not file.resolve().is_relative_to(linkable_root(folder)):
        return [f"{record.name} is a link that leads out of the folder, and is not read"]
    if not file.is_file():
        return [f"{record.name} is missing"]
    size = file.stat().st_size
    if size != record.bytes:
        return [f"{record.name} has {size:,} bytes; migration wrote {record.bytes:,}"]
    (found,) = FileChecksums([file], folder, pool).records()
    if found.xxh3 != record.xxh3:
        return [f"{record.name} has changed since migration: its checksum is {found.xxh3}, not {record.xxh3}"]
    return []
