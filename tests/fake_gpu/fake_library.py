"""C libraries whose functions are Python methods, called through ctypes as the real ones are."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

FAILED = 999


def _passed(argument: type) -> Any:
    """How a callback takes an argument: C strings as addresses, because they may be buffers, and handles as numbers."""
    if argument is ctypes.c_char_p or issubclass(argument, ctypes.c_void_p):
        return ctypes.c_void_p
    return argument


class FakeLibrary:
    """What ``ctypes.CDLL`` gives, for the methods of ``implementation`` that ``prototypes`` names.

    A method returns None or a status. An exception of its own is raised by whoever asks what the status means.
    """

    _name = "a fake library"

    def __init__(self, prototypes: Mapping[str, Sequence[type]], implementation: Any) -> None:
        self.failure: BaseException | None = None
        self._kept = []
        for name, arguments in prototypes.items():
            callback = ctypes.CFUNCTYPE(ctypes.c_int, *map(_passed, arguments))
            function = callback(self._guarded(getattr(implementation, name)))
            self._kept.append(function)
            # A second object for the same address, whose types the caller declares.
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(function, ctypes.c_void_p).value))

    def _guarded(self, method: Any) -> Any:
        def call(*arguments: Any) -> int:
            try:
                return method(*arguments) or 0
            except BaseException as error:
                self.failure = error
                return FAILED

        return call

    def raise_failure(self) -> None:
        """Raise what a method raised."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


def set_number(pointer: Any, value: int) -> None:
    """Store an integer or a handle where a pointer points."""
    pointer.contents.value = value
