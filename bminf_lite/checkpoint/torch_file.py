"""One PyTorch file, ``pytorch_model.bin`` or ``*.pt``, read without PyTorch and without trusting it.

The form since PyTorch 1.6 is a zip archive with a pickle, which describes the tensors, and a record per storage. The
form before that is a sequence of pickles (a magic number, a version, byte order, the description, the storages' keys)
followed by the storages. What the pickle may say is :mod:`.torch_pickle`'s matter. Here every tensor is checked to lie
within its storage and every storage within the file, and is then, as in safetensors, a view of the file's memory map.
Only where the file holds it in another order (a transposed matrix, say) or out of alignment is a tensor copied, and
then by itself. So memory stays at the largest tensor, whatever the size of the file.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ._errors import checkpoint_error
from .tensor_file import DTYPES, TensorFile, TensorInfo
from .torch_pickle import MAX_PICKLE_BYTES, load
from .torch_values import Storage, StridedTensor, UnsupportedPickleError, describe
from .torch_zip import Record, UnsupportedZipError, zip_records

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001


class TorchFile(TensorFile):
    """An open file. Raises :class:`CheckpointError` if it is damaged, or asks for more than rebuilding tensors.

    Its content must be a dictionary of tensors, or with ``entry`` a dictionary that holds one under that key. Names in
    the pickle that match a pattern of ``ignored`` are passed over; tensors may not need them.
    """

    def __init__(self, path: Path, entry: str | None = None, ignored: Sequence[str] = ()):
        self._entry = entry
        self._ignored = ignored
        self._strides: dict[str, tuple[int, ...]] = {}
        super().__init__(path)

    def view(self, name: str) -> np.ndarray:
        """The tensor, read-only: a view of the file's memory map, or a copy if it does not lie there as an array."""
        self.check_unchanged()
        array = self._strided(name)
        if not (array.flags.c_contiguous and array.flags.aligned):
            array = array.copy()
        array.flags.writeable = False
        return array

    def read_tensor(self, name: str, buffer: memoryview, offset: int = 0) -> None:
        """Fill ``buffer`` with a tensor's bytes in row-major order, from ``offset`` on.

        A tensor that the file holds in that order is read without touching the memory map.
        """
        info = self.tensors[name]
        assert offset + len(buffer) <= info.nbytes
        array = self._strided(name)
        if array.flags.c_contiguous:
            self.read_into(buffer, info.offset + offset)
            return
        self.check_unchanged()
        first, end = offset // array.itemsize, -(-(offset + len(buffer)) // array.itemsize)
        start = offset - first * array.itemsize
        buffer[:] = array.flat[first:end].view(np.uint8).data[start : start + len(buffer)]

    def _strided(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        dtype = DTYPES[info.dtype]
        if info.nbytes == 0:
            return np.empty(info.shape, dtype)
        return np.ndarray(info.shape, dtype, self._memory_map(), info.offset, self._strides[name])

    # -- the file's form ------------------------------------------------------------------------------------------

    def _read_header(self) -> Mapping[str, TensorInfo]:
        start = self._read(0, 265)
        try:
            if start.startswith(b"PK\x03\x04"):
                content, places = self._read_zip()
            elif start.startswith(b"\x80"):
                content, places = self._read_legacy()
            else:
                raise CheckpointError(f"{self.path}: {_what_else(start)}")
            return self._locate_all(_chosen(content, self._entry), places)
        except (UnsupportedPickleError, UnsupportedZipError) as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def _read_zip(self) -> tuple[Any, Mapping[str, Record]]:
        """The content, and where the storages are by key."""
        records = zip_records(self._read, self.nbytes)
        roots = [name.removesuffix("data.pkl") for name in records if name.split("/", 1)[-1] == "data.pkl"]
        if len(roots) != 1:
            raise UnsupportedZipError("it is a zip archive without the data.pkl of a PyTorch file")
        root = roots[0]
        if f"{root}constants.pkl" in records:
            raise UnsupportedZipError(
                "it is a TorchScript program, not a checkpoint; save the model's state_dict() instead"
            )
        order = records.get(f"{root}byteorder")
        if order is not None and self._read(order.offset, min(order.size, 16)) != b"little":
            raise UnsupportedZipError("its numbers are not little-endian, which this version does not read")
        pickled = records[f"{root}data.pkl"]
        if pickled.size > MAX_PICKLE_BYTES:
            raise UnsupportedPickleError(f"its pickle has {pickled.size:,} bytes, and {MAX_PICKLE_BYTES:,} are allowed")
        content = load(io.BytesIO(self._read(pickled.offset, pickled.size)), self._ignored).value
        prefix = f"{root}data/"
        return content, {k.removeprefix(prefix): record for k, record in records.items() if k.startswith(prefix)}

    def _read_legacy(self) -> tuple[Any, Mapping[str, Record]]:
        """The content, and where the storages are by key."""
        stream = io.BytesIO(self._read(0, MAX_PICKLE_BYTES))
        try:
            magic, version, system = (load(stream).value for _ in range(3))
        except UnsupportedPickleError as error:
            raise UnsupportedPickleError(f"is a pickle, but no PyTorch file ({error})") from error
        if magic != LEGACY_MAGIC or version != LEGACY_VERSION or not isinstance(system, dict):
            raise UnsupportedPickleError("is a pickle, but no PyTorch file; save a state_dict() with torch.save")
        if system.get("little_endian") is not True:
            raise UnsupportedPickleError("its numbers are not little-endian, which this version does not read")
        content = load(stream, self._ignored)
        keys = load(stream).value
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise UnsupportedPickleError("its list of storages is not a list of keys")
        return content.value, self._legacy_places(keys, content.storages, stream.tell())

    def _legacy_places(self, keys: list[str], storages: Mapping[str, Storage], position: int) -> dict[str, Record]:
        """Where the storages are: one after the other from ``position`` on, each after its number of elements."""
        places: dict[str, Record] = {}
        for key in keys:
            storage = storages.get(key)
            if storage is None or key in places:
                raise UnsupportedPickleError(f"its list of storages has the key {key[:80]!r}, unknown or twice")
            count = int.from_bytes(self._read(position, 8), "little")
            size = storage.whole * DTYPES[storage.dtype].itemsize
            if position + 8 + size > self.nbytes:
                raise UnsupportedPickleError(
                    f"it is truncated at the storage {key[:80]!r}: download or export it again"
                )
            if count != storage.whole:
                raise UnsupportedPickleError(f"storage {key[:80]!r} has {count:,} elements, not {storage.whole:,}")
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
            tensors[name], self._strides[name] = located
        if problems:
            raise checkpoint_error(self.path, problems)
        if not tensors:
            raise CheckpointError(f"{self.path}: holds no tensors")
        return tensors

    def _locate(self, tensor: StridedTensor, places: Mapping[str, Record]) -> tuple[TensorInfo, tuple[int, ...]] | str:
        """A tensor's place and its strides in bytes, or what is wrong with it."""
        storage, itemsize = tensor.storage, DTYPES[tensor.dtype].itemsize
        record = places.get(storage.key)
        width = DTYPES[storage.dtype].itemsize
        if record is None:
            return f"its storage {storage.key[:80]!r} is not in the file"
        if storage.whole * width > record.size:
            return f"its storage {storage.key[:80]!r} has {record.size:,} bytes, not {storage.whole * width:,}"
        elements = math.prod(tensor.shape)
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
        begin = (storage.start * width) + tensor.offset * itemsize
        if elements and (tensor.offset + reach + 1) * itemsize > storage.size * width:
            return f"reaches beyond its storage of {storage.size * width:,} bytes"
        if elements * itemsize > storage.size * width:
            return f"repeats its storage of {storage.size * width:,} bytes to {elements * itemsize:,}"
        if math.prod(max(size, 1) for size in tensor.shape) * itemsize >= 1 << 62:
            return "has more elements than can be addressed"
        strides = tuple(
            step * itemsize if size > 1 else itemsize for size, step in zip(tensor.shape, tensor.strides, strict=True)
        )
        info = TensorInfo(tensor.dtype, tensor.shape, self.path, record.offset + begin, elements * itemsize)
        return info, strides


def _what_else(start: bytes) -> str:
    """What a file is whose form is neither of the two."""
    if not start:
        return "is empty; download or export it again"
    if start[257:262] == b"ustar":
        return "is in the form of PyTorch before 0.1.10; save it again with a newer one"
    return "is no PyTorch file: neither a zip archive nor a pickle"


def _chosen(content: Any, entry: str | None) -> Mapping[Any, Any]:
    """The dictionary that is to hold the tensors."""
    chosen = content
    if entry is not None:
        if not isinstance(content, dict) or entry not in content:
            raise UnsupportedPickleError(f"it has no entry {entry!r}")
        chosen = content[entry]
    if not isinstance(chosen, dict):
        raise UnsupportedPickleError(f"it holds {describe(chosen)} instead of a dictionary of tensors")
    return chosen
