"""A Python function's GPU work, recorded once and replayed with one call.

A graph holds addresses, so all memory that the function reads and writes must stay where it was. Its inputs and outputs
live in memory that outlasts the graph. What it allocates must come from memory that belongs to the graph.
"""

from __future__ import annotations

import gc
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
    """The GPU work of ``function()``, which is called once, now, and does not run on the GPU until :meth:`replay`.

    ``stream`` is the stream, not the default one, on which the function puts all its work. ``memory`` is what the
    function allocates from; it is freed with the graph. ``result`` is what the function returned. Run the function once
    before, outside a graph, so that kernels are compiled, libraries are initialized and the need for memory is known:
    anything that waits for the GPU or asks the driver for memory fails inside. If it raises, the stream is left as
    it was before, and the memory stays the caller's.
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
        """Run the recorded work on ``stream``, after what is there already."""
        self._launch(self._executable, stream)

    def close(self) -> None:
        """Destroy the graph and free its memory, once the GPU has finished with it; twice is harmless."""
        self._finalizer()


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Keep the collector from running finalizers meanwhile: one that frees GPU memory or destroys an event ends the
    capture of its thread with an error.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _abandon(stream: int) -> None:
    graph = driver.Graph()
    try:
        driver.load().cuStreamEndCapture(stream, graph)
    except LibraryError:
        return  # the failure invalidated the capture, which has ended nevertheless
    if graph:
        driver.load().cuGraphDestroy(graph)


def _destroy(executable: driver.GraphExec, memory: Memory | None) -> None:
    driver.load().cuGraphExecDestroy(executable)
    if memory is not None:
        memory.free()
