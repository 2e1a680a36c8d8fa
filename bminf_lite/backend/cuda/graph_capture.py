"""Work that is captured as a CUDA graph, because launching its kernels one by one takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...cuda.runtime.graphs import CudaGraph
from ...memory.arena import Arena, Block, Scratch
from .arrays import Arrays


class GraphMemory:
    """Memory that all graphs of a device share, because they run one after another."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self._block: Block | None = None

    def scratch(self, nbytes: int) -> Scratch:
        """An arena in the shared memory. More memory is allocated if there is too little; older graphs keep theirs."""
        if self._block is None or self._block.nbytes < nbytes:
            self._block = self.arena.allocate(nbytes)
        return Scratch(self._block)


class CapturedGraph:
    """Work that runs directly in the first two calls, is captured in the third, and is replayed from then on.

    The first call makes decisions that are made once, such as the fastest kernel, whose memory is not needed again. The
    second call measures the memory of the work, which is the size of the graph's scratch. A result is valid until
    another graph is replayed.

    Work in which ``streamed_bytes()`` grows is never captured: a graph cannot copy the weights of the next run, and
    copies bound the time of such work.
    """

    def __init__(self, memory: GraphMemory, arrays: Arrays, work: Callable[[], Any], streamed_bytes: Callable[[], int]):
        self.memory = memory
        self.arrays = arrays
        self.work = work
        self.streamed_bytes = streamed_bytes
        self.streams = False
        self.warmed_up = False
        self.scratch_bytes: int | None = None
        self.graph: CudaGraph[Any] | None = None

    def __call__(self) -> Any:
        if not self.warmed_up or self.streams:
            self.warmed_up = True
            return self.work()
        if self.scratch_bytes is None:
            streamed_before = self.streamed_bytes()
            with self.memory.arena.measure() as meter:
                result = self.work()
            self.scratch_bytes = meter.peak
            self.streams = self.streamed_bytes() > streamed_before
            return result
        if self.graph is None:
            self.graph = self._capture(self.memory.scratch(self.scratch_bytes))
        self.graph.replay(self.arrays.stream.ptr)
        return self.graph.result

    def _capture(self, scratch: Scratch) -> CudaGraph[Any]:
        with self.arrays.within(scratch):
            return CudaGraph(self.work, self.arrays.stream.ptr, _Kept(scratch))


class _Kept:
    """Shared memory, which outlives a graph."""

    def __init__(self, scratch: Scratch):
        self.scratch = scratch

    def free(self) -> None:
        """Nothing: other graphs use the memory."""
