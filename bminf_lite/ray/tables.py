"""Batches of Parquet files: a block is a range of rows, and its output a Parquet file with the columns of its input."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import pyarrow as pa
import xxhash
from pyarrow import parquet

from ..batch.plan import BLOCK_ROWS, BatchBlock, InputFile, Plan
from ..batch.rows import RESULT_FIELDS, Row, RowFormat
from ..batch.storage import Storage
from ..errors import UsageError

PARQUET = (".parquet", ".pq")
_TEXTS = ("message", "type", "param", "code")
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")
RESULT_TYPES = {
    "generated_text": pa.string(),
    "finish_reason": pa.string(),
    "usage": pa.struct([(name, pa.int64()) for name in _COUNTS]),
    "choices": pa.string(),
    "error": pa.struct([(name, pa.string()) for name in _TEXTS]),
}
"""The columns of :data:`.RESULT_FIELDS`. ``choices`` is JSON, because its fields differ from row to row."""


def plan_tables(storage: Storage, paths: Sequence[str], block_rows: int = BLOCK_ROWS) -> Plan:
    """The plan of Parquet files, of which only the footers are read. Raises ``UsageError`` for input without rows."""
    files: list[InputFile] = []
    blocks: list[BatchBlock] = []
    first_row = 0
    for path in paths:
        size, rows, digest = _footer(storage, path)
        for start in range(0, rows, block_rows):
            stop = min(start + block_rows, rows)
            blocks.append(BatchBlock(path, first_row + start, stop - start, start, stop))
        files.append(InputFile(path, size, rows, digest))
        first_row += rows
    if not blocks:
        raise UsageError(f"{', '.join(paths)}: has no rows")
    return Plan(tuple(files), tuple(blocks), block_rows)


def _footer(storage: Storage, path: str) -> tuple[int, int, str]:
    """The bytes and rows of a file, and a digest of its footer, which has sizes and statistics of all columns."""
    with storage.open(path) as file:
        try:
            rows = parquet.ParquetFile(file).metadata.num_rows
        except pa.ArrowInvalid as error:
            raise UsageError(f"{path}: is no Parquet file: {error}") from None
        size = file.seek(0, 2)
        file.seek(size - 8)
        footer = int.from_bytes(file.read(4), "little")
        file.seek(size - 8 - footer)
        return size, rows, xxhash.xxh3_128_hexdigest(file.read(footer))


@dataclass
class TableBlocks:
    """Blocks of Parquet files. The row groups of the block that was read last stay in memory."""

    storage: Storage
    rows: RowFormat
    _kept: tuple[str, int, int, pa.Table] | None = field(default=None, repr=False)

    def read(self, block: BatchBlock) -> list[Row]:
        """See :meth:`.BlockFormat.read`."""
        found = self._table(block).to_pylist()
        return [Row(block.first_row + i, _without_nulls(fields)) for i, fields in enumerate(found)]

    def encode(self, block: BatchBlock, rows: Sequence[tuple[Row, Mapping[str, Any]]]) -> bytes:
        """See :meth:`.BlockFormat.encode`."""
        table = self._table(block)
        table = table.drop_columns([name for name in RESULT_FIELDS if name in table.column_names])
        for name, kind in RESULT_TYPES.items():
            values = [result[name] for _, result in rows]
            if name == "choices":
                values = [None if value is None else json.dumps(value) for value in values]
            table = table.append_column(name, pa.array(values, kind))
        content = BytesIO()
        parquet.write_table(table, content)
        return content.getvalue()

    def _table(self, block: BatchBlock) -> pa.Table:
        kept = self._kept
        if kept is None or kept[0] != block.path or block.start < kept[1] or block.stop > kept[2]:
            kept = self._kept = self._groups(block)
        return kept[3].slice(block.start - kept[1], block.num_rows)

    def _groups(self, block: BatchBlock) -> tuple[str, int, int, pa.Table]:
        """The row groups that a block lies in: the path, their first row and the one behind their last, and them."""
        with self.storage.open(block.path) as file:
            source = parquet.ParquetFile(file)
            groups: list[int] = []
            first, start, stop = 0, block.start, block.stop
            for group in range(source.num_row_groups):
                rows = source.metadata.row_group(group).num_rows
                if first < block.stop and first + rows > block.start:
                    start = first if not groups else start
                    stop = first + rows
                    groups.append(group)
                first += rows
            return block.path, start, stop, source.read_row_groups(groups)


def _without_nulls(value: Any) -> Any:
    """``value`` without fields that are null: the rows of a table have all fields that any of them has."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
