"""Reads the header of one GGUF file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

The package ``gguf`` makes some NumPy arrays for each element of a list, which takes 10 s and 700 MB for a vocabulary of
262,144 tokens, and it believes every length. Here each length is compared with what is left of the file before anything
is read, so time and memory follow from the file's size, and lists have a bound of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16
"""The entries of metadata that a file may have; published ones have some dozens."""
MAX_TENSORS = 1 << 17
MAX_DIMENSIONS = 4
"""The dimensions that a tensor may have: ggml's bound."""
MAX_ELEMENTS = 1 << 22
"""The elements of all lists together. The longest are vocabularies and their merges, of up to a million."""
MAX_TEXT_BYTES = 1 << 28
"""The bytes of all texts together."""
DEFAULT_ALIGNMENT = 32

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_TEXT, _LIST = 8, 9


class HeaderProblem(ValueError):
    """What is wrong with a header."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: its ``shape`` in row-major order, the number of its type, and its offset behind the header."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


class HeaderFile:
    """The header of a file: its ``metadata`` by key, its ``tensors``, and ``data_start``, where their offsets begin.

    Raises :class:`HeaderProblem` for a file that is no GGUF file, or is damaged, and ``OSError``.
    """

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            self._file: BinaryIO = file
            self._left = file.seek(0, 2)
            file.seek(0)
            self._elements = self._text_bytes = 0
            num_tensors, num_entries = self._start()
            self.metadata: dict[str, Any] = {}
            for _ in range(num_entries):
                self._read_entry()
            self.tensors: dict[str, TensorEntry] = {}
            for _ in range(num_tensors):
                self._read_tensor()
            alignment = _alignment(self.metadata)
            self.data_start = -(-file.tell() // alignment) * alignment

    def _start(self) -> tuple[int, int]:
        """The numbers of tensors and of entries."""
        if self._take(4, "its first bytes") != MAGIC:
            raise HeaderProblem("it does not begin with GGUF")
        version = self._number("<I", "its version")
        if version and version & 0xFFFF == 0:
            raise HeaderProblem("its bytes have the order of big-endian machines: convert it with gguf-convert-endian")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise HeaderProblem(f"it has version {version} of the format, and {known} can be read")
        num_tensors = self._count("tensors", "it", MAX_TENSORS, least_bytes=24)
        return num_tensors, self._count("entries of metadata", "it", MAX_ENTRIES, least_bytes=13)

    def _read_entry(self) -> None:
        key = self._text("a key of its metadata")
        if key in self.metadata:
            raise HeaderProblem(f"its metadata has {key} twice")
        kind = self._number("<I", key)
        self.metadata[key] = self._list(key) if kind == _LIST else self._value(kind, key)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _TEXT:
            return self._text(key)
        return self._array(self._scalar(kind, key), 1, key)[0].item()

    def _list(self, key: str) -> list[Any]:
        kind = self._number("<I", key)
        if kind == _TEXT:
            count = self._count("elements", key, MAX_ELEMENTS - self._elements, least_bytes=8)
            self._elements += count
            return [self._text(key) for _ in range(count)]
        dtype = self._scalar(kind, key)
        count = self._count("elements", key, MAX_ELEMENTS - self._elements, least_bytes=dtype.itemsize)
        self._elements += count
        values: list[Any] = self._array(dtype, count, key).tolist()
        return values

    def _read_tensor(self) -> None:
        name = self._text("the name of a tensor")
        where = f"tensor {name!r}"
        if name in self.tensors:
            raise HeaderProblem(f"it has the {where} twice")
        dimensions = self._number("<I", where)
        if dimensions > MAX_DIMENSIONS:
            raise HeaderProblem(f"{where} has {dimensions:,} dimensions, and {MAX_DIMENSIONS} are allowed")
        sizes = self._array(np.dtype("<u8"), dimensions, where).tolist()
        type_number = self._number("<I", where)
        self.tensors[name] = TensorEntry(name, tuple(reversed(sizes)), type_number, self._number("<Q", where))

    def _scalar(self, kind: int, key: str) -> np.dtype:
        if kind not in _SCALARS:
            what = "is a list of lists" if kind == _LIST else f"has the unknown type {kind}"
            raise HeaderProblem(f"{key} {what}")
        return np.dtype(_SCALARS[kind])

    def _count(self, what: str, where: str, most: int, least_bytes: int) -> int:
        """A number of things that take ``least_bytes`` each."""
        count = self._number("<Q", where)
        if count * least_bytes > self._left:
            raise HeaderProblem(f"{where} claims {count:,} {what}, but only {self._left:,} bytes follow")
        if count > most:
            raise HeaderProblem(f"{where} has {count:,} {what}, and {most:,} are allowed")
        return count

    def _text(self, where: str) -> str:
        size = self._count("bytes of text", where, MAX_TEXT_BYTES - self._text_bytes, least_bytes=1)
        self._text_bytes += size
        try:
            return self._take(size, where).decode()
        except UnicodeDecodeError as error:
            raise HeaderProblem(f"{where} is not UTF-8 ({error.reason} at byte {error.start})") from None

    def _array(self, dtype: np.dtype, count: int, where: str) -> np.ndarray:
        return np.frombuffer(self._take(count * dtype.itemsize, where), dtype)

    def _number(self, form: str, where: str) -> int:
        number: int = struct.unpack(form, self._take(struct.calcsize(form), where))[0]
        return number

    def _take(self, size: int, where: str) -> bytes:
        if size > self._left:
            raise HeaderProblem(f"it ends within {where}")
        self._left -= size
        content = self._file.read(size)
        if len(content) < size:
            raise HeaderProblem("it became shorter while it was read")
        return content


def _alignment(metadata: Mapping[str, Any]) -> int:
    """The alignment of the tensors' data, in bytes."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise HeaderProblem(f"general.alignment is {alignment!r}, which is no power of two")
    return alignment
