"""Runs the measurements: workloads of prompts, sources and decoded tokens, one traced decode step, single kernels."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.communicator import RankFailed, on_ranks
from ..backend.cpu import CpuBackend
from ..errors import UsageError
from .calls import ExpertUse, LinearCosts, recorded_choices, trace_calls
from .model import BenchModel
from .profiler import Profiler, Span, T
from .session import Session, check_results

WARM_UP_STEPS = 3
"""Decode steps before the first that is timed: one eager, one captured, one replayed."""
COUNTED_STEPS = 8
"""Decode steps, spread over those that are timed, of which the chosen experts are counted."""
TRACED_STEPS = 20
"""Decode steps whose mean is the time of a traced step with graphs."""


def make_profiler(ops: Backend) -> Profiler:
    """The profiler of the device on which ``ops`` computes."""
    if isinstance(ops, CpuBackend):
        return Profiler(ops)
    from ..backend.cuda.backend import CudaBackend
    from .cuda import CudaProfiler

    assert isinstance(ops, CudaBackend)
    return CudaProfiler(ops)


def on_each_rank(bench_model: BenchModel, profiler: Profiler, work: Callable[[BenchModel, Profiler], T]) -> T:
    """Do ``work`` on all ranks at once, with the model as each has it, and return what the first one returns.

    ``profiler`` is the first rank's; the others get their own. Ranks run the same steps, because each draws the same
    random tokens, and they wait for each other before a time is taken. A model that is not divided has one rank.
    Raises the error of a rank that failed, or whose sums may be wrong.
    """
    ranks = bench_model.ranks
    if len(ranks) == 1:
        return work(ranks[0], profiler)
    barrier = threading.Barrier(len(ranks))

    def meet() -> None:
        try:
            barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankFailed("another rank has failed") from error

    def run(rank: int) -> T:
        own = profiler if rank == 0 else type(profiler)(ranks[rank].ops, profiler.ceiling_bytes)
        own.meet = meet
        try:
            found = work(ranks[rank], own)
            own.ops.communicator.check()
            return found
        except BaseException:
            barrier.abort()
            raise
        finally:
            own.meet = None

    return on_ranks([rank.ops for rank in ranks], run)[0]


@dataclass(frozen=True)
class Workload:
    """``tokens`` prompt tokens (``pp``) or decoded tokens (``tg``) of ``batch`` sequences, after ``depth`` tokens.

    An encoder-decoder encodes a source (``enc``) instead of a prompt, and decodes after a source of ``depth`` tokens.
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
    """The result of a workload: seconds of each repetition, bytes per token, and peaks of memory in bytes.

    Bytes and operations of a divided model are those of its first rank.
    ``token_bytes`` counts the weights, once for each step, and the keys and values; activations are left out.
    ``operations`` are those of the products for one token, a multiplication and an addition counted as two.
    ``streamed_bytes`` are the bytes of streamed weights that were copied to the device for one token. ``experts``
    says how many experts a step read in each layer of experts.
    """

    test: Workload
    seconds: tuple[float, ...]
    token_bytes: float
    operations: float
    peak_used: int
    peak_reserved: int | None
    streamed_bytes: float = 0.0
    experts: ExpertUse | None = None

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
        """The standard deviation of the speeds; 0 for a single repetition."""
        return statistics.stdev(self.speeds) if len(self.speeds) > 1 else 0.0

    @property
    def step_seconds(self) -> float:
        """The median time of one step (``tg``), or of all prompts or sources."""
        return statistics.median(self.seconds) / (self.test.tokens if self.test.kind == "tg" else 1)

    @property
    def bandwidth(self) -> float:
        """Bytes per second at the median speed."""
        return self.token_bytes * self.speed


@dataclass(frozen=True)
class KernelTime:
    """A kernel's time at one size.

    ``nbytes`` and ``operations`` are those of :class:`.KernelCase`, ``plain_seconds`` those of its plain formula, and
    ``allocated`` are the most bytes of memory that one run allocates.
    """

    kernel: str
    shape: str
    seconds: float
    nbytes: int
    operations: int
    plain_seconds: float | None
    allocated: int | None = None


@dataclass(frozen=True)
class Trace:
    """One decode step after ``depth`` tokens: its parts in order, each timed alone, and its time with graphs."""

    depth: int
    spans: Sequence[Span]
    step_seconds: float

    @property
    def alone(self) -> float:
        """The sum of the parts' seconds."""
        return sum(span.seconds for span in self.spans)


