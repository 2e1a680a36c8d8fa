"""Finds accesses that nothing orders: to a block's shared memory, and to memory that earlier kernels may still write.

A GPU leaves their result to chance, and mostly the result is right. Two accesses of shared memory are ordered if one
thread makes both, or if both threads join a barrier in between; threads of one warp may join it by ``__syncwarp``. A
thread that reads a bulk copy must have waited for its mbarrier itself. Neither lockstep nor an exchange between the
lanes of a warp orders accesses. Of the accesses to a word that nothing orders among themselves, two are known, so a
race with another one can be missed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum

import numpy as np

WORD = 4
"""Bytes that are not told apart: an access to a part of a word is taken for one to all of it."""
WARP = 32
WARP_BARRIER = -1
"""The number of ``__syncwarp`` among the barriers."""
NO_WORDS = np.zeros(0, np.int64)


def words(addresses: np.ndarray, nbytes: int) -> np.ndarray:
    """The words of accesses of ``nbytes`` bytes, ``[accesses, words of an access]``."""
    return addresses[:, None] // WORD + np.arange(-(-nbytes // WORD))


class LaunchOrder:
    """What kernels may still write when the next one starts: programmatic dependent launch, on one stream.

    A dependent kernel can start when each block of its predecessor has let it start or has ended. What the predecessor
    has written is visible to it only behind its wait. Every dependent kernel waits, so when one has ended, all kernels
    before it have.

    A kernel may add to a counter behind its own wait (release). Of what is pending, the next kernel, which acquires the
    counter, finds incomplete only what that kernel itself writes: ``behind_counter``, None without a counter.
    """

    def __init__(self) -> None:
        self._pending = NO_WORDS
        self.behind_counter: np.ndarray | None = None

    def start(self, dependent: bool) -> np.ndarray:
        """The words that may still be written when a kernel starts, sorted."""
        if not dependent:
            self.complete()
        return self._pending

    def end(self, written: Sequence[np.ndarray], early: bool, released: bool = False) -> None:
        """The kernel that started has written these words.

        ``early``: its successor can start before the kernels before it have ended. ``released``: it added to a counter.
        """
        self.behind_counter = np.unique(np.concatenate([*written, NO_WORDS])) if released else None
        pending = np.concatenate([*written, self._pending if early else NO_WORDS])
        pending.sort(kind="stable")  # quick where addresses ascend already
        self._pending = pending[np.diff(pending, prepend=-1) != 0]

    def complete(self) -> None:
        """What has started has ended."""
        self._pending, self.behind_counter = NO_WORDS, None


class Kind(Enum):
    """What a thread does with a word. Additions are atomic, so they need no order among themselves."""

    READ = "read"
    WRITE = "wrote"
    ADD = "added"


class _Accesses:
    """For each word, two threads that accessed it last, and when."""

    def __init__(self, count: int) -> None:
        self.thread = np.full((2, count), -1, np.int32)
        self.time = np.zeros((2, count), np.int32)


class SharedMemory:
    """The accesses of a launch to shared memory, of ``threads`` in blocks of ``block``.

    Bytes and threads are numbered through all blocks. Mbarriers have any name.
    """

    def __init__(self, nbytes: int, threads: int, block: int) -> None:
        count = -(-nbytes // WORD)
        self._now, self._threads = 0, threads
        self._accesses = {kind: _Accesses(count) for kind in Kind}
        self._copied = np.full(count, -1, np.int32)  # the mbarrier of the last write, if that was a copy
        self._joined: dict[int, np.ndarray] = {}  # by barrier, when each thread left it last
        self._mbarriers: dict[Hashable, int] = {}
        self._waited = np.zeros((0, block), np.int32)  # for each mbarrier, when each thread waited for it last

    def join(self, threads: np.ndarray, barrier: int) -> None:
        """These threads leave a barrier."""
        self._joined.setdefault(barrier, np.zeros(self._threads, np.int32))[threads] = self._tick()

    def add_mbarriers(self, mbarriers: Sequence[Hashable]) -> None:
        """These mbarriers begin to count copies."""
        for mbarrier in mbarriers:
            self._mbarriers.setdefault(mbarrier, len(self._mbarriers))
        if len(self._mbarriers) > len(self._waited):  # make room for as many again
            self._waited = np.pad(self._waited, ((0, len(self._mbarriers)), (0, 0)))

    def wait(self, mbarriers: Sequence[Hashable], threads: np.ndarray) -> None:
        """Each thread has waited for the copies of its mbarrier."""
        numbers = [self._mbarriers[mbarrier] for mbarrier in mbarriers]
        self._waited[numbers, threads % self._waited.shape[1]] = self._tick()

    def access(self, kind: Kind, addresses: np.ndarray, nbytes: int, threads: np.ndarray) -> None:
        """Each thread accesses ``nbytes`` bytes."""
        touched = words(addresses, nbytes)
        self._note(kind, touched.ravel(), np.repeat(threads, touched.shape[1]))

    def copy(self, address: int, nbytes: int, thread: int, mbarrier: Hashable) -> None:
        """A thread starts a bulk copy to shared memory, which an mbarrier counts."""
        touched = words(np.array([address]), nbytes)[0]
        self._note(Kind.WRITE, touched, np.full(touched.shape, thread))
        self._copied[touched] = self._mbarriers[mbarrier]

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _note(self, kind: Kind, touched: np.ndarray, threads: np.ndarray) -> None:
        for earlier, accesses in self._accesses.items():
            if earlier != kind or kind == Kind.WRITE:
                after = self._ordered(accesses, touched, threads)
                if earlier == Kind.WRITE:
                    after = self._waited_for(touched, threads, after)
                what = f"what another thread {earlier.value}"
                assert after.all(), f"nothing orders an access to shared memory behind {what}"
        self._add(self._accesses[kind], touched, threads)
        if kind == Kind.WRITE:
            alone = self._accesses[kind].thread[0, touched] == threads
            assert alone.all(), "two threads write the same word of shared memory at once"
            self._copied[touched] = -1

    def _waited_for(self, touched: np.ndarray, threads: np.ndarray, else_: np.ndarray) -> np.ndarray:
        """Whether each thread has waited for the copy of its word; ``else_`` for words that were not copied."""
        copied = self._copied[touched]
        if (copied < 0).all():
            return else_
        waited = self._waited[copied, threads % self._waited.shape[1]]
        return np.where(copied < 0, else_, waited > self._accesses[Kind.WRITE].time[0, touched])

    def _ordered(self, earlier: _Accesses, touched: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Whether each thread comes behind the earlier accesses to its word."""
        result = np.ones(touched.shape, np.bool_)
        for slot in range(2):
            thread = earlier.thread[slot, touched]
            ordered = (thread == threads) | (thread < 0)
            if ordered.all():
                continue
            time = earlier.time[slot, touched]
            for barrier, joined in self._joined.items():
                both = time < np.minimum(joined[thread], joined[threads])
                ordered |= both & (thread // WARP == threads // WARP) if barrier == WARP_BARRIER else both
            result &= ordered
        return result

    def _add(self, accesses: _Accesses, touched: np.ndarray, threads: np.ndarray) -> None:
        """Earlier accesses that are ordered are forgotten: the last and the first thread at a word take their place.

        Else the thread takes the second place.
        """
        after, now = self._ordered(accesses, touched, threads), self._tick()
        replaced, beside = touched[after], touched[~after]
        for slot, step in enumerate((1, -1)):
            accesses.thread[slot, replaced[::step]] = threads[after][::step]
            accesses.time[slot, replaced] = now
        accesses.thread[1, beside], accesses.time[1, beside] = threads[~after], now
