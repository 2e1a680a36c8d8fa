"""Writes PyTorch files without PyTorch, well-formed ones and others: a small pickle writer, and the two file forms."""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

STORAGE_NAMES = {
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.int32): "IntStorage",
    np.dtype(np.int16): "ShortStorage",
    np.dtype(np.int8): "CharStorage",
    np.dtype(np.uint8): "ByteStorage",
    np.dtype(np.bool_): "BoolStorage",
}


@dataclass
class Name:
    """A global: ``Name("torch._utils", "_rebuild_tensor_v2")``."""

    module: str
    name: str


@dataclass
class Call:
    """``function(*arguments)``, and what is done to the result."""

    function: Any
    arguments: Any = ()
    state: Any = None


@dataclass
class Persistent:
    """Something outside of the pickle."""

    value: Any


@dataclass
class Raw:
    """Operations as they are."""

    code: bytes


@dataclass
class Storages:
    """The storages of a file. A NumPy array is one storage; its views share it."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def tensor(self, array: np.ndarray, parameter: bool = False) -> Call:
        """The description of ``array``, whose base array becomes a storage."""
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        key = next((k for k, known in self.arrays.items() if known is base), None)
        if key is None:
            key = str(len(self.arrays))
            self.arrays[key] = base
        kind = Name("torch", STORAGE_NAMES[array.dtype])
        storage = Persistent(("storage", kind, key, "cpu", base.size))
        offset = (array.ctypes.data - base.ctypes.data) // array.itemsize
        strides = tuple(step // array.itemsize for step in array.strides)
        rebuilt = rebuild(storage, offset, array.shape, strides)
        return Call(Name("torch._utils", "_rebuild_parameter"), (rebuilt, True, ordered())) if parameter else rebuilt


def rebuild(storage: Any, offset: Any, shape: Any, strides: Any) -> Call:
    """A tensor in the words of PyTorch."""
    return Call(Name("torch._utils", "_rebuild_tensor_v2"), (storage, offset, shape, strides, False, ordered()))


def ordered() -> Call:
    """An empty ordered dictionary."""
    return Call(Name("collections", "OrderedDict"))


def dumps(value: Any) -> bytes:
    """A pickle of protocol 2."""
    return b"\x80\x02" + encode(value) + b"."


def encode(value: Any) -> bytes:
    """The operations that push ``value``."""
    if isinstance(value, Raw):
        return value.code
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value) if -(2**31) <= value < 2**31 else _long(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode()
        return b"X" + struct.pack("<I", len(text)) + text
    if isinstance(value, (tuple, list)):
        items = b"".join(map(encode, value))
        return b"(" + items + b"t" if isinstance(value, tuple) else b"](" + items + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(encode(k) + encode(v) for k, v in value.items()) + b"u"
    if isinstance(value, Name):
        return f"c{value.module}\n{value.name}\n".encode()
    if isinstance(value, Persistent):
        return encode(value.value) + b"Q"
    assert isinstance(value, Call), value
    built = b"" if value.state is None else encode(value.state) + b"b"
    return encode(value.function) + encode(value.arguments) + b"R" + built


def _long(value: int) -> bytes:
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def write_zip(path: Path, pickled: bytes, storages: Mapping[str, bytes], root: str = "archive", **more: bytes) -> Path:
    """The form since PyTorch 1.6. ``more`` are further records."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", pickled)
        for name, content in more.items():
            archive.writestr(f"{root}/{name}", content)
        for key, content in storages.items():
            archive.writestr(f"{root}/data/{key}", content)
        archive.writestr(f"{root}/version", "3\n")
    return path


def write_legacy(path: Path, pickled: bytes, storages: Mapping[str, tuple[int, bytes]], **system: Any) -> Path:
    """The form before PyTorch 1.6. Each storage has its number of elements and its bytes."""
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": sizes} | system
    header = [dumps(0x1950A86A20F9469CFC6C), dumps(1001), dumps(system), pickled, dumps(list(storages))]
    data = [struct.pack("<q", count) + content for count, content in storages.values()]
    path.write_bytes(b"".join([*header, *data]))
    return path


def save(path: Path, tensors: Mapping[str, np.ndarray], legacy: bool = False, entry: str | None = None) -> Path:
    """A checkpoint as ``torch.save`` writes it, with the versions of modules that a state_dict carries."""
    storages = Storages()
    described = {name: storages.tensor(array, parameter=i % 2 == 1) for i, (name, array) in enumerate(tensors.items())}
    content: Any = Raw(
        encode(ordered())
        + b"("
        + b"".join(encode(k) + encode(v) for k, v in described.items())
        + b"u"
        + encode({"_metadata": {"": {"version": 1}}})
        + b"b"
    )
    pickled = dumps(content if entry is None else {entry: content, "iteration": 7, "optimizer": None})
    if legacy:
        parts = {key: (array.size, _bytes(array)) for key, array in storages.arrays.items()}
        return write_legacy(path, pickled, parts)
    return write_zip(path, pickled, {key: _bytes(array) for key, array in storages.arrays.items()}, byteorder=b"little")


def _bytes(array: np.ndarray) -> bytes:
    assert math.prod(array.shape) == array.size and array.flags.c_contiguous
    return array.tobytes()