def workloads(
    prompts: Sequence[int], generated: Sequence[int], depths: Sequence[int], batches: Sequence[int]
) -> list[Workload]:
    """Every combination; 0 prompt or generated tokens give no workload. Raises ``UsageError`` for numbers too small."""
    options = (("-p", prompts, 0), ("-n", generated, 0), ("-d", depths, 0), ("-b", batches, 1))
    wrong = [f"{name} is {n}, but must be {least} or more" for name, ns, least in options for n in ns if n < least]
    if wrong:
        raise UsageError("; ".join(wrong))
    kinds = [("pp", n) for n in prompts if n] + [("tg", n) for n in generated if n]
    return [Workload(kind, n, depth, batch) for batch in batches for depth in depths for kind, n in kinds]


def run_tests(
    bench_model: BenchModel,
    profiler: Profiler,
    tests: Iterable[Workload],
    repetitions: int,
    on_result: Callable[[Measurement], Any] = lambda _: None,
) -> list[Measurement]:
    """Run each workload ``repetitions`` times after a warm-up, and pass each result to ``on_result``.

    ``profiler`` is that of the model's device, or of the first rank's.
    Raises ``BminfError`` if :func:`.check_results` finds a wrong result, ``OutOfMemory`` if the cache does not fit.
    """
    measurements = []
    if bench_model.engine_config.is_encoder_decoder:  # a prompt becomes a source, which has no tokens before it
        tests = dict.fromkeys(replace(t, kind="enc", depth=0) if t.kind == "pp" else t for t in tests)
    for test in tests:
        runs, peaks = on_each_rank(bench_model, profiler, partial(_run, test=test, repetitions=repetitions))
        tokens = test.batch * test.tokens
        per_token = test.batch if test.kind == "tg" else tokens
        nbytes = runs.costs.nbytes / per_token + cache_bytes_per_token(bench_model, test)
        operations, streamed = runs.costs.operations / per_token, runs.streamed_bytes / tokens / repetitions
        measured = Measurement(test, tuple(runs.seconds), nbytes, operations, *peaks, streamed, runs.costs.experts)
        measurements.append(measured)
        on_result(measurements[-1])
    return measurements


def _run(
    bench_model: BenchModel, profiler: Profiler, test: Workload, repetitions: int
) -> tuple[Repetitions, tuple[int, int | None]]:
    """The repetitions of a workload on one rank, and its peaks of memory."""
    profiler.reset_peaks()
    with closing(Session(bench_model, test.batch, test.depth + test.tokens + WARM_UP_STEPS)) as session:
        return WORKLOAD_RUNNERS[test.kind](session, profiler, test, repetitions), profiler.peaks()


@dataclass
class Repetitions:
    """The repetitions of a workload: their seconds and the bytes that they streamed together.

    ``costs`` are those of one repetition, or of one step of ``tg``.
    """

    costs: LinearCosts = field(default_factory=LinearCosts)
    seconds: list[float] = field(default_factory=list)
    streamed_bytes: int = 0

    def time(self, profiler: Profiler, work: Callable[[], T]) -> T:
        """Run one repetition; returns its results."""
        before = profiler.streamed_bytes()
        taken, results = profiler.time(work)
        self.seconds.append(taken)
        self.streamed_bytes += profiler.streamed_bytes() - before
        return results


def _prefill(session: Session, profiler: Profiler, test: Workload, repetitions: int) -> Repetitions:
    position = session.fill_context(test.depth) if test.depth else 0
    runs, results = Repetitions(), list[np.ndarray]()
    with recorded_choices(session.ops) as chosen, trace_calls(session.ops, runs.costs.add):
        results += session.prepare_prefill(test.tokens, position)()
    runs.costs.count([[session.ops.host(ids) for ids in chosen]])
    for _ in range(WARM_UP_STEPS if session.captures_prefill(test.tokens) else 0):
        session.prepare_prefill(test.tokens, position)()
    for _ in range(repetitions):
        prefill = session.prepare_prefill(test.tokens, position)
        session.poison(position)
        results += runs.time(profiler, prefill)
    check_results(results, session.bench_model.engine_config.vocab_size, str(test))
    return runs


