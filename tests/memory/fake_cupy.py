"""What the GPU's half of streaming calls of CuPy, over host memory: streams, events, copies and pinned memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from bminf_lite.memory.arena import ALIGNMENT


class FakeEvent:
    """An event of fake streams: how far the stream that recorded it had got."""

    def __init__(self, disable_timing: bool) -> None:
        self.after: Callable[[], None] = lambda: None

    def record(self, stream: FakeStream) -> None:
        with stream.lock:
            place = stream.done + len(stream.queue)
        self.after = lambda: stream.run_until(place)

    def synchronize(self) -> None:
        self.after()


class FakeStream:
    """Work that runs as late as it can, when something waits for it; or as early as events allow, if ``eager``."""

    by_address: ClassVar[dict[int, FakeStream]] = {}

    def __init__(self, eager: bool = False) -> None:
        self.eager = eager
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.ptr = id(self)
        self.lock = threading.RLock()
        self.by_address[self.ptr] = self

    def give(self, work: Callable[[], object]) -> None:
        with self.lock:
            self.queue.append(work)
            if self.eager:
                self.synchronize()

    def run_until(self, place: int) -> None:
        with self.lock:
            while self.done < place:
                self.done += 1
                self.queue.pop(0)()

    def wait_event(self, event: FakeEvent) -> None:
        self.give(event.after)

    def synchronize(self) -> None:
        self.run_until(self.done + len(self.queue))


class HostPages:
    """An arena's pages in host memory."""

    granularity = ALIGNMENT

    def __init__(self, nbytes: int) -> None:
        self.buffer = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8)
        self.base = -(-self.buffer.ctypes.data // ALIGNMENT) * ALIGNMENT

    def map(self, offset: int, nbytes: int) -> None: ...

    def unmap(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        return []

    def close(self) -> None: ...


def memcpy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    FakeStream.by_address[stream].give(lambda: ctypes.memmove(target, source, nbytes))


def replace_cupy(streaming: Any, eager: bool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace CuPy's calls in ``backend.cuda.streaming``; the list holds the bytes that may still be pinned."""
    room = [1 << 30]

    def pin(address: int, nbytes: int, flags: int) -> None:
        if nbytes > room[0]:
            raise MemoryError("cudaErrorMemoryAllocation: out of memory")
        room[0] -= nbytes

    cuda = SimpleNamespace(
        Device=lambda index: nullcontext(),
        Stream=lambda non_blocking: FakeStream(eager),
        Event=FakeEvent,
    )
    runtime = SimpleNamespace(
        memcpyAsync=memcpy,
        memcpyDeviceToHost=2,
        memcpyHostToDevice=1,
        CUDARuntimeError=MemoryError,
        hostRegister=pin,
        hostUnregister=lambda address: None,
    )
    monkeypatch.setattr(streaming, "available_memory", lambda: None)
    monkeypatch.setattr(streaming, "cp", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(streaming, "runtime", runtime)
    return room
