"""What measuring needs of a device: a clock, peaks of memory, the limits of the hardware, and a look inside a step.

:class:`Profiler` serves any backend by the host's clock, which is right where operations run at once, on the CPU.
"""

from __future__ import annotations

import itertools
import platform
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..version import __version__
from .calls import OpCall, describe, moved_bytes, trace_calls
from .cases import KernelCase, plain_cases


@dataclass(frozen=True)
class Ceilings:
    """What this device was measured to reach: bytes per second read, bytes per second copied (read and written both
    counted), and operations per second of a large int8 product (a multiplication and an addition count as two).
    ``link`` is bytes per second from pinned host memory, None where host and device are one.
    """

    read: float
    copy: float
    int8: float
    link: float | None = None


@dataclass(frozen=True)
class Span:
    """A kernel or operation of a step: seconds it took, bytes it had to move (0 if not known), seconds to the next."""

    name: str
    seconds: float
    nbytes: int
    gap: float


class Profiler:
    """Of the CPU. ``ceiling_bytes`` is the size of the buffers with which its limits are measured."""

    def __init__(self, ops: Backend, ceiling_bytes: int = 256 << 20):
        self.ops = ops
        self.ceiling_bytes = ceiling_bytes

    def time(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds that the device takes for ``work()``, and its result."""
        start = time.perf_counter()
        result = work()
        return time.perf_counter() - start, result

    def versions(self) -> dict[str, str]:
        """What the figures depend on beside the hardware."""
        return {
            "bminf-lite": __version__, "python": platform.python_version(), "numpy": np.__version__
        }  # fmt: skip

    def reset_peaks(self) -> None:
        """Let the peaks of memory start again, where they can."""

    def peaks(self) -> tuple[int, int | None]:
        """The peak of memory used and reserved in bytes; on a CPU, of the whole process since it began, and None."""
        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, None

    def streamed_bytes(self) -> int:
        """Bytes of weights that were copied to the device so far because they do not fit there."""
        return 0

    def ceilings(self) -> Ceilings:
        """Measure the limits: of BLAS reading a matrix and multiplying two, and of copying memory."""
        columns = 4096
        rows = max(1, self.ceiling_bytes // (4 * columns))
        matrix, vector = np.ones((rows, columns), np.float32), np.ones(columns, np.float32)
        read = matrix.nbytes / self.min_seconds(lambda: matrix @ vector)
        target = np.empty_like(matrix)
        copy = 2 * matrix.nbytes / self.min_seconds(lambda: np.copyto(target, matrix))
        size = min(2048, rows)
        a, b = matrix[:size, :size].copy(), matrix[:size, :size].copy()
        return Ceilings(read, copy, 2 * size**3 / self.min_seconds(lambda: a @ b))

    def min_seconds(self, work: Callable[[], Any], runs: int = 5) -> float:
        """Seconds of the fastest of a few runs, after one that does not count."""
        work()
        return min(self.time(work)[0] for _ in range(runs))

    def median_seconds(self, run: Callable[[int], Any], runs: int = 7) -> float:
        """Seconds that one ``run(i)`` takes, the median, after one that does not count."""
        run(0)
        return median(self.time(partial(run, i))[0] for i in range(runs))

    def plain_seconds(self, run: Callable[[int], Any]) -> float:
        """The same for work that is not the backend's own, as its user would run it."""
        return self.median_seconds(run)

    def allocated(self, run: Callable[[int], Any]) -> int | None:
        """The most memory in bytes that one ``run(i)`` takes beside what is there, where that is known."""
        return None

    def trace(self, step: Callable[[], Any]) -> list[Span]:
        """The operations of one ``step()`` in order, each timed on its own."""
        step()
        calls: list[OpCall] = []
        with trace_calls(self.ops, calls.append):
            step()
        gaps = [after.start - before.end for before, after in itertools.pairwise(calls)]
        return [
            Span(describe(call), call.end - call.start, moved_bytes(call), gap)
            for call, gap in zip(calls, [*gaps, 0.0], strict=True)
        ]

    def kernels(self) -> Iterator[KernelCase]:
        """Single kernels over a sweep of sizes; each is made when it is asked for."""
        return plain_cases(np, self.ops)


def make_profiler(ops: Backend) -> Profiler:
    """Those of the device that ``ops`` owns."""
    if not ops.name.startswith("cuda"):
        return Profiler(ops)
    from .cuda import CudaProfiler

    return CudaProfiler(ops)  # type: ignore[arg-type]
