"""The pickle in a PyTorch file, read without running it.

A pickle is a program: Python's unpickler imports the names in it and calls what it finds. Here the program drives a
small stack machine that imports nothing and calls nothing of Python's. The machine knows the operations that build
lists, dictionaries, tuples, numbers and text, and the names in :data:`NAMES`: ordered dictionaries, the functions that
rebuild tensors and parameters, storages and types. Their functions are defined here, check each argument, and return
descriptions without any effect. Every other name and every other operation is refused, also those of the text protocol,
which PyTorch never wrote. The standard library's ``pickletools`` splits the bytes into operations; it runs none.

The cost is bounded too: operations are counted, each makes one value from the stack, only text and small numbers are
hashed, no value is traversed, and the memo is a dictionary. So nesting, sharing and repetition cost no more than their
bytes.
"""

from __future__ import annotations

import fnmatch
import io
import pickletools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_PICKLE_BYTES = 1 << 24
MAX_OPERATIONS = 2_000_000
"""Bounds on a pickle. About thirty operations and 150 bytes describe a tensor, so 60,000 tensors fit."""

MAX_NAME = 200
"""Characters of a module's name and a name in it."""

MAX_DIMENSIONS = 32
MAX_SIZE = 1 << 48
"""Bounds on a tensor: axes, and elements along one of them or of its storage."""

TYPES = {
    "float64": "F64",
    "double": "F64",
    "float32": "F32",
    "float": "F32",
    "float16": "F16",
    "half": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "long": "I64",
    "int32": "I32",
    "int": "I32",
    "int16": "I16",
    "short": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""PyTorch's types -> names in ``tensor_file.DTYPES``."""

STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
"""PyTorch's storage classes -> the type of their elements."""


class UnsupportedTorchFileError(ValueError):
    """The file is damaged, or contains something that no checkpoint needs. The message says what."""


# -- values -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TypeName:
    """A type, ``torch.float16``, by its name in ``tensor_file.DTYPES``."""

    dtype: str


@dataclass(frozen=True)
class StorageClass:
    """A class of storages with elements of ``dtype``; untyped storages count as bytes."""

    dtype: str


@dataclass(frozen=True)
class AllowedFunction:
    """A function or class that a pickle may call: its replacement here, and the number of its arguments."""

    name: str
    call: Callable[..., Any]
    min_args: int
    max_args: int


@dataclass(frozen=True)
class TensorStorage:
    """``size`` elements of ``dtype`` under ``key``, the storage's name in its file.

    Old files save a view of a storage as a storage: then ``start`` and ``size`` are a part of ``whole`` elements.
    """

    key: str
    dtype: str
    size: int
    start: int
    whole: int


@dataclass(frozen=True)
class StridedTensor:
    """Elements of a storage: ``offset`` and ``strides`` count elements of ``dtype`` from the storage's start."""

    storage: TensorStorage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Ignored:
    """A name that the caller does not need. It is neither imported nor called."""

    name: str


def describe(value: Any) -> str:
    """A value in a few words, without its content, which may be of any size."""
    if isinstance(value, (AllowedFunction, Ignored)):
        return value.name
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 64 else "a very large number"
    return f"a {type(value).__name__}" if value is not None else "None"


def parse_storage(value: Any) -> TensorStorage:
    """The storage ``('storage', class, key, location, size[, view])``; ``view`` is None or ``(key, start, size)``."""
    if not isinstance(value, tuple) or len(value) not in (5, 6) or value[0] != "storage":
        raise UnsupportedTorchFileError("the pickle refers to something outside of it that is not a storage")
    _, kind, key, location, size, view = (*value, None)[:6]
    if not isinstance(kind, StorageClass):
        raise UnsupportedTorchFileError(f"a storage is of {describe(kind)}, which is no class of storages")
    if not isinstance(key, str) or not isinstance(location, str):
        raise UnsupportedTorchFileError("a storage's key and place must be text")
    storage = TensorStorage(key, kind.dtype, _size(size, "a storage's size"), 0, size)
    if view is None:
        return storage
    if not isinstance(view, tuple) or len(view) != 3:
        raise UnsupportedTorchFileError(f"storage {key[:80]!r} has a view that is not a key, a start and a size")
    start, part = _size(view[1], "a view's start"), _size(view[2], "a view's size")
    if start + part > size:
        raise UnsupportedTorchFileError(f"storage {key[:80]!r} has {size:,} elements, and its view goes beyond them")
    return replace(storage, size=part, start=start)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StridedTensor:
    """``torch._utils._rebuild_tensor`` and ``_v2``. The further arguments are about gradients."""
    if not isinstance(storage, TensorStorage):
        raise UnsupportedTorchFileError(f"a tensor's storage is {describe(storage)}")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple) or len(shape) != len(strides):
        raise UnsupportedTorchFileError("a tensor's shape and strides must be tuples of the same length")
    if len(shape) > MAX_DIMENSIONS:
        raise UnsupportedTorchFileError(f"a tensor has {len(shape):,} axes, and {MAX_DIMENSIONS} are allowed")
    sizes = tuple(_size(size, "a tensor's size") for size in shape)
    steps = tuple(_size(step, "a tensor's stride") for step in strides)
    return StridedTensor(storage, storage.dtype, _size(offset, "a tensor's offset"), sizes, steps)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, _gradient: Any, _hooks: Any, dtype: Any, *_: Any
) -> StridedTensor:
    """``torch._utils._rebuild_tensor_v3``: an untyped storage, and the type beside it."""
    if not isinstance(dtype, TypeName):
        raise UnsupportedTorchFileError(f"a tensor's type is {describe(dtype)}")
    plain = _rebuild_tensor(storage, offset, shape, strides)
    if plain.storage.dtype != "U8":
        raise UnsupportedTorchFileError("a tensor has both a type of its own and a typed storage")
    return replace(plain, dtype=dtype.dtype)


