"""The instantiations of kernels that launchers may need, enumerable without a GPU and without CuPy.

Every launcher has ``instantiations(capability)``, which yields a :class:`KernelFamily` for each kernel that it launches
on GPUs of that compute capability.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

Capability = tuple[int, int]
BOOLEANS = ("false", "true")
"""As template arguments, in CUDA C++."""


def numbers(values: Iterable[int]) -> tuple[int, ...]:
    """The values of an enumeration, or of some of its members, as template arguments."""
    return tuple(map(int, values))


class Together(tuple[object, ...]):
    """Consecutive template arguments whose values belong together."""

    def __str__(self) -> str:
        return ", ".join(map(str, self))


def anything(*arguments: object) -> bool:
    """Every combination of template arguments is possible."""
    return True


@dataclass(frozen=True)
class KernelFamily:
    """The instantiations of one kernel of ``source`` with the macros ``defines``.

    ``values`` are the values of each template argument; ``possible`` says which combinations are launched.
    """

    source: str
    name: str
    values: tuple[tuple[object, ...], ...] = ()
    possible: Callable[..., bool] = anything
    defines: tuple[str, ...] = ()

    def all(self) -> Iterator[tuple[object, ...]]:
        """The template arguments of every instantiation."""
        return (arguments for arguments in itertools.product(*self.values) if self.possible(*arguments))

    def expression(self, arguments: tuple[object, ...]) -> str:
        """The instantiation's name expression, such as ``k<1, true>``."""
        return f"{self.name}<{', '.join(map(str, arguments))}>" if arguments else self.name
