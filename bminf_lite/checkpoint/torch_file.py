"""One PyTorch file, ``pytorch_model.bin`` or ``*.pt``, read without PyTorch and without trusting it.

Since PyTorch 1.6 the file is a zip archive with a pickle, which describes the tensors, and a record per storage. Before
that it is a sequence of pickles (a magic number, a version, byte order, the description, the storages' keys) followed
by the storages. :mod:`.torch_pickle` reads the pickles. Records must lie within the file, uncompressed and without
overlap; storages must fit their records, and tensors their storages. A tensor that is not in row-major order (a
transposed matrix) is reordered while it is read.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, checkpoint_error
from .tensor_file import DTYPES, TensorFile, TensorInfo
from .torch_pickle import MAX_PICKLE_BYTES, StridedTensor, TensorStorage, UnsupportedTorchFileError, describe, load

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001

MAX_DIRECTORY_BYTES = 1 << 26
"""The most bytes of a zip directory: half a million records."""

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


@dataclass(frozen=True)
class Record:
    """A part of the file, in bytes."""

    offset: int
    size: int


class TorchFile(TensorFile):
    """An open file. Raises :class:`CheckpointError` if it is damaged or does more than rebuilding tensors.

    Its content must be a dictionary of tensors, or a dictionary that holds one under the key ``entry``. Names in the
    pickle that match a pattern of ``ignored`` are skipped; tensors may not need them.
    """

    def __init__(self, path: Path, entry: str | None = None, ignored: Sequence[str] = ()):
        self._entry = entry
        self._ignored = ignored
        self._strides: dict[str, tuple[int, ...]] = {}  # in bytes, of tensors that are not in row-major order
        self._map: mmap.mmap | None = None
        super().__init__(path)

    def read_tensor(self, name: str, buffer: memoryview, offset: int = 0) -> None:
        if name not in self._strides:
            super().read_tensor(name, buffer, offset)
            return
        self.check_unchanged()
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        info = self.tensors[name]
        array = np.ndarray(info.shape, DTYPES[info.dtype], self._map, info.offset, self._strides[name])
        first, end = offset // array.itemsize, -(-(offset + len(buffer)) // array.itemsize)
        start = offset - first * array.itemsize
        buffer[:] = array.flat[first:end].view(np.uint8).data[start : start + len(buffer)]

    def is_verbatim(self, name: str) -> bool:
        return name not in self._strides

    def close(self) -> None:
        super().close()
        self._map = None

    # -- the file's form ------------------------------------------------------------------------------------------

    def _read_header(self) -> Mapping[str, TensorInfo]:
        start = self._read_bytes(0, 265)
        try:
            if start.startswith(b"PK\x03\x04"):
                content, places = self._read_zip()
            elif start.startswith(b"\x80"):
                content, places = self._read_legacy()
            else:
                raise CheckpointError(f"{self.path}: {_other_form(start)}")
            return self._locate_all(_chosen(content, self._entry), places)
        except UnsupportedTorchFileError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def _read_zip(self) -> tuple[Any, Mapping[str, Record]]:
        """The content of the pickle, and the places of the storages by key."""
        records = self._zip_records()
        roots = [name.removesuffix("data.pkl") for name in records if name.split("/", 1)[-1] == "data.pkl"]
        if len(roots) != 1:
            raise UnsupportedTorchFileError("it is a zip archive without the data.pkl of a PyTorch file")
        root = roots[0]
        if f"{root}constants.pkl" in records:
            raise UnsupportedTorchFileError("it is a TorchScript program; save the model's state_dict() instead")
        order = records.get(f"{root}byteorder")
        if order is not None and self._read_bytes(order.offset, min(order.size, 16)) != b"little":
            raise UnsupportedTorchFileError("its numbers are not little-endian, which this version does not read")
        pickled = records[f"{root}data.pkl"]
        if pickled.size > MAX_PICKLE_BYTES:
            raise UnsupportedTorchFileError(f"its pickle has {pickled.size:,} bytes; {MAX_PICKLE_BYTES:,} are allowed")
        content = load(io.BytesIO(self._read_bytes(pickled.offset, pickled.size)), self._ignored).value
        prefix = f"{root}data/"
        return content, {k.removeprefix(prefix): record for k, record in records.items() if k.startswith(prefix)}

    def _zip_records(self) -> dict[str, Record]:
        """The records of the archive by name. ``zipfile`` reads the directory, and no record."""
        try:
            with _DirectoryReader(self._fd, closefd=False) as file, zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
        except UnsupportedTorchFileError:
            raise
        except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, OSError, struct.error) as error:
            raise UnsupportedTorchFileError(f"its zip directory is damaged or truncated ({error})") from error
        records: dict[str, Record] = {}
        end = 0
        for entry in sorted(entries, key=lambda entry: entry.header_offset):
            record, name = self._zip_record(entry), entry.orig_filename
            if name in records:
                raise UnsupportedTorchFileError(f"its record {name!r} is there twice")
            if entry.header_offset < end:
                raise UnsupportedTorchFileError(f"its record {name!r} overlaps the one before it")
            end = record.offset + record.size
            if end > self.nbytes:
                raise UnsupportedTorchFileError(f"its record {name!r} ends after the file's end; it is truncated")
            records[name] = record
        return records

    def _zip_record(self, entry: zipfile.ZipInfo) -> Record:
        """A record's place. The directory and the header in front of the record must agree.

        A compressed record is refused, because a small file could claim any size.
        """
        name = entry.orig_filename
        header = self._read_bytes(entry.header_offset, _LOCAL_HEADER.size) if entry.header_offset >= 0 else b""
        if len(header) < _LOCAL_HEADER.size:
            raise UnsupportedTorchFileError(f"its record {name!r} lies outside of the file")
        magic, _, flags, method, _, _, _, _, _, name_size, extra_size = _LOCAL_HEADER.unpack(header)
        local_name = self._read_bytes(entry.header_offset + _LOCAL_HEADER.size, name_size)
        if magic != b"PK\3\4" or local_name != name.encode("utf-8" if entry.flag_bits & 0x800 else "cp437"):
            raise UnsupportedTorchFileError(f"its record {name!r} is not where the directory says")
        if (flags | entry.flag_bits) & 0x1:
            raise UnsupportedTorchFileError(f"its record {name!r} is encrypted")
        if method != zipfile.ZIP_STORED or entry.compress_type != zipfile.ZIP_STORED:
            raise UnsupportedTorchFileError(f"its record {name!r} is compressed; save the checkpoint with torch.save")
        if entry.file_size != entry.compress_size:
            size = f"{entry.compress_size:,} bytes, not {entry.file_size:,}"
            raise UnsupportedTorchFileError(f"its record {name!r} has {size}")
        return Record(entry.header_offset + _LOCAL_HEADER.size + name_size + extra_size, entry.file_size)

    def _read_legacy(self) -> tuple[Any, Mapping[str, Record]]:
        """The content, and the places of the storages by key."""
        stream = io.BytesIO(self._read_bytes(0, MAX_PICKLE_BYTES))
        try:
            magic, version, system = (load(stream).value for _ in range(3))
        except UnsupportedTorchFileError as error:
            raise UnsupportedTorchFileError(f"is a pickle, but no PyTorch file ({error})") from error
        if magic != LEGACY_MAGIC or version != LEGACY_VERSION or not isinstance(system, dict):
            raise UnsupportedTorchFileError("is a pickle, but no PyTorch file; save a state_dict() with torch.save")
        if system.get("little_endian") is not True:
            raise UnsupportedTorchFileError("its numbers are not little-endian, which this version does not read")
        content = load(stream, self._ignored)
        keys = load(stream).value
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise UnsupportedTorchFileError("its list of storages is not a list of keys")
        return content.value, self._legacy_places(keys, content.storages, stream.tell())

    def _legacy_places(
        self, keys: list[str], storages: Mapping[str, TensorStorage], position: int
    ) -> dict[str, Record]:
        """The places of the storages: one after the other from ``position`` on, each after its number of elements."""
        places: dict[str, Record] = {}
        for key in keys:
            storage = storages.get(key)
            if storage is None or key in places:
                raise UnsupportedTorchFileError(f"its list of storages has the key {key[:80]!r}, unknown or twice")
            count = int.from_bytes(self._read_bytes(position, 8), "little")
            size = storage.whole * DTYPES[storage.dtype].itemsize
            if position + 8 + size > self.nbytes:
                raise UnsupportedTorchFileError(f"it is truncated at storage {key[:80]!r}: download or export it again")
            if count != storage.whole:
                raise UnsupportedTorchFileError(f"storage {key[:80]!r} has {count:,} elements, not {storage.whole:,}")
            places[key] = Record(position + 8, size)
            position += 8 + size
        return places

    # -- tensors --------------------------------------------------------------------------------------------------

    def _locate_all(self, content: Mapping[Any, Any], places: Mapping[str, Record]) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        problems = []
        for name, tensor in content.items():
            if not isinstance(name, str) or not isinstance(tensor, StridedTensor):
                problems.append(f"entry {describe(name)} is {describe(tensor)}, not a tensor")
                continue
            located = self._locate(tensor, places)
            if isinstance(located, str):
                problems.append(f"tensor {name!r}: {located}")
                continue
            tensors[name] = located
            if located.nbytes and not _is_row_major(tensor):
                self._strides[name] = tuple(step * DTYPES[tensor.dtype].itemsize for step in tensor.strides)
        if problems:
            raise checkpoint_error(self.path, problems)
        if not tensors:
            raise CheckpointError(f"{self.path}: holds no tensors")
        return tensors

    def _locate(self, tensor: StridedTensor, places: Mapping[str, Record]) -> TensorInfo | str:
        """A tensor's place, or what is wrong with it."""
        storage, itemsize = tensor.storage, DTYPES[tensor.dtype].itemsize
        record = places.get(storage.key)
        width = DTYPES[storage.dtype].itemsize
        if record is None:
            return f"its storage {storage.key[:80]!r} is not in the file"
        if storage.whole * width > record.size:
            return f"its storage {storage.key[:80]!r} has {record.size:,} bytes, not {storage.whole * width:,}"
        elements = math.prod(tensor.shape)
        last = tensor.offset + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
        if elements and (last + 1) * itemsize > storage.size * width:
            return f"reaches beyond its storage of {storage.size * width:,} bytes"
        if elements * itemsize > storage.size * width:
            return f"repeats its storage of {storage.size * width:,} bytes to {elements * itemsize:,}"
        if math.prod(max(size, 1) for size in tensor.shape) * itemsize >= 1 << 62:
            return "has more elements than can be addressed"
        begin = record.offset + storage.start * width + tensor.offset * itemsize
        return TensorInfo(tensor.dtype, tensor.shape, self.path, begin, elements * itemsize)


