"""C functions through ctypes: each is declared once with its types, and its status is checked in one place.

Every library used here returns a status from every function, 0 for success. ``bind`` turns a table of declarations into
callables that raise on any other status, so a call site needs no check.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ...errors import DeviceError


class LibraryError(DeviceError):
    """A function of a CUDA library failed: ``function`` is its name, ``status`` its return value."""

    def __init__(self, function: str, status: int, reason: str) -> None:
        super().__init__(f"{function} failed: {reason} (status {status})")
        self.function = function
        self.status = status


def bind(
    library: ctypes.CDLL,
    prototypes: Mapping[str, Sequence[type]],
    describe: Callable[[int], str],
    unchecked: Collection[str] = (),
) -> SimpleNamespace:
    """The functions of ``library`` that ``prototypes`` names, each with its argument types.

    A call that fails raises :class:`LibraryError` with the text of ``describe(status)``; those of ``unchecked`` return
    the status, which takes the host less time. ``bind`` raises
    ``DeviceError`` with the names of the functions that a library lacks because it is too old.
    """
    missing = [name for name in prototypes if not hasattr(library, name)]
    if missing:
        raise DeviceError(f"{library._name} is too old: it lacks {', '.join(missing)}")
    functions = SimpleNamespace()
    for name, argtypes in prototypes.items():
        function = getattr(library, name)
        function.argtypes = argtypes
        function.restype = ctypes.c_int
        if name not in unchecked:
            function.errcheck = _checker(name, describe)
        setattr(functions, name, function)
    return functions


def _checker(name: str, describe: Callable[[int], str]) -> Callable[[int, Any, Any], int]:
    def check(status: int, _function: Any, _arguments: Any) -> int:
        if status:
            raise LibraryError(name, status, describe(status))
        return status

    return check
