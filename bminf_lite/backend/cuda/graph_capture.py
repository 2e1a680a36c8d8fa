"""Work that is captured as a CUDA graph, because launching its kernels one by one takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...cuda.runtime.graphs import CudaGraph
from ...errors import OutOfMemory
from ...memory.arena import Arena, Block, Scratch
from .arrays import Arrays


class GraphMemory:
    """Memory that all graphs of a device share, because they run one after another."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self._block: Block | None = None
        self._most = 0

    def expect(self, nbytes: int) -> None:
        """Note that a graph will need ``nbytes``."""
        self._most = max(self._most, nbytes)

    def scratch(self, nbytes: int) -> Scratch:
        """An arena in the shared memory. If there is too little, more is allocated; older graphs keep theirs.

        It is as large as any graph that is expected needs, if there is room. Raises ``OutOfMemory``.
        """
        if self._block is None or self._block.nbytes < nbytes:
            try:
                self._block = self.arena.allocate(max(nbytes, self._most))
            except OutOfMemory:
                if nbytes >= self._most:
                    raise
                self._block = self.arena.allocate(nbytes)
        return Scratch(self._block)


class CapturedGraph:
    """Work that runs directly in the first two calls, is captured in the third, and is replayed from then on.

    The first call makes decisions that are made once, such as the fastest kernel, whose memory is not needed again. The
    second call measures the memory of the work, which is the size of the graph's scratch. A result is valid until
    another graph is replayed.

    Work in which ``streamed_bytes()`` grows is never captured: a graph cannot copy the weights of the next run, and
    copies bound the time of such work. Neither is work for whose graph there is no memory. ``agree`` says whether all
    ranks of a model have it: they capture the same work, or none does.
    """

    def __init__(
        self,
        memory: GraphMemory,
        arrays: Arrays,
        work: Callable[[], Any],
        streamed_bytes: Callable[[], int],
        agree: Callable[[bool], bool] = lambda own: own,
    ):
        self.memory = memory
        self.arrays = arrays
        self.work = work
        self.streamed_bytes = streamed_bytes
        self.agree = agree
        self.is_never_captured = False
        self.warmed_up = False
        self.scratch_bytes: int | None = None
        self.graph: CudaGraph[Any] | None = None

    def __call__(self) -> Any:
        if not self.warmed_up or self.is_never_captured:
            self.warmed_up = True
            return self.work()
        if self.scratch_bytes is None:
            streamed_before = self.streamed_bytes()
            with self.memory.arena.measure() as meter:
                result = self.work()
            self.scratch_bytes = meter.peak
            self.is_never_captured = self.streamed_bytes() > streamed_before
            if not self.is_never_captured:
                self.memory.expect(meter.peak)
            return result
        if self.graph is None:
            scratch = self._scratch(self.scratch_bytes)
            if not self.agree(scratch is not None) or scratch is None:
                self.is_never_captured = True
                return self.work()
            self.graph = self._capture(scratch)
        self.graph.replay(self.arrays.stream.ptr)
        return self.graph.result

    def _scratch(self, nbytes: int) -> Scratch | None:
        try:
            return self.memory.scratch(nbytes)
        except OutOfMemory:
            return None

    def _capture(self, scratch: Scratch) -> CudaGraph[Any]:
        with self.arrays.within(scratch):
            return CudaGraph(self.work, self.arrays.stream.ptr, _Kept(scratch))


class _Kept:
    """Shared memory, which outlives a graph."""

    def __init__(self, scratch: Scratch):
        self.scratch = scratch

    def free(self) -> None:
        """Nothing: other graphs use the memory."""
