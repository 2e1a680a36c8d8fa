"""The GPU's half of streaming and staging on streams that run as late or as early as events allow."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from bminf_lite.backend.cuda import streamed_weights
from bminf_lite.backend.cuda.streamed_weights import PinnedBuffers, PinnedCopies, SlotLink
from bminf_lite.memory.staging import StagingBuffers, Uploader
from bminf_lite.memory.streaming import StreamedBlocks


class Stream:
    """Work that runs when something waits for it, or, if ``eager``, as soon as events allow."""

    by_address: ClassVar[dict[int, Stream]] = {}

    def __init__(self, eager: bool = False) -> None:
        self.eager = eager
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.ptr = id(self)
        self.lock = threading.RLock()
        self.by_address[self.ptr] = self

    def put(self, work: Callable[[], object]) -> None:
        with self.lock:
            self.queue.append(work)
            if self.eager:
                self.synchronize()

    def run_until(self, place: int) -> None:
        with self.lock:
            while self.done < place:
                self.done += 1
                self.queue.pop(0)()

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def synchronize(self) -> None:
        self.run_until(self.done + len(self.queue))


class Event:
    """The place of its last record in a stream."""

    def __init__(self, disable_timing: bool) -> None:
        self.synchronize: Callable[[], None] = lambda: None

    def record(self, stream: Stream) -> None:
        with stream.lock:
            place = stream.done + len(stream.queue)
        self.synchronize = lambda: stream.run_until(place)


@pytest.fixture(params=[False, True], ids=["late copies", "early copies"], autouse=True)
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's calls on these streams, over host memory."""

    def memcpy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        Stream.by_address[stream].put(lambda: ctypes.memmove(target, source, nbytes))

    cuda = SimpleNamespace(
        Device=lambda index: nullcontext(), Stream=lambda non_blocking: Stream(request.param), Event=Event
    )
    runtime = SimpleNamespace(
        memcpyAsync=memcpy,
        memcpyDeviceToHost=2,
        memcpyHostToDevice=1,
        CUDARuntimeError=MemoryError,
        hostRegister=lambda *_: None,
        hostUnregister=lambda *_: None,
    )
    monkeypatch.setattr(streamed_weights, "cp", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(streamed_weights, "runtime", runtime)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_layer_computes_with_its_own_weights(slots: int) -> None:
    compute, layers, streamed = Stream(), 7, (1, 2, 4, 5, 6)
    memory = [np.full(4096, 0xFF, np.uint8) for _ in range(slots)]
    blocks: Any = [SimpleNamespace(address=m.ctypes.data, nbytes=m.nbytes) for m in memory]
    link = SlotLink(0, compute, blocks)  # type: ignore[arg-type]
    for layer, index in enumerate(streamed):
        compute.put(lambda m=memory[layer % slots], i=index: m[:700].fill(i))
        link.keep(SimpleNamespace(peak_reserved=1024))  # type: ignore[arg-type]
    compute.synchronize()
    seen: list[tuple[int, set[int]]] = []
    for _ in range(3):
        for index in StreamedBlocks(range(layers), streamed, link, slots):
            if index in streamed:
                slot = memory[streamed.index(index) % slots]
                compute.put(lambda i=index, s=slot: seen.append((i, set(s[:700]))))
    compute.synchronize()
    assert seen == [(index, {index}) for index in streamed] * 3
    link.close()


def test_staged_bytes_arrive_in_order_with_other_work() -> None:
    """A buffer is filled again only after the copy from it, however late that runs."""
    stream = Stream()
    pinned = PinnedBuffers(2, 64)
    stage = StagingBuffers(pinned.buffers, 2)
    uploader = Uploader(stage, PinnedCopies(pinned, 0, stream))  # type: ignore[arg-type]
    source = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    target = np.zeros(1000, np.uint8)
    stream.put(lambda: target.fill(7))  # as padding is zeroed before

    def read(buffer: memoryview, offset: int) -> None:
        buffer[:] = source[offset : offset + len(buffer)].data

    uploader.upload(read, 1000, target.ctypes.data)
    uploader.finish()
    stage.close()
    np.testing.assert_array_equal(target, source)
