"""C functions through ctypes: each declared once with its types, its status checked in one place.

Every library used here returns a status from every function, 0 for success. ``bind`` turns a table of declarations into
callables that raise on anything else, so a call site is one line and cannot forget the check.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ...errors import DeviceError


class LibraryError(DeviceError):
    """A CUDA library's function failed: ``function`` is its name, ``status`` what it returned."""

    def __init__(self, function: str, status: int, reason: str) -> None:
        super().__init__(f"{function} failed: {reason} (status {status})")
        self.function = function
        self.status = status


def bind(
    library: ctypes.CDLL, prototypes: Mapping[str, Sequence[type]], describe: Callable[[int], str]
) -> SimpleNamespace:
    """The functions of ``library`` that ``prototypes`` names, each with its argument types.

    A call raises :class:`LibraryError`, with ``describe(status)`` in the library's own words, unless it succeeds.
    Raises ``DeviceError`` that lists every function which the library lacks, because it is too old.
    """
    missing = [name for name in prototypes if not hasattr(library, name)]
    if missing:
        raise DeviceError(f"{library._name} is too old: it lacks {', '.join(missing)}")
    functions = SimpleNamespace()
    for name, argtypes in prototypes.items():
        function = getattr(library, name)
        function.argtypes = argtypes
        function.restype = ctypes.c_int
        function.errcheck = _checker(name, describe)
        setattr(functions, name, function)
    return functions


def _checker(name: str, describe: Callable[[int], str]) -> Callable[[int, Any, Any], int]:
    def check(status: int, _function: Any, _arguments: Any) -> int:
        if status:
            raise LibraryError(name, status, describe(status))
        return status

    return check
