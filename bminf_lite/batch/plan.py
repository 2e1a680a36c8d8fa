"""Which rows a batch has, and in which blocks they are answered: a function of the input alone.

Each run of a batch makes the same plan, so that a block of the output is known by its range of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from ..errors import UsageError
from .rows import Row, parse_line
from .storage import Storage

BLOCK_ROWS = 256
"""Rows of a block. Smaller blocks are committed sooner, and each costs a file."""
JSONL = (".jsonl", ".ndjson", ".json")
_CHUNK = 1 << 24
_NEWLINE = 10


@dataclass(frozen=True)
class InputFile:
    """A file of the input. ``digest`` tells it from another one: XXH3 of its content, in hexadecimal."""

    path: str
    num_bytes: int
    num_rows: int
    digest: str


@dataclass(frozen=True)
class BatchBlock:
    """The rows ``first_row`` to ``first_row + num_rows - 1`` of all rows.

    They are the bytes ``start`` to ``stop`` of a file of lines, or the rows ``start`` to ``stop`` of a table.
    """

    path: str
    first_row: int
    num_rows: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The name of its output, which tells its range and sorts as the rows do."""
        return f"rows-{self.first_row:012}-{self.first_row + self.num_rows - 1:012}"


@dataclass(frozen=True)
class Plan:
    """The input's files and blocks, in order."""

    files: tuple[InputFile, ...]
    blocks: tuple[BatchBlock, ...]
    block_rows: int

    @property
    def num_rows(self) -> int:
        """All rows. Empty lines count."""
        return sum(file.num_rows for file in self.files)

    def describe(self) -> dict[str, Any]:
        """What tells this plan from others, as JSON."""
        files = [[f.path.rsplit("/", 1)[-1], f.num_bytes, f.num_rows, f.digest] for f in self.files]
        return {"files": files, "block_rows": self.block_rows}


def plan_lines(storage: Storage, paths: Sequence[str], block_rows: int = BLOCK_ROWS) -> Plan:
    """The plan of files of JSON lines, which are read once. Raises ``UsageError`` for input without rows."""
    files: list[InputFile] = []
    blocks: list[BatchBlock] = []
    first_row = 0
    for path in paths:
        ends, size, digest = _line_ends(storage, path)
        for first in range(0, len(ends), block_rows):
            last = min(first + block_rows, len(ends)) - 1
            start = ends[first - 1] if first else 0
            blocks.append(BatchBlock(path, first_row + first, last + 1 - first, start, ends[last]))
        files.append(InputFile(path, size, len(ends), digest))
        first_row += len(ends)
    if not blocks:
        raise UsageError(f"{', '.join(paths)}: has no rows")
    return Plan(tuple(files), tuple(blocks), block_rows)


def _line_ends(storage: Storage, path: str) -> tuple[list[int], int, str]:
    """Where each line of a file ends, its bytes, and its digest."""
    parts: list[np.ndarray] = []
    size, last, digest = 0, _NEWLINE, xxhash.xxh3_128()
    with storage.open(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            parts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE) + size + 1)
            size, last = size + len(chunk), chunk[-1]
    ends: list[int] = np.concatenate(parts).tolist() if parts else []
    return (ends if last == _NEWLINE else [*ends, size]), size, digest.hexdigest()


def read_lines(storage: Storage, block: BatchBlock) -> list[Row]:
    """The rows of a block of lines. Empty lines are left out. Raises ``OSError``."""
    with storage.open(block.path) as file:
        file.seek(block.start)
        content = file.read(block.stop - block.start)
    lines = content.removeprefix(b"\xef\xbb\xbf" if block.start == 0 else b"").split(b"\n")[: block.num_rows]
    return [parse_line(block.first_row + i, line) for i, line in enumerate(lines) if line.strip()]
