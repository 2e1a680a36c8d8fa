"""Time, memory and agreement of functions on tensors.

:func:`measure` times one function, :func:`compare` also checks it against a reference, :func:`sweep` measures several
functions over sizes and plots them. Times on a GPU are by events of the current stream, over batches of calls, after
warming up. A call whose host time exceeds its device time is measured at its host time; ``graph=True`` replays the
calls from a CUDA graph, which leaves the device time.
"""

from __future__ import annotations

import functools
import io
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import save_result

WARM_UP = 3
"""Calls before anything is timed: the first compile, allocate and choose."""
COPY_BYTES = 1 << 30
"""What the measurement of a device's bandwidth copies."""


@dataclass(frozen=True)
class Measurement:
    """One function's cost per call.

    ``seconds`` is the median over batches of calls, by events on a GPU; ``spread`` the distance between its quartiles;
    ``wall_seconds`` the median by the wall clock, with synchronization; ``host_seconds`` the median until the call
    returns. ``allocated`` and ``reserved`` are the peaks of torch's allocator above what was in use, in bytes; 0 on the
    CPU. ``bandwidth_share`` is ``bytes_moved / seconds`` over the device's measured bandwidth; None without bytes.
    """

    seconds: float
    spread: float
    wall_seconds: float
    host_seconds: float
    allocated: int
    reserved: int
    bandwidth_share: float | None = None

    def __str__(self) -> str:
        share = "" if self.bandwidth_share is None else f", {self.bandwidth_share:.0%} of the device's bandwidth"
        return (
            f"{self.seconds * 1e6:.1f} us (spread {self.spread * 1e6:.1f}; host {self.host_seconds * 1e6:.1f}), "
            f"{self.allocated:,} bytes{share}"
        )


@dataclass(frozen=True)
class Agreement:
    """How far two tensors are apart: the largest ``|a - b| / (atol + rtol * |b|)``; at most 1 agrees."""

    name: str
    excess: float

    @property
    def agrees(self) -> bool:
        return self.excess <= 1


@dataclass(frozen=True)
class Comparison:
    """Two functions' costs, and the agreement of their results and, if asked for, of their gradients."""

    ours: Measurement
    reference: Measurement
    agreements: tuple[Agreement, ...]

    @property
    def speedup(self) -> float:
        """How many times as fast ours is."""
        return self.reference.seconds / self.ours.seconds

    @property
    def agrees(self) -> bool:
        return all(agreement.agrees for agreement in self.agreements)


@functools.cache
def bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy on ``device`` reads and writes, measured once per process."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES >> 5
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / measure(target.copy_, source).seconds


def measure(
    function: Callable[..., Any],
    *arguments: Any,
    bytes_moved: int = 0,
    batches: int = 15,
    seconds: float = 0.05,
    graph: bool = False,
) -> Measurement:
    """The cost of ``function(*arguments)``.

    About ``seconds`` are spent in ``batches`` batches of calls. ``bytes_moved`` is what a call must read and write.
    ``graph`` captures a batch as a CUDA graph and times its replays. The device is that of the first tensor among the
    arguments, else the current GPU, else the CPU. Raises ``ValueError`` for fewer than 3 batches.
    """
    if batches < 3:
        raise ValueError(f"batches is {batches}; quartiles need at least 3")
    device = _device_of(arguments)
    on_gpu = device.type == "cuda"
    synchronize = functools.partial(torch.cuda.synchronize, device) if on_gpu else _nothing
    for _ in range(WARM_UP):
        function(*arguments)
    synchronize()
    allocated, reserved = _peak_memory(function, arguments, device) if on_gpu else (0, 0)
    single = _wall(function, arguments, 1, synchronize)[0]
    calls = max(1, min(1000, int(seconds / batches / max(single, 1e-7))))
    replay = _captured(function, arguments, calls) if graph and on_gpu else None
    device_times, wall_times, host_times = [], [], []
    for _ in range(batches):
        if replay is not None:
            device_times.append(_by_events(replay, (), 1) / calls)
        elif on_gpu:
            device_times.append(_by_events(function, arguments, calls))
        wall, host = _wall(function, arguments, calls, synchronize)
        wall_times.append(wall)
        host_times.append(host)
    times = device_times or wall_times
    low, median, high = statistics.quantiles(times, n=4)
    share = bytes_moved / median / bandwidth(device) if bytes_moved else None
    return Measurement(
        median, high - low, statistics.median(wall_times), statistics.median(host_times), allocated, reserved, share
    )


def compare(
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    *arguments: Any,
    rtol: float,
    atol: float,
    gradients: bool = True,
    bytes_moved: int = 0,
    graph: bool = False,
) -> Comparison:
    """The costs of two functions, and how far apart their results are.

    The first result of each function is compared within ``atol + rtol * |reference|``. With ``gradients`` so are the
    gradients of all float arguments for a random gradient of the result, the same for both, where the reference has
    them. Results of different shapes, and missing gradients, do not agree at all. Functions that overwrite
    an argument get a copy in the comparison; in the measurement they overwrite the argument itself.
    """
    agreements = _agreements(ours, reference, arguments, rtol, atol, gradients)
    first, second = (
        measure(function, *arguments, bytes_moved=bytes_moved, graph=graph) for function in (ours, reference)
    )
    return Comparison(first, second, agreements)