def _rebuild_parameter(tensor: Any, *_: Any) -> StridedTensor:
    if not isinstance(tensor, StridedTensor):
        raise UnsupportedTorchFileError(f"a parameter is made of {describe(tensor)}")
    return tensor


def _torch_size(sizes: Any) -> tuple[Any, ...]:
    if not isinstance(sizes, (tuple, list)) or len(sizes) > MAX_DIMENSIONS:
        raise UnsupportedTorchFileError(f"a torch.Size is {describe(sizes)}, not up to {MAX_DIMENSIONS} sizes")
    return tuple(sizes)


def _size(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise UnsupportedTorchFileError(f"{what} is {describe(value)}, not a whole number from 0 to {MAX_SIZE:,}")
    return value


_FUNCTIONS = (
    AllowedFunction("torch._utils._rebuild_tensor", _rebuild_tensor, 4, 4),
    AllowedFunction("torch._utils._rebuild_tensor_v2", _rebuild_tensor, 6, 7),
    AllowedFunction("torch._utils._rebuild_tensor_v3", _rebuild_tensor_v3, 7, 8),
    AllowedFunction("torch._utils._rebuild_parameter", _rebuild_parameter, 3, 3),
    AllowedFunction("torch._utils._rebuild_parameter_with_state", _rebuild_parameter, 4, 4),
    AllowedFunction("collections.OrderedDict", dict, 0, 0),
    AllowedFunction("torch.Size", _torch_size, 1, 1),
)
_UNTYPED = ("torch.UntypedStorage", "torch.storage.UntypedStorage", "torch.storage._UntypedStorage")
NAMES: dict[str, Any] = {
    **{function.name: function for function in _FUNCTIONS},
    **{f"torch.{name}": TypeName(dtype) for name, dtype in TYPES.items()},
    **{f"torch.{name}": StorageClass(dtype) for name, dtype in STORAGES.items()},
    **dict.fromkeys(_UNTYPED, StorageClass("U8")),
}
"""Every name that a pickle may use, and its replacement here."""


# -- the machine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pickled:
    """The value of a pickle, and the storages that it refers to, by key."""

    value: Any
    storages: Mapping[str, TensorStorage]


def load(stream: io.BytesIO, ignored: Sequence[str] = ()) -> Pickled:
    """Read the pickle at the stream's position, which moves to the pickle's end.

    Dictionaries, lists, tuples, text and numbers are Python's; tensors are :class:`StridedTensor`. Names that match a
    pattern of ``ignored`` (``numpy.*``) become :class:`Ignored` instead of an error.
    Raises :class:`UnsupportedTorchFileError`.
    """
    machine = _Machine(ignored)
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(stream)):
            if count >= MAX_OPERATIONS:
                raise UnsupportedTorchFileError(f"the pickle has more than {MAX_OPERATIONS:,} operations")
            machine.step(operation.name, argument)
    except UnsupportedTorchFileError:
        raise
    except (ValueError, OverflowError, Warning) as error:  # of pickletools: a truncated argument, an unknown operation
        raise UnsupportedTorchFileError(f"the pickle is damaged: {str(error)[:200]}") from error
    return Pickled(machine.result(), machine.storages)


