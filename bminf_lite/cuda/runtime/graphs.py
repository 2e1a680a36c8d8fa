"""CUDA graphs: the GPU work of a Python function, captured once and replayed with one call.

A graph holds addresses, so all memory that the function reads and writes must stay in place. Inputs and outputs must
outlive the graph. The function must allocate from memory that belongs to the graph.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from . import driver
from .bindings import LibraryError
from .driver import CaptureMode

Result = TypeVar("Result")


class Memory(Protocol):
    """Memory that a graph's work allocates from, such as :class:`~bminf_lite.memory.arena.Scratch`."""

    def free(self) -> None: ...


class CudaGraph(Generic[Result]):
    """The GPU work of ``function()``. The constructor calls the function once; :meth:`replay` runs its work.

    ``stream``, which is not the default stream, receives all work of the function. The function allocates from
    ``memory``, which is freed with the graph. ``result`` is the function's return value. The function must have run
    once without capture, so that kernels are compiled and libraries are initialized, because synchronization and
    driver allocations fail during stream capture. If the function raises, the capture ends and the caller keeps
    ``memory``.
    """

    def __init__(self, function: Callable[[], Result], stream: int, memory: Memory | None = None) -> None:
        functions = driver.load()
        self.memory = memory
        executable = driver.GraphExec()
        with _garbage_collection_paused():
            graph = driver.Graph()
            functions.cuStreamBeginCapture_v2(stream, CaptureMode.THREAD_LOCAL)
            try:
                self.result = function()
            except BaseException:
                _abandon(stream)
                raise
            functions.cuStreamEndCapture(stream, graph)
        try:
            functions.cuGraphInstantiateWithFlags(executable, graph, 0)
        finally:
            functions.cuGraphDestroy(graph)
        self._executable = executable
        self._launch = functions.cuGraphLaunch
        self._finalizer = weakref.finalize(self, _destroy, executable, memory)

    def replay(self, stream: int) -> None:
        """Run the captured work on ``stream``."""
        self._launch(self._executable, stream)

    def close(self) -> None:
        """Destroy the graph and free its memory. The GPU must have finished with it; a second call does nothing."""
        self._finalizer()


class _Captures:
    """The captures under way in all threads, and whether garbage was collected before the first of them."""

    lock = threading.Lock()
    count = 0
    was_enabled = False


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Run no finalizers during a capture: one that frees GPU memory or destroys an event would invalidate it."""
    with _Captures.lock:
        if _Captures.count == 0:
            _Captures.was_enabled = gc.isenabled()
            gc.disable()
        _Captures.count += 1
    try:
        yield
    finally:
        with _Captures.lock:
            _Captures.count -= 1
            if _Captures.count == 0 and _Captures.was_enabled:
                gc.enable()


def _abandon(stream: int) -> None:
    graph = driver.Graph()
    try:
        driver.load().cuStreamEndCapture(stream, graph)
    except LibraryError:
        return  # the failed work has invalidated the capture, and this call has ended it
    if graph:
        driver.load().cuGraphDestroy(graph)


def _destroy(executable: driver.GraphExec, memory: Memory | None) -> None:
    driver.load().cuGraphExecDestroy(executable)
    if memory is not None:
        memory.free()
