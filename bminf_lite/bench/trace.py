"""A look inside: the parts of one decode step, and single kernels."""

from __future__ import annotations

from contextlib import closing

from .instruments import Profiler
from .model import BenchModel
from .report import KernelTime, Trace
from .runner import WARM_UP_STEPS
from .session import Session, check_results

STEPS = 20
"""Decode steps whose mean is the time of a step as it is run."""


def trace_step(bench_model: BenchModel, profiler: Profiler, batch: int = 1, depth: int = 0) -> Trace:
    """The parts of one decode step of ``batch`` sequences behind ``depth`` tokens; the checks are those of a test."""
    with closing(Session(bench_model, batch, depth + STEPS + WARM_UP_STEPS)) as session:
        position = session.fill_context(depth)
        session.prepare_decode(position)
        session.decode(WARM_UP_STEPS)
        session.prepare_decode(position)
        seconds, results = profiler.time(lambda: session.decode(STEPS))
        check_results(results, bench_model.engine_config.vocab_size, "the traced step")
        session.prepare_decode(position)
        session.set_max_context_len(position + 2)  # the trace runs two steps; what a launch moves is counted by this
        return Trace(depth, profiler.trace(session.decode_eagerly), seconds / STEPS)


def kernel_times(profiler: Profiler) -> list[KernelTime]:
    """The time of every kernel that the device's profiler knows, over their sweep of sizes."""
    times = []
    for case in profiler.kernels():
        plain = profiler.plain_seconds(case.plain) if case.plain else None
        seconds = profiler.median_seconds(case.run)
        taken = profiler.allocated(case.run)
        times.append(KernelTime(case.kernel, case.shape, seconds, case.nbytes, case.operations, plain, taken))
    return times