class _DirectoryReader(io.FileIO):
    """The file for ``zipfile``, which reads a directory of any size that the file claims; here the size is bounded."""

    def read(self, size: int | None = -1) -> bytes:
        rest = max(os.fstat(self.fileno()).st_size - self.tell(), 0)
        size = rest if size is None or size < 0 else min(size, rest)
        if size > MAX_DIRECTORY_BYTES:
            raise UnsupportedTorchFileError(f"its zip directory is {size:,} bytes; {MAX_DIRECTORY_BYTES:,} are allowed")
        return super().read(size)


def _is_row_major(tensor: StridedTensor) -> bool:
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _other_form(start: bytes) -> str:
    """The reason why a file with these first bytes has neither of the two forms."""
    if not start:
        return "is empty; download or export it again"
    if start[257:262] == b"ustar":
        return "is in the form of PyTorch before 0.1.10; save it again with a newer one"
    return "is no PyTorch file: neither a zip archive nor a pickle"


def _chosen(content: Any, entry: str | None) -> Mapping[Any, Any]:
    chosen = content[entry] if isinstance(content, dict) and entry in content else content
    if not isinstance(chosen, dict):
        raise UnsupportedTorchFileError(f"it holds {describe(chosen)} instead of a dictionary of tensors")
    return chosen
