"""The output of a batch: a folder with a file for each block of rows, and what is needed to go on after a kill.

A block's file appears when it is complete. Until then each finished row is appended to a journal, where the storage can
append, and a later run reads it there; without journals a later run answers the rows of incomplete blocks again.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import xxhash

from ..errors import BminfError, UsageError, listed
from .plan import BatchBlock
from .rows import encode
from .storage import Storage

DESCRIPTION = "batch.json"
_JOURNAL = ".journal"


class Journal:
    """A file that grows by a line for each finished row: its number, a checksum and its result.

    A line that was cut off, by a kill or a full disk, has no valid checksum and counts for nothing.
    """

    def __init__(self, path: Path):
        self._path = path
        self._descriptor = -1

    def append(self, index: int, result: Mapping[str, Any]) -> None:
        """Add a row. Raises ``OSError``, and then takes no more."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        content = encode(result)
        line = b"%d %s %s\n" % (index, xxhash.xxh3_64_hexdigest(content).encode(), content)
        while line:
            line = line[os.write(self._descriptor, line) :]

    def close(self) -> None:
        """Close the file, which stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_journal(content: bytes) -> dict[int, Any]:
    """The rows of a journal, by number."""
    rows: dict[int, Any] = {}
    for line in content.split(b"\n"):
        index, _, rest = line.partition(b" ")
        digest, _, result = rest.partition(b" ")
        if index.isdigit() and xxhash.xxh3_64_hexdigest(result).encode() == digest:
            rows.setdefault(int(index), json.loads(result))
    return rows


class BatchOutput:
    """The folder of a batch's output. Files of blocks end with ``suffix``."""

    def __init__(self, storage: Storage, folder: str, suffix: str):
        self._storage = storage
        self._folder = folder
        self._suffix = suffix

    def has_rows(self) -> bool:
        """Whether the folder, which is made if it is missing, has rows that are finished."""
        try:
            return _has_rows(self._storage.names(self._folder))
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> BminfError:
        return BminfError(f"{self._folder}: cannot be used: {error.strerror or error}")

    def begin(self, description: Mapping[str, Any]) -> set[str]:
        """Begin a batch or go on with it; returns the names of the blocks that are complete.

        On a local file system, where one process writes, a batch without any row is replaced: a command with a wrong
        model leaves one. Raises ``UsageError`` for the folder of another batch that has rows, or of anything else.
        """
        try:
            names = self._storage.names(self._folder)
            shown = _shown(names)
            if DESCRIPTION in names and (_has_rows(names) or not self._storage.can_append):
                with self._storage.open(f"{self._folder}/{DESCRIPTION}") as file:
                    earlier = json.loads(file.read())
                _require_equal(self._folder, earlier, json.loads(encode(description)))
            elif shown - {DESCRIPTION}:
                raise UsageError(f"{self._folder}: the folder has other files; name a new one")
            else:
                self._storage.commit(self._folder, DESCRIPTION, encode(description) + b"\n")
        except OSError as error:
            raise self._unusable(error) from error
        done = {name.removesuffix(self._suffix) for name in names if name.endswith(self._suffix)}
        for path in self._journals("*"):  # a run that was killed may have left those of a complete block
            if path.name.split(".")[1] in done:
                path.unlink(missing_ok=True)
        return done

    def file(self, block: BatchBlock) -> str:
        """The path of a block's file."""
        return f"{self._folder}/{block.name}{self._suffix}"

    def finished(self, block: BatchBlock) -> dict[int, Any]:
        """The rows of an incomplete block that earlier runs have finished, by number."""
        rows: dict[int, Any] = {}
        for path in self._journals(block.name):
            rows = read_journal(path.read_bytes()) | rows
        return rows

    def journal(self, block: BatchBlock) -> Journal | None:
        """A new journal for a block; None where the storage cannot append."""
        if not self._storage.can_append:
            return None
        return Journal(Path(self._folder) / f".{block.name}.{secrets.token_hex(8)}{_JOURNAL}")

    def commit(self, block: BatchBlock, content: bytes) -> None:
        """Write a block's file, and remove its journals. Raises ``OSError``."""
        self._storage.commit(self._folder, f"{block.name}{self._suffix}", content)
        for path in self._journals(block.name):
            path.unlink(missing_ok=True)

    def _journals(self, block: str) -> list[Path]:
        """The journals of a block, by its name."""
        if not self._storage.can_append:
            return []
        return sorted(Path(self._folder).glob(f".{block}.*{_JOURNAL}"))


def _shown(names: Set[str]) -> Set[str]:
    """The files that are neither journals nor what a kill left."""
    return {name for name in names if not name.startswith(".")}


def _has_rows(names: Set[str]) -> bool:
    return any(name.endswith(_JOURNAL) for name in names) or _shown(names) > {DESCRIPTION}


def _require_equal(folder: str, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ``UsageError``, which lists what differs."""
    problems = [
        f"{name} was {json.dumps(earlier.get(name))[:200]}, and is {json.dumps(now.get(name))[:200]}"
        for name in sorted(earlier.keys() | now.keys())
        if earlier.get(name) != now.get(name)
    ]
    if problems:
        text = listed(f"{folder}: the folder is that of another batch", problems)
        raise UsageError(f"{text}\ngive the same input, model and options to go on with it, or name a new folder")
