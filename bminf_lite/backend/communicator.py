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
from dataclasses import dataclass, field
from typing import Protocol

from .values import Array

WAIT_SECONDS = 600.0
"""How long a simulated rank waits for the others: longer than any layer takes, so that one that failed is noticed."""


class Communicator(Protocol):
    """One rank's connection to the others."""

    @property
    def tp_rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def tp_size(self) -> int:
        """How many ranks there are."""

    def all_reduce_add(self, x: Array) -> Array:
        """The sum of all ranks' ``x``, fp32 of one shape, added in the order of the ranks: ``(x0 + x1) + x2``.

        Every rank calls this at the same places, and gets the same bits. ``x`` may be overwritten.
        """


@dataclass(frozen=True)
class OneRank:
    """A model that is not divided."""

    tp_rank: int = 0
    tp_size: int = 1

    def all_reduce_add(self, x: Array) -> Array:
        return x


@dataclass
class _Meeting:
    """What threads share that are ranks: a place for the array of each, and a barrier."""

    tp_size: int
    arrays: list[Array] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.arrays = [None] * self.tp_size
        self.barrier = threading.Barrier(self.tp_size, timeout=WAIT_SECONDS)


@dataclass(frozen=True)
class SimulatedRank:
    """A rank that is a thread of this process. Its arrays are NumPy's.

    If one rank :meth:`leaves <leave>`, waiting ranks and those that come later raise ``BrokenBarrierError``.
    """

    tp_rank: int
    tp_size: int
    _meeting: _Meeting

    def all_reduce_add(self, x: Array) -> Array:
        meeting = self._meeting
        meeting.arrays[self.tp_rank] = x
        meeting.barrier.wait()
        total = functools.reduce(operator.add, meeting.arrays)  # a new array, because the others read these
        meeting.barrier.wait()
        return total

    def leave(self) -> None:
        """Let no rank wait for this one, because it has failed."""
        self._meeting.barrier.abort()


def simulated_ranks(tp_size: int) -> list[SimulatedRank]:
    """The connections of ``tp_size`` ranks, each for a thread."""
    meeting = _Meeting(tp_size)
    return [SimulatedRank(rank, tp_size, meeting) for rank in range(tp_size)]


def shard(count: int, ranks: Communicator) -> slice:
    """This rank's part of ``count`` heads, rows or columns, which ``tp_size`` divides: a run of them."""
    width, rest = divmod(count, ranks.tp_size)
    assert rest == 0, f"{count} is not divisible by {ranks.tp_size}"
    return slice(ranks.tp_rank * width, (ranks.tp_rank + 1) * width)
