"""The fake GPU: what it is, its streams, the work that is put on them, and the graphs that record it."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from .memory import FakeGpuError, Memory
from .races import LaunchOrder


@dataclass(frozen=True)
class Profile:
    """A GPU as its attributes describe it; ``shared`` is what a block may have, opted in."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared: int


PROFILES = {
    "h200": Profile("fake H200", (9, 0), 132, 227 << 10),
    "sm_86": Profile("fake RTX A2000", (8, 6), 26, 99 << 10),
    "sm_120": Profile("fake RTX 5090", (12, 0), 170, 99 << 10),
}
TOTAL_MEMORY = 12 << 30
MAX_THREADS, MAX_GRID_YZ, MAX_CLUSTER = 1024, 65535, 8
TENSOR_MAP = "QII5Q4Q5I"
"""What this driver's ``CUtensorMap`` says: address, element, rank; five sizes, four strides in bytes, a box of five."""

Work = Callable[[], None]


@dataclass(eq=False)
class FakeStream:
    """A stream: its handle, the recording under way, and the thread that records.

    A stream that waits for an event of a recording is recorded too, as a branch, until the recording ends. By then the
    stream with which it began must have waited for all work of the branch.
    """

    ptr: int
    recording: list[Work] | None = None
    recorder: int = 0
    device: int = 0
    is_branch: bool = False
    is_ahead: bool = False

    def record(self) -> None:
        """Begin a recording by this thread."""
        self.recording, self.recorder = [], threading.get_ident()

    def wait(self, source: FakeStream, recording: list[Work] | None) -> None:
        """Wait for an event that was recorded on ``source``, which belonged to a recording then."""
        if recording is None or recording is not source.recording:
            return
        if self.recording is None:
            self.recording, self.recorder, self.is_branch = recording, source.recorder, True
        elif source.is_branch and self.recording is recording:
            source.is_ahead = False


@dataclass
class FakeKernel:
    """A loaded function: which instantiation of which source."""

    source: str
    expression: str
    defines: tuple[str, ...]
    dynamic_shared_allowed: int = 0


@dataclass
class Requested:
    """An instantiation that was asked for, and the most that its launches took."""

    arch: str
    launches: int = 0
    threads: int = 0
    shared: int = 0


@dataclass
class Launch:
    """One launch as the driver was told of it."""

    kernel: FakeKernel
    grid: tuple[int, int, int]
    block: int
    shared: int
    cluster: int
    parameters: bytes
    dependent: bool = False


@dataclass
class Machine:
    """Work runs when it is put on a stream, unless the stream is being recorded. Threads take turns."""

    current: ClassVar[Machine]
    """The one that is installed."""

    profile: Profile
    memory: Memory = field(default_factory=lambda: Memory(TOTAL_MEMORY))
    streams: dict[int, FakeStream] = field(default_factory=dict)
    graphs: dict[int, list[Work]] = field(default_factory=dict)
    kernels: dict[int, FakeKernel] = field(default_factory=dict)
    modules: dict[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    requested: dict[tuple[str, str, tuple[str, ...]], Requested] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(0x1000, 16))
    turn: threading.RLock = field(default_factory=threading.RLock)
    devices: int = 1
    """How many GPUs there are, all of this profile. They share the memory, so each can reach what others hold."""
    has_peer_access: bool = True
    """Whether the GPUs say that they can reach each other's memory."""
    peers: set[tuple[int, int]] = field(default_factory=set)
    """Pairs of GPUs of which the first may reach the memory of the second."""
    orders: list[LaunchOrder] = field(default_factory=list)
    """For each GPU, the order of the launches of all streams, as if they were one stream."""
    kernels_of_cupy: set[str] = field(default_factory=set)
    """The package's functions that called an operation for which CuPy compiles a kernel, as ``module.function``."""
    runs_ptx: bool = False
    """Whether kernels that ptx.py can run are run by it, and not by their models."""

    def __post_init__(self) -> None:
        self.streams[0] = FakeStream(0)
        self.memory.is_recording = lambda: self.recording
        self.orders = [LaunchOrder() for _ in range(self.devices)]
        self.arrived = threading.Condition(self.turn)
        """What a kernel waits for that needs something from another GPU. It gives up its turn meanwhile."""
        self._thread = threading.local()

    @property
    def device(self) -> int:
        """The GPU that is current in this thread."""
        return getattr(self._thread, "device", 0)

    @device.setter
    def device(self, index: int) -> None:
        assert 0 <= index < self.devices, f"the fake GPUs are numbered from 0 to {self.devices - 1}"
        self._thread.device = index

    @property
    def order(self) -> LaunchOrder:
        """The order of the launches of the current GPU."""
        return self.orders[self.device]

    def note_kernel_of_cupy(self) -> None:
        """Remember the function of the package that calls."""
        frame = inspect.currentframe()
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("bminf_lite."):
            frame = frame.f_back
        if frame is not None:
            self.kernels_of_cupy.add(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")

    def new_stream(self) -> FakeStream:
        stream = FakeStream(next(self.numbers), device=self.device)
        self.streams[stream.ptr] = stream
        return stream

    def stream(self, ptr: int) -> FakeStream:
        if ptr not in self.streams:
            raise FakeGpuError(f"{ptr:#x} is no stream")
        return self.streams[ptr]

    @property
    def recording(self) -> bool:
        """Whether this thread records a stream: what other threads do is no part of it."""
        this = threading.get_ident()
        return any(s.recording is not None and s.recorder == this for s in list(self.streams.values()))

    def put(self, stream: int, work: Work, is_launch: bool = False) -> None:
        """Put work on a stream. Launches may be dependent; any other work begins and ends alone."""
        target = self.stream(stream)
        if stream and target.device != self.device:
            raise FakeGpuError(f"work on a stream of GPU {target.device} while GPU {self.device} is current")
        if not is_launch:
            work = self._alone(work)
        if target.recording is not None:
            target.recording.append(work)
            target.is_ahead = target.is_branch
        elif stream == 0 and self.recording:
            raise FakeGpuError("work on the default stream while another stream is being recorded")
        else:
            with self.turn:
                work()

    def _alone(self, work: Work) -> Work:
        def run() -> None:
            self.order.complete()
            work()
            self.order.complete()

        return run

    def refuse_in_recording(self, what: str) -> None:
        """Raises if a stream is being recorded: then nothing may wait or allocate."""
        if self.recording:
            raise FakeGpuError(f"{what} while a stream is being recorded")

    def replay(self, graph: list[Work], stream: int) -> None:
        """Run a recording. What lies in a scratch is not live for Python any more, but it is the graph's."""

        def run() -> None:
            self.memory.replaying = True
            try:
                for work in graph:
                    work()
            finally:
                self.memory.replaying = False

        self.put(stream, run)

    def check(self, address: int, nbytes: int, what: str) -> None:
        """Raises unless memory is in use; in a replay, unless its outermost block is."""
        self.memory.check(address, nbytes, what, inside=not self.memory.replaying)
