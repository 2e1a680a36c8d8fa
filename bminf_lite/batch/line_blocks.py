"""Blocks of JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .plan import BatchBlock, read_lines
from .rows import Row, RowFormat, encode
from .storage import Storage


@dataclass(frozen=True)
class LineBlocks:
    """Blocks of JSON lines."""

    storage: Storage
    rows: RowFormat

    def read(self, block: BatchBlock) -> list[Row]:
        """See :meth:`.BlockFormat.read`."""
        return read_lines(self.storage, block)

    def encode(self, block: BatchBlock, rows: Sequence[tuple[Row, Mapping[str, Any]]]) -> bytes:
        """See :meth:`.BlockFormat.encode`."""
        return b"".join(encode(self.rows.output(row, result)) + b"\n" for row, result in rows)
