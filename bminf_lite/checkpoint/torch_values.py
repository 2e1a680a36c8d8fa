"""What the names in a PyTorch pickle mean here: tensors, storages, types, and the functions that put them together.

The table :data:`NAMES` is all that a pickle can refer to. Its functions are ours, take plain values, check each of them
and return a description; none has an effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_DIMENSIONS = 32
MAX_SIZE = 1 << 48
"""Bounds on a tensor: axes, and elements along one of them or of its storage."""

TYPES = {
    "float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "long": "I64", "int32": "I32", "int": "I32", "int16": "I16", "short": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""PyTorch's types -> names in ``tensor_file.DTYPES``."""

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
"""PyTorch's storage classes, by the type of their elements."""


class UnsupportedPickleError(ValueError):
    """The pickle is damaged, or asks for something that no tensor needs. Says what."""


@dataclass(frozen=True)
class TypeName:
    """A type, ``torch.float16``, by its name in ``tensor_file.DTYPES``."""

    dtype: str


@dataclass(frozen=True)
class StorageClass:
    """A class of storages, whose elements are of ``dtype``; untyped storages count as bytes."""

    dtype: str


@dataclass(frozen=True)
class Function:
    """A function or class of the table: what we make of its arguments, and how many it takes."""

    name: str
    call: Callable[..., Any]
    min_args: int
    max_args: int


@dataclass(frozen=True)
class Storage:
    """``size`` elements of ``dtype`` under ``key``, the storage's name in its file.

    ``start`` and ``size`` are a part of the whole storage's ``whole`` elements where old files save a view as such.
    """

    key: str
    dtype: str
    size: int
    start: int
    whole: int


@dataclass(frozen=True)
class StridedTensor:
    """Elements of a storage: ``offset`` and ``strides`` count elements of ``dtype`` from the storage's start."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Ignored:
    """What a name stands for that the caller has no use for. It was neither imported nor called."""

    name: str


def describe(value: Any) -> str:
    """A value in a few words; never its content, which may be of any size."""
    if isinstance(value, (Function, Ignored)):
        return value.name
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 64 else "a very large number"
    return f"a {type(value).__name__}" if value is not None else "None"


def parse_storage(value: Any) -> Storage:
    """What ``('storage', class, key, location, size[, view])`` names; ``view`` is None or ``(key, start, size)``."""
    if not isinstance(value, tuple) or len(value) not in (5, 6) or value[0] != "storage":
        raise UnsupportedPickleError("the pickle refers to something outside of it that is not a storage")
    _, kind, key, location, size = value[:5]
    if not isinstance(kind, StorageClass):
        raise UnsupportedPickleError(f"a storage is of {describe(kind)}, which is no class of storages")
    if not isinstance(key, str) or not isinstance(location, str):
        raise UnsupportedPickleError("a storage's key and place must be text")
    whole, start, part = _size(size, "a storage's size"), 0, size
    view = value[5] if len(value) == 6 else None
    if view is not None:
        if not isinstance(view, tuple) or len(view) != 3:
            raise UnsupportedPickleError(f"storage {key[:80]!r} has a view that is not a key, a start and a size")
        start, part = _size(view[1], "a view's start"), _size(view[2], "a view's size")
        if start + part > whole:
            raise UnsupportedPickleError(f"storage {key[:80]!r} has {whole:,} elements, and its view goes beyond them")
    return Storage(key, kind.dtype, part, start, whole)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StridedTensor:
    """``torch._utils._rebuild_tensor`` and ``_v2``: what follows is about gradients, which nothing here has."""
    if not isinstance(storage, Storage):
        raise UnsupportedPickleError(f"a tensor's storage is {describe(storage)}")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple) or len(shape) != len(strides):
        raise UnsupportedPickleError("a tensor's shape and strides must be tuples of the same length")
    if len(shape) > MAX_DIMENSIONS:
        raise UnsupportedPickleError(f"a tensor has {len(shape):,} axes, and {MAX_DIMENSIONS} are allowed")
    sizes = tuple(_size(size, "a tensor's size") for size in shape)
    steps = tuple(_size(step, "a tensor's stride") for step in strides)
    return StridedTensor(storage, storage.dtype, _size(offset, "a tensor's offset"), sizes, steps)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, _gradient: Any, _hooks: Any, dtype: Any, *_: Any
) -> StridedTensor:
    """``torch._utils._rebuild_tensor_v3``: an untyped storage, and the type beside it."""
    if not isinstance(dtype, TypeName):
        raise UnsupportedPickleError(f"a tensor's type is {describe(dtype)}")
    plain = _rebuild_tensor(storage, offset, shape, strides)
    if plain.storage.dtype != "U8":
        raise UnsupportedPickleError("a tensor has both a type of its own and a typed storage")
    return StridedTensor(plain.storage, dtype.dtype, plain.offset, plain.shape, plain.strides)


def _rebuild_parameter(tensor: Any, *_: Any) -> StridedTensor:
    if not isinstance(tensor, StridedTensor):
        raise UnsupportedPickleError(f"a parameter is made of {describe(tensor)}")
    return tensor


def _torch_size(sizes: Any) -> tuple[Any, ...]:
    if not isinstance(sizes, (tuple, list)) or len(sizes) > MAX_DIMENSIONS:
        raise UnsupportedPickleError(
            f"a torch.Size is made of {describe(sizes)}, not of {MAX_DIMENSIONS} sizes at most"
        )
    return tuple(sizes)


def _size(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise UnsupportedPickleError(f"{what} is {describe(value)}, not a whole number from 0 to {MAX_SIZE:,}")
    return value


_FUNCTIONS = (
    Function("torch._utils._rebuild_tensor", _rebuild_tensor, 4, 4),
    Function("torch._utils._rebuild_tensor_v2", _rebuild_tensor, 6, 7),
    Function("torch._utils._rebuild_tensor_v3", _rebuild_tensor_v3, 7, 8),
    Function("torch._utils._rebuild_parameter", _rebuild_parameter, 3, 3),
    Function("torch._utils._rebuild_parameter_with_state", _rebuild_parameter, 4, 4),
    Function("collections.OrderedDict", dict, 0, 0),
    Function("torch.Size", _torch_size, 1, 1),
)
_UNTYPED = ("torch.UntypedStorage", "torch.storage.UntypedStorage", "torch.storage._UntypedStorage")
NAMES: dict[str, Any] = {
    **{function.name: function for function in _FUNCTIONS},
    **{f"torch.{name}": TypeName(dtype) for name, dtype in TYPES.items()},
    **{f"torch.{name}": StorageClass(dtype) for name, dtype in STORAGES.items()},
    **dict.fromkeys(_UNTYPED, StorageClass("U8")),
}
"""Every name that a pickle may use, and what it means here."""
