"""One safetensors file, read strictly: an error names the tensor and the value that are wrong.

The file is an 8-byte little-endian header length, a JSON header that gives every tensor's type, shape and byte range,
and the data. The header is parsed here, because the ``safetensors`` library accepts two equal names, and its errors
name neither tensor nor value. A test compares both readers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, checkpoint_error
from ..files import parse_json
from .tensor_file import DTYPES, TensorFile, TensorInfo

MAX_HEADER_BYTES = 100_000_000
"""The format's bound on the header."""
MAX_NAME = 1_000
"""Characters of a tensor's name."""
MAX_DIMENSIONS = 32
MAX_TENSORS = 1 << 17
"""The most tensors in a file. The largest mixtures of experts have as many in all of their files."""


class SafetensorsFile(TensorFile):
    """An open file. Raises :class:`CheckpointError` with every problem of its header."""

    def _read_header(self) -> dict[str, TensorInfo]:
        if self.nbytes < 8:
            what = "is empty" if self.nbytes == 0 else f"has only {self.nbytes} bytes"
            raise CheckpointError(f"{self.path}: {what}, so it is no safetensors file; download or export it again")
        length = int.from_bytes(self._read_bytes(0, 8), "little")
        if length > MAX_HEADER_BYTES:
            problem = f"the format allows {MAX_HEADER_BYTES:,}; it is damaged or no safetensors file"
            raise CheckpointError(f"{self.path}: claims a header of {length:,} bytes, and {problem}")
        if length > self.nbytes - 8:
            problem = f"the file has {self.nbytes:,}; it is truncated: download or export it again"
            raise CheckpointError(f"{self.path}: claims a header of {length:,} bytes, but {problem}")
        return _parse_header(self.path, self._read_bytes(8, length), 8 + length, self.nbytes)


def _parse_header(path: Path, text: bytes, data_start: int, file_size: int) -> dict[str, TensorInfo]:
    problems: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in pairs:
            if name in result:
                problems.append(f"the header names {name!r} twice")
            result[name] = value
        return result

    if text.count(b"{") > MAX_TENSORS + 2:  # the header itself and its metadata are objects too
        problem = f"the header describes about {text.count(b'{'):,} tensors, and {MAX_TENSORS:,} are allowed"
        raise CheckpointError(f"{path}: {problem}; split the file, or export it again")
    try:
        header = parse_json(text, unique)
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not valid JSON ({error}); the file is damaged") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object; the file is damaged")
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if len(name) > MAX_NAME:
            problems.append(f"has a tensor whose name has {len(name):,} characters, and {MAX_NAME:,} are allowed")
            continue
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
    if not _sizes(shape) or len(shape) > MAX_DIMENSIONS:
        return f"shape {shape!r} is not a list of sizes"
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {offsets!r} is not a range"
    begin, end = offsets
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        return f"has {end - begin:,} bytes, but {dtype} {shape} takes {expected:,}"
    return TensorInfo(dtype, tuple(shape), path, data_start + begin, expected)


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 63 for x in value)


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
