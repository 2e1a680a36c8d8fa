"""The ranks of a model under tensor parallelism, and the one thing that they exchange: sums.

Each rank is a backend of its own with a part of every matrix (https://arxiv.org/abs/1909.08053). Attention's heads and
the hidden units of feed-forward layers are divided among the ranks, so a layer's first matrices need no exchange, and
the products of its last ones are added. All ranks get the same bits, so their residual streams, logits and chosen
tokens are the same.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from .values import Array

T = TypeVar("T")

WAIT_SECONDS = 600.0
"""How long a simulated rank waits for the others: longer than any layer takes, so that one that hangs is noticed."""


class RankFailed(RuntimeError):
    """Another rank has failed, so this one cannot go on."""


class Communicator(Protocol):
    """One rank's connection to the others."""

    @property
    def tp_rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def tp_size(self) -> int:
        """How many ranks there are."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory that the connection takes."""

    def all_reduce_add(self, x: Array) -> Array:
        """The sum of all ranks' ``x``, fp32 of one shape, added in the order of the ranks: ``(x0 + x1) + x2``.

        Every rank calls this at the same places, and gets the same bits. ``x`` may be overwritten. Raises
        :class:`RankFailed` once a rank has called :meth:`abort`.
        """

    def abort(self) -> None:
        """Let no rank wait for this one, because it has failed."""

    def reset(self) -> None:
        """Begin anew after :meth:`abort`. No rank may be waiting, and one calls this for all."""

    def check(self) -> None:
        """Raise an error that names the rank if this one or another was given up since the start."""

    def close(self) -> None:
        """Give the memory of all connections back. No rank may compute afterwards; twice is harmless."""


