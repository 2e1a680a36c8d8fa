"""Measures a device: time, memory peaks, the limits of the hardware, and the parts of a step.

:class:`Profiler` measures by the host's clock, which is right on a CPU, where an operation is complete when it returns.
"""

from __future__ import annotations

import itertools
import platform
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from ..backend.base import Backend
from ..version import __version__
from .calls import OpCall, describe, moved_bytes, trace_calls
from .cases import KernelCase, plain_cases

T = TypeVar("T")


@dataclass(frozen=True)
class Ceilings:
    """The limits that were measured on this device.

    ``read`` is in bytes per second; ``copy`` too, and counts both the bytes read and those written. ``int8`` is in
    operations per second of a large int8 product, a multiplication and an addition counted as two. ``link`` is in bytes
    per second from pinned host memory, None where host and device are one.
    """

    read: float
    copy: float
    int8: float
    link: float | None = None


@dataclass(frozen=True)
class Span:
    """A kernel or operation of a step: its seconds, the bytes it must move (0 if unknown), the seconds to the next."""

    name: str
    seconds: float
    nbytes: int
    gap: float


class Profiler:
    """Measures the CPU. ``ceiling_bytes`` is the size of the buffers for measuring its limits.

    ``meet`` is called before each time is taken: the ranks of a divided model wait there for each other.
    """

    def __init__(self, ops: Backend, ceiling_bytes: int = 256 << 20):
        self.ops = ops
        self.ceiling_bytes = ceiling_bytes
        self.meet: Callable[[], None] | None = None

    def time(self, work: Callable[[], T]) -> tuple[float, T]:
        """Seconds that the device takes for ``work()``, and its result."""
        if self.meet is not None:
            self.meet()
        start = time.perf_counter()
        result = work()
        return time.perf_counter() - start, result

    def versions(self) -> dict[str, str]:
        """Versions of the software that the figures depend on."""
        return {"bminf-lite": __version__, "python": platform.python_version(), "numpy": np.__version__}

    def reset_peaks(self) -> None:
        """Start measuring the peaks of memory anew; on a CPU this has an effect under Linux."""
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # see proc_pid_clear_refs(5)

    def peaks(self) -> tuple[int, int | None]:
        """The peaks of memory used and reserved, in bytes; on a CPU that of the process, and None."""
        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, None

    def streamed_bytes(self) -> int:
        """Bytes of weights that were copied to the device so far because they are streamed."""
        return 0

    def ceilings(self) -> Ceilings:
        """Measure the limits; on a CPU by a matrix-vector product, a copy and a matrix product of NumPy."""
        columns = 4096
        rows = max(1, self.ceiling_bytes // (4 * columns))
        matrix, vector = np.ones((rows, columns), np.float32), np.ones(columns, np.float32)
        read = matrix.nbytes / self.min_seconds(lambda: matrix @ vector)
        target = np.empty_like(matrix)
        copy = 2 * matrix.nbytes / self.min_seconds(lambda: np.copyto(target, matrix))
        size = min(2048, rows)
        a, b = matrix[:size, :size].copy(), matrix[:size, :size].copy()
        return Ceilings(read, copy, 2 * size**3 / self.min_seconds(lambda: a @ b))

    def min_seconds(self, work: Callable[[], Any]) -> float:
        """Seconds of the fastest of five runs, after a warm-up."""
        work()
        return min(self.time(work)[0] for _ in range(5))

    def median_seconds(self, run: Callable[[int], Any], runs: int = 7) -> float:
        """Seconds of one ``run(i)``, the median of ``runs``, after a warm-up."""
        run(0)
        return median(self.time(partial(run, i))[0] for i in range(runs))

    def plain_seconds(self, run: Callable[[int], Any]) -> float:
        """Seconds of one ``run(i)`` of a plain formula."""
        return self.median_seconds(run)

    def allocated(self, run: Callable[[int], Any]) -> int | None:
        """The most memory in bytes that one ``run(i)`` allocates; None where that is unknown."""
        return None

    def trace(self, step: Callable[[], Any]) -> list[Span]:
        """The operations of one ``step()`` in order, each timed alone."""
        step()
        calls: list[OpCall] = []
        with trace_calls(self.ops, calls.append):
            step()
        gaps = [after.start - before.end for before, after in itertools.pairwise(calls)]
        return [
            Span(describe(call), call.end - call.start, moved_bytes(call), gap)
            for call, gap in zip(calls, [*gaps, 0.0][: len(calls)], strict=True)
        ]

    def kernels(self) -> Iterator[KernelCase]:
        """Single kernels over a sweep of sizes; the inputs of one are allocated when the iterator reaches it."""
        return plain_cases(np, self.ops)
