"""Gives a product on the CPU as many threads of BLAS as it can use.

BLAS cuts a product into equal parts, one per thread, and waits for the last in a busy loop. On a machine that runs
other work too, a part waits for a time slice of the operating system, which is longer than a small product takes on one
core. So a product gets one thread for each time slice of its work.

The number of threads is a setting of the process. It is changed while products run, and restored after the last of
them. Where several threads of Python compute at once, the largest of their numbers holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

TIME_SLICE = 0.01
"""Seconds: a few times the shortest time for which Linux lets another process run."""
OPERATIONS_PER_SECOND, BYTES_PER_SECOND = 5e10, 1e10
"""Rates of one core in fp32; only the order of magnitude matters."""

_SYMBOLS = (
    *(
        (f"{name}_set_num_threads{suffix}", f"{name}_get_num_threads{suffix}")
        for name in ("openblas", "scipy_openblas")
        for suffix in ("", "64_", "_64_", "_64")
    ),
    ("MKL_Set_Num_Threads", "MKL_Get_Max_Threads"),
)
"""The functions that set and get the number of threads, in OpenBLAS as NumPy builds it, and in MKL."""


class BlasLibrary(Protocol):
    """A BLAS library's number of threads."""

    def get(self) -> int: ...
    def set(self, count: int, /) -> Any: ...


class _Functions:
    """The functions of a loaded library. ``threadpoolctl`` finds the library; its own setter serves one thread only."""

    def __init__(self, set_: Callable[[int], Any], get: Callable[[], int]):
        self.set, self.get = set_, get


class BlasThreads:
    """The numbers of threads of some BLAS libraries, by default those that this process has loaded."""

    def __init__(self, libraries: list[BlasLibrary] | None = None):
        self._libraries = libraries
        self._lock = threading.Lock()
        self._wanted: list[int] = []
        self._before: list[int] = []
        self._at_once = 0

    @contextmanager
    def for_product(self, rows: int, inner: int, columns: int) -> Iterator[None]:
        """Limit the threads for products ``[rows, inner] x [inner, columns]`` in fp32."""
        count = threads_for(rows, inner, columns)
        self._enter(count)
        try:
            yield
        finally:
            self._exit(count)

    @contextmanager
    def one_each(self) -> Iterator[None]:
        """One thread for every product, while threads of Python compute at once in place of those of BLAS."""
        self._enter(1, at_once=1)
        try:
            yield
        finally:
            self._exit(1, at_once=1)

    def _enter(self, count: int, at_once: int = 0) -> None:
        with self._lock:
            if self._libraries is None:
                self._libraries = _find_libraries()
            if not self._wanted:
                self._before = [library.get() for library in self._libraries]
            self._wanted.append(count)
            self._at_once += at_once
            self._apply()

    def _exit(self, count: int, at_once: int = 0) -> None:
        with self._lock:
            self._wanted.remove(count)
            self._at_once -= at_once
            self._apply()

    def _apply(self) -> None:
        for library, before in zip(self._libraries or (), self._before, strict=True):
            count = 1 if self._at_once else min(before, max(self._wanted, default=before))
            if library.get() != count:
                library.set(count)


def threads_for(rows: int, inner: int, columns: int) -> int:
    """One thread for each time slice that a product in fp32 takes on one core, at least one."""
    operations = 2 * rows * inner * columns
    nbytes = 4 * (rows * inner + inner * columns + rows * columns)
    seconds = max(operations / OPERATIONS_PER_SECOND, nbytes / BYTES_PER_SECOND)
    return max(1, int(seconds / TIME_SLICE))


def _find_libraries() -> list[BlasLibrary]:
    from threadpoolctl import ThreadpoolController

    found: list[BlasLibrary] = []
    for controller in ThreadpoolController().select(user_api="blas").lib_controllers:
        functions = ((getattr(controller.dynlib, s, None), getattr(controller.dynlib, g, None)) for s, g in _SYMBOLS)
        found += [_Functions(setter, getter) for setter, getter in functions if setter and getter][:1]
    return found


blas_threads = BlasThreads()
"""The numbers of threads of this process's BLAS libraries."""
