"""The exceptions that a caller catches.

A message gives the wrong value, the bound and the remedy. The command line prints only the message (exit code 1, or 2
for :class:`UsageError`), with a traceback under ``--debug``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

MAX_LISTED = 40
MAX_NAMES = 12
"""Names that a message lists whole; of more it says the nearest."""
MAX_LINE = 5_000
"""Characters of a line of a message: more than a path may have. A value of a file may have millions."""


def listed(title: object, problems: Sequence[str]) -> str:
    """The ``problems`` under ``title``, usually a path: one problem on the same line, several on a line each.

    Of more than :data:`MAX_LISTED` problems those in the middle are left out. A checkpoint that does not fit its
    configuration has thousands, and would push the title off the screen.
    """
    if len(problems) == 1:
        return f"{title}: {problems[0]}"
    lines = [f"  - {problem}" for problem in problems]
    if len(lines) > MAX_LISTED:
        half = MAX_LISTED // 2
        lines[half:-half] = [f"  ... {len(lines) - 2 * half:,} more ..."]
    return "\n".join([f"{title}: {len(problems):,} problems", *lines])


def choices(name: object, known: Iterable[str], remedy: str = "") -> str:
    """What a message says of the ``known`` names, of which ``name`` is none.

    All of them, at most :data:`MAX_NAMES`; of more the nearest three, and ``remedy``, which says where to find the
    others. Without a remedy all of them follow the nearest.
    """
    known = list(known)
    if len(known) <= MAX_NAMES:
        return f"there {'is' if len(known) == 1 else 'are'} {', '.join(known)}"
    given = str(name)[:MAX_LINE].lower()
    by_lower = {other.lower(): other for other in known}
    begin = [other for lower, other in by_lower.items() if given and lower.startswith(given)]
    close = [by_lower[lower] for lower in get_close_matches(given, by_lower, n=3, cutoff=0.5)]
    nearest = list(dict.fromkeys([*close, *begin]))[:3]
    others = remedy or f"there are {', '.join(known)}"
    verb = "is" if len(nearest) == 1 else "are"
    return f"the nearest {verb} {', '.join(nearest)}; {others}" if nearest else others


def shortened(text: str) -> str:
    """``text`` without the middle of lines longer than :data:`MAX_LINE`."""
    if len(text) <= MAX_LINE:
        return text
    half = MAX_LINE // 2
    lines = text.split("\n")
    return "\n".join(
        line if len(line) <= MAX_LINE else f"{line[:half]} ... {len(line) - 2 * half:,} characters ... {line[-half:]}"
        for line in lines
    )


class BminfError(Exception):
    """The base class of this package's exceptions. Long lines of a message are :func:`shortened`."""

    def __init__(self, *args: object):
        super().__init__(*(shortened(arg) if isinstance(arg, str) else arg for arg in args))


class CheckpointError(BminfError):
    """A checkpoint, or a file of it, cannot be used. Lists all problems that were found."""


def checkpoint_error(title: object, problems: Sequence[str], remedy: str = "") -> CheckpointError:
    """An error that lists all ``problems`` under ``title``, usually a path, followed by the remedy."""
    text = listed(title, problems)
    if remedy:
        text += ("; " if len(problems) == 1 else "\n") + remedy
    return CheckpointError(text)


class UsageError(BminfError, ValueError):
    """An argument is out of range: a sampling parameter, a prompt, a recipe, a device name."""


def is_panic(error: BaseException | None) -> bool:
    """Whether an exception is a panic of Rust: a ``BaseException`` of a type that each library has for itself."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def library_errors(message: str, kind: type[BminfError] = CheckpointError) -> Iterator[None]:
    """Raise ``kind`` for what a library raises within the block, panics of Rust included: it got a faulty file."""
    try:
        yield
    except (BminfError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise kind(f"{message}: {error}") from error


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, of Python's or NumPy's types."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))  # the usual case first


def require_whole(name: str, value: Any, most: int | None = None, least: int = 1) -> None:
    """Raise ``UsageError`` unless an argument is a whole number from ``least`` to ``most``."""
    if not is_whole(value) or value < least or (most is not None and value > most):
        wanted = f"{least} or more" if most is None else f"{least} to {most:,}"
        raise UsageError(f"{name} is {value!r}, but must be a whole number, {wanted}")


def require_bool(name: str, value: object) -> None:
    """Raise ``UsageError`` unless an argument is True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}, but must be True or False")


def require_function(name: str, value: object) -> None:
    """Raise ``UsageError`` unless an optional argument is None or can be called."""
    if value is not None and not callable(value):
        raise UsageError(f"{name} is {value!r}, but must be a function, or None")


def require_positive(name: str, value: Any) -> None:
    """Raise ``UsageError`` unless an argument is a finite number above 0."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise UsageError(f"{name} is {value!r}, but must be a number more than 0, and finite")


class QueueFull(UsageError):
    """The queue is full: ``max_queue`` requests wait. The same request may be taken later."""


class DeviceError(BminfError, RuntimeError):
    """The requested device cannot be used: no driver, no GPU, a missing library, a kernel that does not compile."""


class NoDriverError(DeviceError):
    """The machine has no NVIDIA driver, so it has no usable GPU either."""


class OutOfMemory(DeviceError, MemoryError):
    """The memory limit is reached. Says how much was requested, how much is in use and how much is allowed."""
