"""Which instantiations of a kernel its launcher may need, enumerable without a GPU and without CuPy.

Every launcher has ``instantiations(capability)``, which yields a :class:`KernelFamily` for each kernel that it launches
on GPUs of that compute capability.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Capability = tuple[int, int]
BOOLEANS = ("false", "true")
"""As CUDA C++ names them."""


class Together(tuple[object, ...]):
    """Template arguments that follow each other and whose values belong together."""

    def __str__(self) -> str:
        return ", ".join(map(str, self))


def anything(*arguments: object) -> bool:
    """Every combination of template arguments is possible."""
    return True


@dataclass(frozen=True)
class KernelFamily:
    """The instantiations of one kernel of ``source`` with the macros ``defines``.

    ``values`` are those of each template argument; a combination of them is launched if ``possible``.
    """

    source: str
    name: str
    values: tuple[Sequence[object], ...] = ()
    possible: Callable[..., bool] = anything
    defines: tuple[str, ...] = ()

    def all(self) -> Iterator[tuple[object, ...]]:
        """The template arguments of every instantiation."""
        return (arguments for arguments in itertools.product(*self.values) if self.possible(*arguments))

    def expression(self, arguments: tuple[object, ...]) -> str:
        """As CUDA C++ names the instantiation."""
        return instantiation(self.name, *arguments) if arguments else self.name


def instantiation(name: str, *arguments: object) -> str:
    """``instantiation("k", 1, "true")`` -> ``"k<1, true>"``."""
    return f"{name}<{', '.join(map(str, arguments))}>"
