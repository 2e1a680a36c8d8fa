"""One safetensors file: a strict reader that names what is wrong, and hands out tensors without copying them.

The file is an 8-byte little-endian header length, a JSON header that gives every tensor's type, shape and byte range,
and the data. The ``safetensors`` library reads the same files, but it lets the last of two equal names win, reports
neither tensor nor value, and copies each tensor; so the header is read here. A test holds both against each other.

Two ways to the data. :meth:`SafetensorsFile.view` is a view of a memory map: nothing is copied, and the pages come when
they are touched. :meth:`SafetensorsFile.read_into` reads a range into memory of the caller's. Both first compare the
file's size and modification time with what they were when it was opened, so a file that was overwritten or cut short
meanwhile is an error. A view that is already out cannot be guarded: who cuts the file under it kills the process, as
with any memory map. Migration uses ``read_into`` alone, where a short read is an error at any moment.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import CheckpointError
from ._errors import checkpoint_error

MAX_HEADER_BYTES = 100_000_000
"""The format's own bound on the header, as the ``safetensors`` library has it."""

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""The format's type names that this package can read."""

FLOAT_DTYPES = ("F32", "F16", "BF16")
"""What an unquantized weight may be."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: ``offset`` and ``nbytes`` in bytes from the start of ``file``."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open file. Raises :class:`CheckpointError` with every problem of its header."""

    def __init__(self, path: Path):
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self._state = self._stat()
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self._state[0]

    def view(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file's memory map."""
        info = self.tensors[name]
        self.check_unchanged()
        dtype = DTYPES[info.dtype]
        if info.nbytes == 0:
            return np.empty(info.shape, dtype)
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        data = np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)
        return data.view(dtype).reshape(info.shape)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` (bytes) from ``offset`` bytes after the start of the file."""
        self.check_unchanged()
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path}: became shorter while it was read; nothing else may write to it")
            done += count

    def check_unchanged(self) -> None:
        """Raise :class:`CheckpointError` if the file was written to since it was opened."""
        if self._stat() != self._state:
            raise CheckpointError(f"{self.path}: changed since it was opened; nothing else may write to it meanwhile")

    def close(self) -> None:
        """Close the file. Views that were handed out stay valid: the memory map lives as long as they do."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._map = None

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns

    def _read_header(self) -> dict[str, TensorInfo]:
        if self.nbytes < 8:
            what = "is empty" if self.nbytes == 0 else f"has only {self.nbytes} bytes"
            raise CheckpointError(f"{self.path}: {what}, so it is no safetensors file; download or export it again")
        start = os.pread(self._fd, 32, 0)
        if start.startswith(b"version https://git-lfs"):
            raise CheckpointError(f"{self.path}: is a Git LFS pointer, not the weights; run `git lfs pull` there")
        length = int.from_bytes(start[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.path}: claims a header of {length:,} bytes, and the format allows {MAX_HEADER_BYTES:,}; "
                "it is damaged or no safetensors file"
            )
        if length > self.nbytes - 8:
            raise CheckpointError(
                f"{self.path}: claims a header of {length:,} bytes, but the file has {self.nbytes:,}; "
                "it is truncated: download or export it again"
            )
        header = bytearray(length)
        self.read_into(memoryview(header), 8)
        return _parse_header(self.path, bytes(header), 8 + length, self.nbytes)


def _parse_header(path: Path, text: bytes, data_start: int, file_size: int) -> dict[str, TensorInfo]:
    problems: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in pairs:
            if name in result:
                problems.append(f"the header names {name!r} twice")
            result[name] = value
        return result

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON ({error}); the file is damaged") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object; the file is damaged")
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        info = _parse_entry(entry, path, data_start)
        if isinstance(info, str):
            problems.append(f"tensor {name!r}: {info}")
        else:
            tensors[name] = info
    if not problems:
        problems = _layout_problems(tensors, data_start, file_size)
    if problems:
        raise checkpoint_error(path, problems)
    return tensors


def _parse_entry(entry: object, path: Path, data_start: int) -> TensorInfo | str:
    """A tensor's place, or what is wrong with its header entry."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return "its entry must have exactly dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"dtype {dtype!r} is not one of {', '.join(DTYPES)}"
    if not _sizes(shape):
        return f"shape {shape!r} is not a list of sizes"
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {offsets!r} is not a range"
    begin, end = offsets
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        return f"has {end - begin:,} bytes, but {dtype} {shape} takes {expected:,}"
    return TensorInfo(dtype, tuple(shape), path, data_start + begin, expected)


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)


def _layout_problems(tensors: dict[str, TensorInfo], data_start: int, file_size: int) -> list[str]:
    """Tensors must cover the data without overlap and without a gap, and nothing may follow them."""
    problems = []
    end, previous = data_start, ""
    cut = []
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset < end:
            problems.append(f"tensor {name!r} overlaps {previous!r} by {end - info.offset:,} bytes")
        elif info.offset > end:
            problems.append(f"{info.offset - end:,} bytes before tensor {name!r} belong to no tensor")
        if info.offset + info.nbytes > file_size:
            cut.append(name)
        if info.offset + info.nbytes >= end:
            end, previous = info.offset + info.nbytes, name
    if cut:
        problems.append(
            f"the file is truncated: it has {file_size:,} bytes and its tensors need {end:,} "
            f"({len(cut)} incomplete, the first is {cut[0]!r}); download or export it again"
        )
    elif file_size > end:
        problems.append(f"{file_size - end:,} bytes after the last tensor belong to no tensor")
    return problems
