"""Work of the CPU backend that is divided among threads of Python.

NumPy lets other threads run while it computes, and many of its operations use one core whatever their size. So runs of
a model that do not depend on each other take the cores one run each. A GPU's launches have one order, so there the
same work is done by one thread.
"""

from __future__ import annotations

import contextvars
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

from .blas_threads import blas_threads

S = TypeVar("S")
T = TypeVar("T")

MAX_THREADS = 4
"""Each holds a layer of the model."""
MAX_WAITING = 2
"""Pieces of work that wait for another one."""


class Computes(Protocol):
    """A backend, as far as it matters here."""

    @property
    def computes_in_threads(self) -> bool: ...


def thread_count(ops: Computes) -> int:
    """How many threads may compute on ``ops`` at once."""
    if not ops.computes_in_threads:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS)


def map_in_threads(ops: Computes, function: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """``[function(item) for item in items]``, several at once where ``ops`` allows it. Raises the first error."""
    items = list(items)
    count = min(thread_count(ops), len(items))
    if count <= 1:
        return [function(item) for item in items]
    contexts = [contextvars.copy_context() for _ in items]  # NumPy's error handling is a part of it
    with blas_threads.one_each(), ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda context, item: context.run(function, item), contexts, items))


class Later:
    """Runs work in its order beside the thread that hands it over, where ``ops`` allows it; otherwise at once.

    At most :data:`MAX_WAITING` pieces wait, because each holds what it works on. An error ends all of it: it is raised
    where the next piece is handed over, or by :meth:`finish`.
    """

    def __init__(self, ops: Computes):
        self._pool = ThreadPoolExecutor(1) if thread_count(ops) > 1 else None
        self._waiting: deque[Future[None]] = deque()

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call ``work`` with ``arguments``, after everything that was handed over before."""
        if self._pool is None:
            work(*arguments)
            return
        self._waiting.append(self._pool.submit(contextvars.copy_context().run, _alone, work, *arguments))
        while self._waiting and (len(self._waiting) > MAX_WAITING or self._waiting[0].done()):
            self._wait()

    def finish(self) -> None:
        """Wait for all work."""
        while self._waiting:
            self._wait()

    def cancel(self) -> None:
        """Drop what waits, and wait for what runs, so that the data that it reads may be closed."""
        for future in self._waiting:
            future.cancel()
        wait(self._waiting)
        self._waiting.clear()

    def _wait(self) -> None:
        first = self._waiting[0]
        try:
            first.result()
        except BaseException:
            self.cancel()
            raise
        self._waiting.popleft()


def _alone(work: Callable[..., None], *arguments: Any) -> None:
    with blas_threads.one_each():
        work(*arguments)