@dataclass(frozen=True)
class OneRank:
    """A model that is not divided; with a ``tp_size``, a part of one that is only measured."""

    tp_rank: int = 0
    tp_size: int = 1
    nbytes: int = 0

    def all_reduce_add(self, x: Array) -> Array:
        return x

    def abort(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class RankApart(OneRank):
    """A rank that computes apart from the others, and shares with them only whether one has failed.

    Work that takes long calls :meth:`check` now and then, so that it ends when another rank's work has failed.
    """

    _failed: threading.Event = field(default_factory=threading.Event)

    def abort(self) -> None:
        self._failed.set()

    def reset(self) -> None:
        self._failed.clear()

    def check(self) -> None:
        if self._failed.is_set():
            raise RankFailed("another rank has failed")


@dataclass
class _Meeting:
    """What threads share that are ranks: a place for the array of each, and a barrier."""

    tp_size: int
    arrays: list[Array] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.arrays = [None] * self.tp_size
        self.barrier = threading.Barrier(self.tp_size, timeout=WAIT_SECONDS)

    def wait(self) -> None:
        """Wait until all ranks are here."""
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankFailed("another rank has failed") from error


@dataclass(frozen=True)
class SimulatedRank:
    """A rank that is a thread of this process. Its arrays are NumPy's."""

    tp_rank: int
    tp_size: int
    _meeting: _Meeting
    nbytes: int = 0

    def all_reduce_add(self, x: Array) -> Array:
        self._meeting.arrays[self.tp_rank] = x
        self._meeting.wait()
        total = functools.reduce(operator.add, self._meeting.arrays)  # a new array, because the others read these
        self._meeting.wait()
        return total

    def abort(self) -> None:
        self._meeting.barrier.abort()

    def reset(self) -> None:
        self._meeting.barrier.reset()

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def simulated_ranks(tp_size: int) -> list[SimulatedRank]:
    """The connections of ``tp_size`` ranks, each for a thread."""
    meeting = _Meeting(tp_size)
    return [SimulatedRank(rank, tp_size, meeting) for rank in range(tp_size)]


class RankThreads:
    """Does the work of all ranks at once: the first one's in the caller's thread, that of each other in its own.

    ``make_current`` has a function for each rank, which its own thread calls before its first work.
    """

    def __init__(self, ranks: Sequence[Communicator], make_current: Sequence[Callable[[], None]]):
        self.ranks = ranks
        self._make_current = make_current
        self._has_started = [rank == 0 for rank in range(len(make_current))]
        self._threads = [_RankThread(f"rank-{i}") for i in range(1, len(make_current))]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """``work`` of each rank's number. If one fails, the others are stopped, and its error is raised."""

        def guarded(rank: int) -> T:
            try:
                if not self._has_started[rank]:
                    self._make_current[rank]()
                    self._has_started[rank] = True
                return work(rank)
            except BaseException as error:
                try:
                    self.ranks[rank].abort()
                except Exception as failure:
                    raise error from failure
                raise

        others = [thread.start(functools.partial(guarded, rank)) for rank, thread in enumerate(self._threads, 1)]
        errors: list[BaseException] = []
        results: list[T] = []
        try:
            results.append(guarded(0))
        except BaseException as failure:
            errors.append(failure)
        for ended in others:
            result, error = ended.get()
            if error is not None:
                errors.append(error)
            else:
                results.append(result)
        if errors:
            first = next((error for error in errors if not isinstance(error, RankFailed)), errors[0])
            try:
                self.ranks[0].reset()
            except Exception as failure:  # a device that has failed: its own error came first
                raise first from failure
            raise first
        return results

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.close()


class RankDevice(Protocol):
    """A backend, as a rank."""

    @property
    def communicator(self) -> Communicator:
        """Its connection to the others."""

    def make_current(self) -> None:
        """Let the calling thread use the device."""


def on_ranks(devices: Sequence[RankDevice], work: Callable[[int], T]) -> list[T]:
    """``work`` of each rank's number, once; see :meth:`RankThreads.run`."""
    if len(devices) == 1:
        return [work(0)]
    threads = RankThreads([device.communicator for device in devices], [device.make_current for device in devices])
    try:
        return threads.run(work)
    finally:
        threads.close()


def on_ranks_apart(devices: Sequence[RankDevice], work: Callable[[int, Callable[[], None]], T]) -> list[T]:
    """``work`` of each rank's number, once, on devices that exchange nothing; the first one's in the caller's thread.

    ``work`` also gets a function that it calls now and then, which raises :class:`RankFailed` once another rank has
    failed. The error of that one is raised here, after all have ended.
    """
    failed = threading.Event()
    ranks = [RankApart(_failed=failed) for _ in devices]
    ended = [threading.Event() for _ in devices]

    def alone(rank: int) -> T:
        try:
            if rank:
                devices[rank].make_current()
            return work(rank, ranks[rank].check)
        finally:
            ended[rank].set()

    threads = RankThreads(ranks, [_nothing] * len(devices))
    try:
        return threads.run(alone)
    except BaseException:  # Ctrl-C may come while the caller waits for the others
        failed.set()
        for event in ended:
            event.wait()
        raise
    finally:
        threads.close()


def _nothing() -> None:
    """What a thread does whose work takes the device itself."""


class _RankThread:
    """A thread that does one work after another. Queues wake it in a tenth of the time that futures take."""

    def __init__(self, name: str):
        self._works: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = SimpleQueue()
        threading.Thread(target=_run_works, args=(self._works,), name=name, daemon=True).start()
        self._finalizer = weakref.finalize(self, self._works.put, None)

    def start(self, work: Callable[[], T]) -> SimpleQueue[tuple[T, BaseException | None]]:
        """Start a work. What it returns or raises comes through the queue."""
        ended: SimpleQueue[tuple[T, BaseException | None]] = SimpleQueue()
        self._works.put((work, ended))
        return ended

    def close(self) -> None:
        self._finalizer()


def _run_works(works: SimpleQueue[Any]) -> None:
    while (item := works.get()) is not None:
        work, ended = item
        try:
            ended.put((work(), None))
        except BaseException as error:
            ended.put((None, error))
        del item, work, ended  # nothing of a model is kept while the thread waits


def shard_heads(count: int, ranks: Communicator) -> slice:
    """This rank's part of ``count`` heads of keys and values: a run of them, or one that several ranks have.

    ``tp_size`` divides ``count``, or is a multiple of it.
    """
    if count % ranks.tp_size == 0:
        return shard(count, ranks)
    first = ranks.tp_rank * count // ranks.tp_size
    return slice(first, first + 1)


def shard(count: int, ranks: Communicator) -> slice:
    """This rank's part of ``count`` heads, rows or columns, which ``tp_size`` divides: a run of them."""
    width, rest = divmod(count, ranks.tp_size)
    assert rest == 0, f"{count} is not divisible by {ranks.tp_size}"
    return slice(ranks.tp_rank * width, (ranks.tp_rank + 1) * width)
