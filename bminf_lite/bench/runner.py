"""Speed of whole steps: tokens of prompts and sources, and decoded tokens, per second, and what they moved and took."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from ..errors import UsageError
from .instruments import Instruments
from .session import Session, check
from .subject import Subject
from .watching import ProductCosts, watching

WARM_UP_STEPS = 3
"""Decode steps before the first that counts: one as it is, one that a backend may record, one that replays it."""


@dataclass(frozen=True)
class Workload:
    """``tokens`` prompt tokens (``pp``) or decoded tokens (``tg``) of ``batch`` sequences, behind ``depth`` tokens.

    An encoder-decoder encodes a source (``enc``) instead of a prompt, and decodes behind a source of ``depth`` tokens.
    """

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

    Bytes are those of the weights, once for each step, and of keys and values; activations are left out. ``operations``
    are those of the products for one token, a multiplication and an addition counted as two.
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
        """The median time of one step (``tg``), or of all prompts or sources."""
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
    for test in of_sources(tests) if subject.limits.source_length else tests:
        instruments.reset_peaks()
        with closing(Session(subject, test.batch, test.depth + test.tokens + WARM_UP_STEPS)) as session:
            seconds, costs = RUNS[test.kind](session, instruments, test, repetitions)
            peaks = instruments.peaks()
        per_token = test.batch * (1 if test.kind == "tg" else test.tokens)
        measurements.append(
            Measurement(
                test, seconds, costs.nbytes / per_token + cache_bytes_per_token(subject, test),
                costs.operations / per_token, *peaks,
            )
        )
        done(measurements[-1])
    return measurements


def of_sources(tests: Iterable[Workload]) -> list[Workload]:
    """``tests`` for an encoder-decoder: each length of prompts becomes one of sources, behind which nothing can be."""
    return list(dict.fromkeys(replace(t, kind="enc", depth=0) if t.kind == "pp" else t for t in tests))


def _prefill(
    session: Session, instruments: Instruments, test: Workload, repetitions: int
) -> tuple[tuple[float, ...], ProductCosts]:
    position = session.begin(test.depth) if test.depth else 0
    seconds, results, costs = [], [], ProductCosts()
    with watching(session.ops, costs.add):
        results += session.prepare_prefill(test.tokens, position)()
    for _ in range(repetitions):
        prefill = session.prepare_prefill(test.tokens, position)
        session.poison(position)
        taken, chosen = instruments.time(prefill)
        seconds.append(taken)
        results += chosen
    check(results, session.subject.limits.vocab_size, str(test))
    return tuple(seconds), costs


def _encode(
    session: Session, instruments: Instruments, test: Workload, repetitions: int
) -> tuple[tuple[float, ...], ProductCosts]:
    """The encoder, and the decoder's keys and values of the source; an untimed step shows that they are there."""
    seconds, costs = [], ProductCosts()
    with watching(session.ops, costs.add):
        session.prepare_encode(test.tokens)()
    results = session.start_decoding()
    for _ in range(repetitions):
        seconds.append(instruments.time(session.prepare_encode(test.tokens))[0])
        results += session.start_decoding()
    check(results, session.subject.limits.vocab_size, str(test))
    return tuple(seconds), costs


def _decode(
    session: Session, instruments: Instruments, test: Workload, repetitions: int
) -> tuple[tuple[float, ...], ProductCosts]:
    position, seconds, costs = session.begin(test.depth), [], ProductCosts()
    session.prepare_decode(position)
    with watching(session.ops, costs.add):
        session.decode(1)
    session.decode(WARM_UP_STEPS - 1)
    for _ in range(repetitions):
        session.poison(position)
        session.prepare_decode(position)
        taken, results = instruments.time(partial(session.decode, test.tokens))
        seconds.append(taken)
        check(results, session.subject.limits.vocab_size, str(test))
    return tuple(seconds), costs


RUNS = {"pp": _prefill, "enc": _encode, "tg": _decode}


def cache_bytes_per_token(subject: Subject, test: Workload) -> float:
    """Bytes of the keys and values that a token's query sees and that it adds; a chunk of ``pp`` reads them once."""
    if test.kind == "enc":
        return subject.cache_bytes(1)
    if test.kind == "tg":
        return subject.cache_bytes(test.depth + (test.tokens + 1) / 2 + 1)
    chunk = min(test.tokens, subject.limits.chunk)
    read = sum(test.depth + min(first + chunk, test.tokens) for first in range(0, test.tokens, chunk))
    return subject.cache_bytes(read / test.tokens + 1)