@dataclass(frozen=True)
class Sweep:
    """Measurements of several functions at several sizes: ``by_function[name][i]`` is at ``sizes[i]``."""

    sizes: tuple[int, ...]
    by_function: Mapping[str, tuple[Measurement, ...]]

    def plot(self, path: str | Path, *, size_name: str = "size") -> None:
        """Write a figure of the device time, and where known of the bandwidth.

        The file's suffix decides on PNG, PDF or SVG; ``.png`` is added if it has none.

        Raises ``ImportError`` without matplotlib (the extra ``[plot]``), and ``BminfError`` if the file cannot be
        written; an earlier file stays then.
        """
        from matplotlib.figure import Figure

        shares = {name: values for name, values in self.by_function.items() if all(v.bandwidth_share for v in values)}
        figure = Figure(figsize=(11 if shares else 6, 4), layout="constrained")
        axes = figure.subplots(1, 2 if shares else 1, squeeze=False)[0]
        for name, values in self.by_function.items():
            axes[0].plot(self.sizes, [v.seconds * 1e6 for v in values], marker="o", label=name)
        axes[0].set(xscale="log", yscale="log", xlabel=size_name, ylabel="microseconds")
        for name, values in shares.items():
            axes[1].plot(self.sizes, [100 * (v.bandwidth_share or 0) for v in values], marker="o", label=name)
        if shares:
            axes[1].set(xscale="log", xlabel=size_name, ylabel="% of the device's bandwidth", ylim=(0, None))
        for ax in axes:
            ax.legend()
            ax.grid(alpha=0.3)
        target = Path(path) if Path(path).suffix else Path(f"{path}.png")
        content = io.BytesIO()
        figure.savefig(content, format=target.suffix.removeprefix(".").lower())
        save_result(target, content.getvalue())


def sweep(
    functions: Mapping[str, Callable[..., Any]],
    make_arguments: Callable[[int], Sequence[Any]],
    sizes: Sequence[int],
    *,
    bytes_moved: Callable[[int], int] | None = None,
    graph: bool = False,
) -> Sweep:
    """Measure each function at each size, on ``make_arguments(size)``."""
    found: dict[str, list[Measurement]] = {name: [] for name in functions}
    for size in sizes:
        arguments = make_arguments(size)
        for name, function in functions.items():
            moved = bytes_moved(size) if bytes_moved else 0
            found[name].append(measure(function, *arguments, bytes_moved=moved, graph=graph))
    return Sweep(tuple(sizes), {name: tuple(values) for name, values in found.items()})


def _device_of(arguments: Sequence[Any]) -> torch.device:
    for argument in arguments:
        if isinstance(argument, Tensor):
            return argument.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _nothing() -> None:
    """The CPU needs no synchronization."""


def _peak_memory(function: Callable[..., Any], arguments: Sequence[Any], device: torch.device) -> tuple[int, int]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    function(*arguments)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return peaks[0] - allocated, peaks[1] - reserved


def _wall(
    function: Callable[..., Any], arguments: Sequence[Any], calls: int, synchronize: Callable[[], None]
) -> tuple[float, float]:
    """Seconds per call until the work is done, and until the calls return."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function(*arguments)
    returned = time.perf_counter()
    synchronize()
    return (time.perf_counter() - start) / calls, (returned - start) / calls


def _by_events(function: Callable[..., Any], arguments: Sequence[Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function(*arguments)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / calls


def _captured(function: Callable[..., Any], arguments: Sequence[Any], calls: int) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function(*arguments)
    return graph.replay


def _agreements(
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: Sequence[Any],
    rtol: float,
    atol: float,
    gradients: bool,
) -> tuple[Agreement, ...]:
    first, second = (_results(function, arguments, gradients) for function in (ours, reference))
    return tuple(Agreement(name, _excess(first.get(name), expected, rtol, atol)) for name, expected in second.items())


def _results(function: Callable[..., Any], arguments: Sequence[Any], gradients: bool) -> dict[str, Tensor]:
    own = [a.detach().clone() if isinstance(a, Tensor) else a for a in arguments]
    floats = [i for i, a in enumerate(own) if isinstance(a, Tensor) and a.is_floating_point()]
    leaves = {i: own[i].requires_grad_() for i in floats} if gradients else {}
    found = function(*(leaves[i] * 1 if i in leaves else a for i, a in enumerate(own)))
    y: Tensor = found if isinstance(found, Tensor) else found[0]
    if not (leaves and y.requires_grad):
        return {"result": y.detach()}
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(y.shape, generator=generator).to(y)
    pairs = zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True), strict=True)
    named = {f"gradient of argument {i}": gradient for i, gradient in pairs if gradient is not None}
    return {"result": y.detach(), **named}


def _excess(actual: Tensor | None, expected: Tensor, rtol: float, atol: float) -> float:
    if actual is None or actual.shape != expected.shape:
        return math.inf
    actual, expected = actual.double(), expected.double()
    excess = (actual - expected).abs() / (atol + rtol * expected.abs())
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return (
        float(torch.where(same, torch.zeros_like(excess), excess.nan_to_num(float("inf"))).max())
        if actual.numel()
        else 0.0
    )
