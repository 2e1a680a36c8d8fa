"""A look inside: the parts of one decode step, and single kernels."""

from __future__ import annotations

from contextlib import closing

from .instruments import Instruments
from .model import Subject
from .report import KernelTime, Trace
from .runner import WARM_UP_STEPS
from .session import Session, check

STEPS = 20
"""Decode steps whose mean is the time of a step as it is run."""


def trace_step(subject: Subject, instruments: Instruments, batch: int = 1, depth: int = 0) -> Trace:
    """The parts of one decode step of ``batch`` sequences behind ``depth`` tokens; the checks are those of a test."""
    with closing(Session(subject, batch, depth + STEPS + WARM_UP_STEPS)) as session:
        position = session.begin(depth)
        session.prepare_decode(position)
        session.decode(WARM_UP_STEPS)
        session.prepare_decode(position)
        seconds, results = instruments.time(lambda: session.decode(STEPS))
        check(results, subject.limits.vocab_size, "the traced step")
        session.prepare_decode(position)
        session.expect(position + 2)  # the trace runs two steps; what a launch moves is counted by this
        return Trace(depth, instruments.trace(session.decode_eagerly), seconds / STEPS)


def kernel_times(instruments: Instruments) -> list[KernelTime]:
    """The time of every kernel that the device's instruments know, over their sweep of sizes."""
    times = []
    for case in instruments.kernels():
        plain = instruments.plain_seconds_each(case.plain) if case.plain else None
        seconds = instruments.seconds_each(case.run)
        taken = instruments.allocated(case.run)
        times.append(KernelTime(case.kernel, case.shape, seconds, case.nbytes, case.operations, plain, taken))
    return times
