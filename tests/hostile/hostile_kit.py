"""What every hostile input must respect: a bound on time and memory, no warning, and an error of this package."""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bminf_lite.errors import BminfError

SECONDS = 20.0
"""What an input may take. Most take milliseconds and the slowest 2 s, which is a bound of the package; ten times that
is for a machine on which other things run."""
MEBIBYTES = 400
"""How much an input may add to the most memory that the process has held."""


def _peak_mebibytes() -> float:
    """Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the block takes long or much memory, or warns of anything but what this package says itself."""
    start, memory = time.monotonic(), _peak_mebibytes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert time.monotonic() - start < SECONDS
    assert _peak_mebibytes() - memory < MEBIBYTES
    assert not [str(w.message) for w in caught if "not obeyed here" not in str(w.message)]


def error_of(action: Callable[[], Any]) -> str:
    """The message of this package's error that the action raises, which is all that it may raise; "" if it succeeds."""
    try:
        with bounded():
            action()
    except BminfError as error:
        return str(error)
    return ""
