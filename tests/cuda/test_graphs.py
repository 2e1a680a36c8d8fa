"""Recording and replaying on a GPU; how a failure inside is cleaned up needs none."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bminf_lite.cuda.runtime import driver
from bminf_lite.cuda.runtime.bindings import LibraryError
from bminf_lite.cuda.runtime.compiler import Sources
from bminf_lite.cuda.runtime.graphs import CudaGraph
from bminf_lite.cuda.runtime.kernel import Module
from bminf_lite.memory.arena import Arena, Block
from bminf_lite.memory.device import device_arena

STEP = """
__global__ void step(float* y, const float* x, int n) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i] + 1.0f;
}
"""


class RecordingDriver:
    """Counts what is made and destroyed; ``fail`` names the function that fails."""

    def __init__(self, fail: str = "") -> None:
        self.fail = fail
        self.alive: set[str] = set()
        self.launched: list[int] = []
        self.collects_while_capturing = False

    def _step(self, name: str) -> None:
        if name == self.fail:
            raise LibraryError(name, 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, operation not permitted")

    def cuStreamBeginCapture_v2(self, stream, mode) -> None:
        self._step("begin")
        self.alive.add("capture")

    def cuStreamEndCapture(self, stream, graph) -> None:
        self.collects_while_capturing |= gc.isenabled()
        self.alive.remove("capture")
        self._step("end")
        graph.value = 5
        self.alive.add("graph")

    def cuGraphInstantiateWithFlags(self, executable, graph, flags) -> None:
        self._step("instantiate")
        executable.value = 6
        self.alive.add("executable")

    def cuGraphDestroy(self, graph) -> None:
        self.alive.remove("graph")

    def cuGraphExecDestroy(self, executable) -> None:
        self.alive.remove("executable")

    def cuGraphLaunch(self, executable, stream) -> None:
        self.launched.append(stream)


def install(monkeypatch: pytest.MonkeyPatch, fail: str = "") -> RecordingDriver:
    recorder = RecordingDriver(fail)
    monkeypatch.setattr(driver, "load", lambda: recorder)
    return recorder


def test_the_function_runs_once_and_its_result_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = install(monkeypatch)
    freed: list[int] = []
    memory = SimpleNamespace(free=lambda: freed.append(1))
    graph = CudaGraph(lambda: "result", 3, memory)
    assert graph.result == "result"
    graph.replay(3)
    graph.replay(4)
    assert recorder.launched == [3, 4]
    assert recorder.alive == {"executable"} and not freed
    graph.close()
    graph.close()
    assert not recorder.alive and freed == [1]


def test_garbage_collection_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = install(monkeypatch)
    CudaGraph(lambda: None, 3)
    gc.collect()
    assert not recorder.alive


@pytest.mark.parametrize("fail", ["", "begin", "end", "instantiate"])
def test_a_failure_leaves_nothing_behind(fail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = install(monkeypatch, fail)

    def function() -> None:
        if not fail:
            raise KeyboardInterrupt

    with pytest.raises(LibraryError if fail else KeyboardInterrupt):
        CudaGraph(function, 3)
    assert not recorder.alive


def test_the_functions_own_error_is_the_one_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = install(monkeypatch, "end")

    def function() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        CudaGraph(function, 3)
    assert not recorder.alive


def test_no_finalizer_runs_while_work_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing GPU memory in a finalizer would invalidate the capture."""
    recorder = install(monkeypatch)
    assert CudaGraph(gc.isenabled, 3).result is False and gc.isenabled()

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        CudaGraph(fails, 3)
    assert gc.isenabled() and not recorder.collects_while_capturing


@pytest.mark.gpu
def test_replaying_does_the_work_again(cuda_device: driver.Device) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(1000, np.float32)
    calls = []

    def function() -> cupy.ndarray:
        calls.append(1)
        with stream:
            cupy.add(x, np.float32(1), out=x)
            cupy.multiply(x, np.float32(2), out=x)
        return x

    function()
    stream.synchronize()
    assert x[0] == 2
    graph = CudaGraph(function, stream.ptr)
    stream.synchronize()
    assert len(calls) == 2 and x[0] == 2, "recording runs nothing on the GPU"
    for _ in range(3):
        graph.replay(stream.ptr)
    stream.synchronize()
    assert len(calls) == 2 and (graph.result == 30).all()
    graph.close()


@pytest.mark.gpu
def test_the_stream_survives_a_failure_inside(cuda_device: driver.Device) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(10, np.float32)

    def wait_inside() -> None:
        with stream:
            cupy.add(x, np.float32(1), out=x)
        stream.synchronize()

    wait_inside()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        CudaGraph(wait_inside, stream.ptr)
    wait_inside()
    assert x[0] == 2


@pytest.mark.gpu
def test_a_graph_owns_its_scratch_and_keeps_dependent_launches_in_order(
    cuda_device: driver.Device, tmp_path: Path
) -> None:
    import cupy

    (tmp_path / "step.cu").write_text(STEP)
    step = Module(cuda_device, Sources(tmp_path), "step.cu", ["step"]).kernel("step")
    arena = device_arena(cuda_device, "64MiB")
    stream, n, steps = cupy.cuda.Stream(non_blocking=True), 50_000, 12
    start = arena.allocate(4 * n)

    def function(memory: Arena) -> Block:
        x = start
        for _ in range(steps):
            y = memory.allocate(4 * n)
            step(1, 256, (y.address, x.address, n), stream=stream.ptr, dependent=True)
            x = y
        return x

    def values(block: Block) -> cupy.ndarray:
        stream.synchronize()
        memory = cupy.cuda.UnownedMemory(block.address, block.nbytes, block)
        return cupy.ndarray(n, np.float32, cupy.cuda.MemoryPointer(memory, 0))

    values(start).fill(1)
    cupy.cuda.get_current_stream().synchronize()
    with arena.measure() as meter:
        result = function(arena)
    assert (values(result) == 1 + steps).all()
    result.free()
    scratch = arena.scratch(meter.peak)
    used = arena.used
    graph = CudaGraph(lambda: function(scratch), stream.ptr, scratch)
    for begin in (5, 100):
        values(start).fill(begin)
        cupy.cuda.get_current_stream().synchronize()
        graph.replay(stream.ptr)
        assert (values(graph.result) == begin + steps).all()
    assert arena.used == used, "replaying allocates nothing"
    graph.close()
    assert used - arena.used == scratch.limit
