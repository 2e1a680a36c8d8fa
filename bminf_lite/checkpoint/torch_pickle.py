"""What the pickle in a PyTorch file says, without running it.

A pickle is a program: Python's own unpickler imports the names in it and calls what it finds there. Here the program
drives a small stack machine that imports nothing and calls nothing of Python's. It knows the operations that build
lists, dictionaries, tuples, numbers and text, and a fixed table of names with a meaning of our own: ordered
dictionaries, the functions that rebuild tensors and parameters, storages and types. Every other name, and every other
operation (those of the text protocol too, which PyTorch never wrote) is refused. The standard library's ``pickletools``
splits the bytes into operations; it runs none of them.

The cost is bounded as well: operations are counted, each makes one value from what lies on the stack, a value is never
walked through or hashed unless it is text or a small number, and the memo is a dictionary. So nesting, sharing and
repetition cost what their bytes cost.
"""

from __future__ import annotations

import fnmatch
import io
import pickletools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .torch_values import NAMES, Function, Ignored, Storage, UnsupportedPickleError, describe, parse_storage

MAX_PICKLE_BYTES = 1 << 24
MAX_OPERATIONS = 2_000_000
"""Bounds on a pickle. About thirty operations and 150 bytes describe a tensor, so this is room for 60,000 of them."""

MAX_NAME = 200
"""Characters of a module's name and a name in it."""


@dataclass(frozen=True)
class Pickled:
    """What a pickle describes, and the storages that it refers to, by key."""

    value: Any
    storages: Mapping[str, Storage]


def load(stream: io.BytesIO, ignored: Sequence[str] = ()) -> Pickled:
    """Read the pickle at the stream's position, which moves to the pickle's end.

    Dictionaries, lists, tuples, text and numbers are Python's; tensors are :class:`StridedTensor`. Names that match a
    pattern of ``ignored`` (``numpy.*``) become :class:`Ignored` instead of an error.
    Raises :class:`UnsupportedPickleError`.
    """
    machine = _Machine(ignored)
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(stream)):
            if count >= MAX_OPERATIONS:
                raise UnsupportedPickleError(f"the pickle has more than {MAX_OPERATIONS:,} operations")
            machine.step(operation.name, argument)
    except UnsupportedPickleError:
        raise
    except (ValueError, OverflowError, Warning) as error:  # of pickletools: a truncated argument, an unknown operation
        raise UnsupportedPickleError(f"the pickle is damaged: {str(error)[:200]}") from error
    return Pickled(machine.result(), machine.storages)


class _Machine:
    """The stack, the memo, and what the operations do to them."""

    def __init__(self, ignored: Sequence[str]):
        self.ignored = ignored
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each mark
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.push(argument)
        elif name in _CONSTANTS:
            self.push(_CONSTANTS[name])
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, argument)
        else:
            raise UnsupportedPickleError(f"the pickle uses the operation {name}, which no tensor needs")

    def result(self) -> Any:
        if len(self.stack) != 1 or self.below:
            raise UnsupportedPickleError("the pickle is damaged: it ends in the middle of a value")
        return self.stack[0]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack:
            raise UnsupportedPickleError("the pickle is damaged: it takes a value from an empty stack")
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack:
            raise UnsupportedPickleError("the pickle is damaged: it takes a value from an empty stack")
        return self.stack[-1]

    # -- marks and memo -------------------------------------------------------------------------------------------

    def mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        if not self.below:
            raise UnsupportedPickleError("the pickle is damaged: it goes back to a mark that is not there")
        items, self.stack = self.stack, self.below.pop()
        return items

    def put(self, index: int) -> None:
        if not 0 <= index < MAX_OPERATIONS:
            raise UnsupportedPickleError("the pickle's memo has an index out of range")
        self.memo[index] = self.top()

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.top()

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise UnsupportedPickleError("the pickle is damaged: it takes a value from the memo that is not there")
        self.push(self.memo[index])

    # -- containers -----------------------------------------------------------------------------------------------

    def fixed_tuple(self, size: int) -> None:
        self.push(tuple(self.pop() for _ in range(size))[::-1])

    def append(self, items: list[Any]) -> None:
        target = self.top()
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Ignored):
            raise UnsupportedPickleError(f"the pickle appends to {describe(target)}")

    def set_items(self, items: list[Any]) -> None:
        target = self.top()
        if isinstance(target, dict):
            target.update(_pairs(items))
        elif not isinstance(target, Ignored):
            raise UnsupportedPickleError(f"the pickle sets items of {describe(target)}")

    # -- names, and what they make --------------------------------------------------------------------------------

    def find(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnsupportedPickleError("the pickle names something by a value that is not text")
        if len(module) + len(name) > MAX_NAME:
            raise UnsupportedPickleError(f"the pickle asks for a name of more than {MAX_NAME} characters")
        full = f"{module}.{name}"
        known = NAMES.get(full)
        if known is None and any(fnmatch.fnmatchcase(full, pattern) for pattern in self.ignored):
            known = Ignored(full)
        if known is None:
            raise UnsupportedPickleError(f"the pickle asks for {full!r}, which no tensor needs; nothing of it was run")
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
        if not isinstance(function, Function) or not isinstance(arguments, tuple):
            raise UnsupportedPickleError(f"the pickle calls {describe(function)}")
        if not function.min_args <= len(arguments) <= function.max_args:
            raise UnsupportedPickleError(f"the pickle calls {function.name} with {len(arguments)} arguments")
        self.push(function.call(*arguments))

    def new_object(self, _: Any) -> None:
        _arguments, kind = self.pop(), self.pop()
        if not isinstance(kind, Ignored):
            raise UnsupportedPickleError(f"the pickle makes an object of {describe(kind)}")
        self.push(kind)

    def build(self, _: Any) -> None:
        """State beside a dictionary's items (the versions of a model's modules) is dropped."""
        state, target = self.pop(), self.top()
        if isinstance(target, dict) and not isinstance(state, dict):
            raise UnsupportedPickleError(f"the pickle gives a dictionary {describe(state)} as its state")
        if not isinstance(target, (dict, Ignored)):
            raise UnsupportedPickleError(f"the pickle gives {describe(target)} a state")

    def persistent(self, _: Any) -> None:
        storage = parse_storage(self.pop())
        known = self.storages.setdefault(storage.key, storage)
        if (known.dtype, known.whole) != (storage.dtype, storage.whole):
            raise UnsupportedPickleError(f"storage {storage.key[:80]!r} has two types or sizes")
        self.push(storage)


def _pairs(items: list[Any]) -> dict[Any, Any]:
    """Keys and values in turn. Keys are text or numbers of 32 bits: others could be costly to hash."""
    if len(items) % 2:
        raise UnsupportedPickleError("the pickle is damaged: a dictionary has a key without a value")
    keys = items[::2]
    for key in keys:
        if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < 1 << 31):
            raise UnsupportedPickleError(f"the pickle has a dictionary with {describe(key)} as a key")
    return dict(zip(keys, items[1::2], strict=True))


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINSTRING", "SHORT_BINSTRING",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, version: None,
    "FRAME": lambda machine, size: None,
    "STOP": lambda machine, _: None,
    "MARK": _Machine.mark,
    "BINPUT": _Machine.put, "LONG_BINPUT": _Machine.put, "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.get, "LONG_BINGET": _Machine.get,
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
    "GLOBAL": _Machine.global_name, "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.reduce, "NEWOBJ": _Machine.new_object, "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}  # fmt: skip
