"""Speed of whole steps: prompts processed per second, tokens decoded per second, and what they moved and took."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from ..errors import UsageError
from .instruments import Instruments
from .session import Session, check
from .subject import Subject

WARM_UP_STEPS = 3
"""Decode steps before the first that counts: one as it is, one that a backend may record, one that replays it."""


@dataclass(frozen=True)
class Workload:
    """``tokens`` prompt tokens (``pp``) or decoded tokens (``tg``) of ``batch`` sequences, behind ``depth`` tokens."""

    kind: str
    tokens: int
    depth: int = 0
    batch: int = 1

    def __str__(self) -> str:
        depth = f" @ d{self.depth}" if self.depth else ""
        return f"{self.kind}{self.tokens}{depth}" + (f" x {self.batch}" if self.batch > 1 else "")


@dataclass(frozen=True)
class Measurement:
    """What a test took: seconds of each repetition, bytes that one token had to move, and peaks of memory in bytes.

    ``operations`` are those of the int8 products for one token, a multiplication and an addition counted as two.
    """

    test: Workload
    seconds: tuple[float, ...]
    token_bytes: float
    operations: float
    peak_used: int
    peak_reserved: int | None

    @cached_property
    def speeds(self) -> list[float]:
        """Tokens per second of each repetition, all sequences together."""
        return [self.test.tokens * self.test.batch / s for s in self.seconds]

    @property
    def speed(self) -> float:
        """Tokens per second, the median."""
        return statistics.median(self.speeds)

    @property
    def deviation(self) -> float:
        """The standard deviation of the speeds; 0 for a single one."""
        return statistics.stdev(self.speeds) if len(self.speeds) > 1 else 0.0

    @property
    def step_seconds(self) -> float:
        """The median time of one step (``tg``), or of all prompts (``pp``)."""
        return statistics.median(self.seconds) / (self.test.tokens if self.test.kind == "tg" else 1)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that had to be moved at the median speed."""
        return self.token_bytes * self.speed


def workloads(
    prompts: Sequence[int], generated: Sequence[int], depths: Sequence[int], batches: Sequence[int]
) -> list[Workload]:
    """Every combination; 0 prompt or generated tokens leave that kind out. Raises ``UsageError`` for negative ones."""
    if min([*prompts, *generated, *depths], default=0) < 0 or min(batches, default=1) < 1:
        raise UsageError("-p, -n and -d take numbers from 0 on, -b from 1 on")
    kinds = [("pp", n) for n in prompts if n] + [("tg", n) for n in generated if n]
    return [Workload(kind, n, depth, batch) for batch in batches for depth in depths for kind, n in kinds]


def run_tests(
    subject: Subject,
    instruments: Instruments,
    tests: Iterable[Workload],
    repetitions: int,
    done: Callable[[Measurement], Any] = lambda _: None,
) -> list[Measurement]:
    """Run each test ``repetitions`` times after a warm-up, and tell ``done`` of each result.

    Raises ``BminfError`` where the results show that nothing sensible was computed, ``OutOfMemory`` where the cache
    does not fit.
    """
    measurements = []
    for test in tests:
        instruments.reset_peaks()
        with closing(Session(subject, test.batch, test.depth + test.tokens + WARM_UP_STEPS)) as session:
            if test.depth:
                session.poison(0)
                session.prefill(session.prepare_prefill(test.depth, 0))
            times = _prefill_times if test.kind == "pp" else _decode_times
            seconds = times(session, instruments, test, repetitions)
            peaks = instruments.peaks()
        measurements.append(Measurement(test, seconds, *token_costs(subject, test), *peaks))
        done(measurements[-1])
    return measurements


def _prefill_times(session: Session, instruments: Instruments, test: Workload, repetitions: int) -> tuple[float, ...]:
    seconds, results = [], []
    for _ in range(repetitions + 1):
        steps = session.prepare_prefill(test.tokens, test.depth)
        session.poison(test.depth)
        taken, chosen = instruments.time(partial(session.prefill, steps))
        seconds.append(taken)
        results.append(np.concatenate(chosen, axis=1))
    check(results, session.subject.limits.vocab_size, str(test))
    return tuple(seconds[1:])


def _decode_times(session: Session, instruments: Instruments, test: Workload, repetitions: int) -> tuple[float, ...]:
    seconds = []
    session.prepare_decode(test.depth)
    session.decode(WARM_UP_STEPS)
    for _ in range(repetitions):
        session.poison(test.depth)
        session.prepare_decode(test.depth)
        taken, results = instruments.time(lambda: session.decode(test.tokens))
        seconds.append(taken)
        check(results, session.subject.limits.vocab_size, str(test))
    return tuple(seconds)


def token_costs(subject: Subject, test: Workload) -> tuple[float, float]:
    """Bytes and operations per token.

    Bytes are those of the weights, once for each step, and of the keys and values that its queries see and that it
    adds; activations are left out. A step of ``tg`` has a token of each sequence, one of ``pp`` as many as a chunk.
    """
    operations = 2.0 * subject.product_elements
    if test.kind == "tg":
        seen = test.depth + (test.tokens + 1) / 2
        return subject.step_bytes / test.batch + subject.cache_bytes(seen + 1), operations
    steps = -(-test.tokens * test.batch // subject.limits.chunk)
    chunk = min(test.tokens, subject.limits.chunk)
    chunks = -(-test.tokens // chunk)
    seen = sum(test.depth + min((i + 1) * chunk, test.tokens) for i in range(chunks)) / test.tokens
    head = subject.limits.vocab_size * subject.hidden
    return (
        steps * subject.step_bytes / (test.tokens * test.batch) + subject.cache_bytes(seen + 1),
        operations - 2.0 * head * (1 - 1 / test.tokens),
    )