def _encode(session: Session, profiler: Profiler, test: Workload, repetitions: int) -> Repetitions:
    """Time the encoder and the decoder's keys and values of the source; check them by an untimed decoder step."""
    runs = Repetitions()
    with trace_calls(session.ops, runs.costs.add):
        session.prepare_encode(test.tokens, eagerly=True)()
    results = session.start_decoding()
    for _ in range(WARM_UP_STEPS if session.ops.source_sizes else 0):
        session.prepare_encode(test.tokens)()
    for _ in range(repetitions):
        runs.time(profiler, session.prepare_encode(test.tokens))
        results += session.start_decoding()
    check_results(results, session.bench_model.engine_config.vocab_size, str(test))
    return runs


def _decode(session: Session, profiler: Profiler, test: Workload, repetitions: int) -> Repetitions:
    position, runs = session.fill_context(test.depth), Repetitions()
    session.prepare_decode(position)
    with trace_calls(session.ops, runs.costs.add):
        session.decode(1)
    session.decode(WARM_UP_STEPS - 1)
    for _ in range(repetitions):
        session.poison(position)
        session.prepare_decode(position)
        results = runs.time(profiler, partial(session.decode, test.tokens))
        check_results(results, session.bench_model.engine_config.vocab_size, str(test))
    if runs.costs.mixtures:
        runs.costs.count(_choices(session, position, test.tokens))
    return runs


def _choices(session: Session, position: int, tokens: int) -> list[list[np.ndarray]]:
    """The experts that some of ``tokens`` decode steps choose from ``position`` on, which are those that were timed."""
    session.prepare_decode(position)
    counted = {round(step) for step in np.linspace(0, tokens - 1, min(tokens, COUNTED_STEPS))}
    steps = []
    for step in range(tokens):
        if step not in counted:
            session.decode(1)
            continue
        with recorded_choices(session.ops) as chosen:
            session.ops.host(session.decode_eagerly())
        steps.append([session.ops.host(ids) for ids in chosen])
    return steps


WORKLOAD_RUNNERS = {"pp": _prefill, "enc": _encode, "tg": _decode}


def cache_bytes_per_token(bench_model: BenchModel, test: Workload) -> float:
    """Bytes of the keys and values that a token reads and adds, and of its state; a chunk of ``pp`` reads them once."""
    if test.kind == "enc":
        return bench_model.cache_bytes(1)
    if test.kind == "tg":
        return bench_model.cache_bytes(test.depth + (test.tokens + 1) / 2 + 1, 1)
    chunk = min(test.tokens, bench_model.engine_config.max_num_batched_tokens)
    chunks = range(0, test.tokens, chunk)
    read = sum(test.depth + min(first + chunk, test.tokens) for first in chunks)
    return bench_model.cache_bytes(read / test.tokens + 1, len(chunks) / test.tokens)


def trace_step(bench_model: BenchModel, profiler: Profiler, batch: int = 1, depth: int = 0) -> Trace:
    """Time the parts of one decode step of ``batch`` sequences after ``depth`` tokens; results are checked.

    Of a divided model the parts are those of the first rank, whose sums wait for the others.
    """
    return on_each_rank(bench_model, profiler, partial(_traced, batch=batch, depth=depth))


def _traced(bench_model: BenchModel, profiler: Profiler, batch: int, depth: int) -> Trace:
    with closing(Session(bench_model, batch, depth + TRACED_STEPS + WARM_UP_STEPS)) as session:
        position = session.fill_context(depth)
        session.prepare_decode(position)
        session.decode(WARM_UP_STEPS)
        session.prepare_decode(position)
        seconds, results = profiler.time(lambda: session.decode(TRACED_STEPS))
        check_results(results, bench_model.engine_config.vocab_size, "the traced step")
        session.prepare_decode(position)
        session.set_max_context_len(position + 2)  # the trace runs two steps, whose bytes depend on this
        return Trace(depth, profiler.trace(session.decode_eagerly), seconds / TRACED_STEPS)


def time_kernels(profiler: Profiler) -> list[KernelTime]:
    """Time every kernel case of the profiler."""
    times = []
    for case in profiler.kernels():
        plain = profiler.plain_seconds(case.plain) if case.plain else None
        seconds = profiler.median_seconds(case.run)
        allocated = profiler.allocated(case.run)
        times.append(KernelTime(case.kernel, case.shape, seconds, case.nbytes, case.operations, plain, allocated))
    return times