class _Machine:
    """The stack, the memo, and the operations on them."""

    def __init__(self, ignored: Sequence[str]):
        self.ignored = ignored
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each mark
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, TensorStorage] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, argument)
        else:
            raise UnsupportedTorchFileError(f"the pickle uses the operation {name}, which no tensor needs")

    def result(self) -> Any:
        if len(self.stack) != 1 or self.below:
            raise UnsupportedTorchFileError("the pickle is damaged: it ends in the middle of a value")
        return self.stack[0]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def top(self) -> Any:
        if not self.stack:
            raise UnsupportedTorchFileError("the pickle is damaged: it takes a value from an empty stack")
        return self.stack[-1]

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        if not self.below:
            raise UnsupportedTorchFileError("the pickle is damaged: it goes back to a mark that is not there")
        items, self.stack = self.stack, self.below.pop()
        return items

    def put(self, index: int) -> None:
        if not 0 <= index < MAX_OPERATIONS:
            raise UnsupportedTorchFileError("the pickle's memo has an index out of range")
        self.memo[index] = self.top()

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.top()

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise UnsupportedTorchFileError("the pickle is damaged: it takes a value from the memo that is not there")
        self.push(self.memo[index])

    def fixed_tuple(self, size: int) -> None:
        self.push(tuple(self.pop() for _ in range(size))[::-1])

    def append(self, items: list[Any]) -> None:
        target = self.top()
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Ignored):
            raise UnsupportedTorchFileError(f"the pickle appends to {describe(target)}")

    def set_items(self, items: list[Any]) -> None:
        target = self.top()
        if isinstance(target, dict):
            target.update(_pairs(items))
        elif not isinstance(target, Ignored):
            raise UnsupportedTorchFileError(f"the pickle sets items of {describe(target)}")

    def find(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnsupportedTorchFileError("the pickle names something by a value that is not text")
        if len(module) + len(name) > MAX_NAME:
            raise UnsupportedTorchFileError(f"the pickle uses a name of more than {MAX_NAME} characters")
        full = f"{module}.{name}"
        known = NAMES.get(full)
        if known is None and any(fnmatch.fnmatchcase(full, pattern) for pattern in self.ignored):
            known = Ignored(full)
        if known is None:
            raise UnsupportedTorchFileError(f"the pickle uses {full!r}, which no tensor needs; nothing of it was run")
        self.push(known)

    def global_name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.find(module, name)

    def stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self.find(module, name)

    def reduce(self, _: Any) -> None:
        arguments, function = self.pop(), self.pop()
        if isinstance(function, Ignored):
            self.push(function)
            return
        if not isinstance(function, AllowedFunction) or not isinstance(arguments, tuple):
            raise UnsupportedTorchFileError(f"the pickle calls {describe(function)}")
        if not function.min_args <= len(arguments) <= function.max_args:
            raise UnsupportedTorchFileError(f"the pickle calls {function.name} with {len(arguments)} arguments")
        self.push(function.call(*arguments))

    def new_object(self, _: Any) -> None:
        _arguments, kind = self.pop(), self.pop()
        if not isinstance(kind, Ignored):
            raise UnsupportedTorchFileError(f"the pickle makes an object of {describe(kind)}")
        self.push(kind)

    def build(self, _: Any) -> None:
        """Drop the state of a dictionary: the versions of a model's modules."""
        state, target = self.pop(), self.top()
        if isinstance(target, dict) and not isinstance(state, dict):
            raise UnsupportedTorchFileError(f"the pickle gives a dictionary {describe(state)} as its state")
        if not isinstance(target, (dict, Ignored)):
            raise UnsupportedTorchFileError(f"the pickle gives {describe(target)} a state")

    def persistent(self, _: Any) -> None:
        storage = parse_storage(self.pop())
        known = self.storages.setdefault(storage.key, storage)
        if (known.dtype, known.whole) != (storage.dtype, storage.whole):
            raise UnsupportedTorchFileError(f"storage {storage.key[:80]!r} has two types or sizes")
        self.push(storage)


def _pairs(items: list[Any]) -> dict[Any, Any]:
    """Alternating keys and values. Keys are text or numbers of 32 bits: others could be costly to hash."""
    if len(items) % 2:
        raise UnsupportedTorchFileError("the pickle is damaged: a dictionary has a key without a value")
    keys = items[::2]
    for key in keys:
        if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < 1 << 31):
            raise UnsupportedTorchFileError(f"the pickle has a dictionary with {describe(key)} as a key")
    return dict(zip(keys, items[1::2], strict=True))


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "BINSTRING",
    "SHORT_BINSTRING",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
}
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, version: None,
    "FRAME": lambda machine, size: None,
    "STOP": lambda machine, _: None,
    "MARK": _Machine.mark,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "LIST": lambda machine, _: machine.push(machine.pop_mark()),
    "DICT": lambda machine, _: machine.push(_pairs(machine.pop_mark())),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_mark())),
    "TUPLE1": lambda machine, _: machine.fixed_tuple(1),
    "TUPLE2": lambda machine, _: machine.fixed_tuple(2),
    "TUPLE3": lambda machine, _: machine.fixed_tuple(3),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_mark()),
    "GLOBAL": _Machine.global_name,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.new_object,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}
