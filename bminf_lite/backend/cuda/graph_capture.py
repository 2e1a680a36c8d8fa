"""Work that is recorded as a graph, because launching its kernels one by one takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...cuda.runtime.graphs import CudaGraph
from ...memory.arena import Scratch

if TYPE_CHECKING:
    from .backend import CudaBackend


class CapturedGraph:
    """Work that is done twice as it is, then recorded as a graph, then replayed.

    The first time settles what is decided once, such as which kernel is fastest, with memory that is not needed again.
    The second time shows which memory the work needs: a graph's scratch serves just the calls that were measured.
    """

    def __init__(self, backend: CudaBackend, work: Callable[[], Any]):
        self.backend = backend
        self.work = work
        self.warmed_up = False
        self.scratch_bytes: int | None = None
        self.graph: CudaGraph[Any] | None = None

    def __call__(self) -> Any:
        backend = self.backend
        if not self.warmed_up:
            self.warmed_up = True
            return self.work()
        if self.scratch_bytes is None:
            with backend.arena.measure() as meter:
                result = self.work()
            self.scratch_bytes = meter.peak
            return result
        if self.graph is None:
            self.graph = self._capture(backend.arena.scratch(self.scratch_bytes))
        self.graph.replay(backend.stream.ptr)
        return self.graph.result

    def _capture(self, scratch: Scratch) -> CudaGraph[Any]:
        with self.backend.arrays.within(scratch):
            return CudaGraph(self.work, self.backend.stream.ptr, scratch)
