"""Work that is captured as a CUDA graph, because launching its kernels one by one takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...cuda.runtime.graphs import CudaGraph
from ...memory.arena import Arena, Scratch
from .arrays import Arrays


class CapturedGraph:
    """Work that runs directly in the first two calls, is captured in the third, and is replayed from then on.

    The first call makes decisions that are made once, such as the fastest kernel, whose memory is not needed again. The
    second call measures the memory of the work, which is the size of the graph's scratch.
    """

    def __init__(self, arena: Arena, arrays: Arrays, work: Callable[[], Any]):
        self.arena = arena
        self.arrays = arrays
        self.work = work
        self.warmed_up = False
        self.scratch_bytes: int | None = None
        self.graph: CudaGraph[Any] | None = None

    def __call__(self) -> Any:
        if not self.warmed_up:
            self.warmed_up = True
            return self.work()
        if self.scratch_bytes is None:
            with self.arena.measure() as meter:
                result = self.work()
            self.scratch_bytes = meter.peak
            return result
        if self.graph is None:
            self.graph = self._capture(self.arena.scratch(self.scratch_bytes))
        self.graph.replay(self.arrays.stream.ptr)
        return self.graph.result

    def _capture(self, scratch: Scratch) -> CudaGraph[Any]:
        with self.arrays.within(scratch):
            return CudaGraph(self.work, self.arrays.stream.ptr, scratch)
