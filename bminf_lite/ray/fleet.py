"""Gives blocks to replicas, and what a lost replica had to others.

Ray Data's pool of actors is not used for this: the blocks of an actor that has ended wait there until the same actor
runs again, which on a cluster of fixed size is never (Ray 2.60, ``actor_pool_map_operator.py``). Ray says which actors
have ended, and starts others where there is room.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from ..batch.plan import BatchBlock
from ..batch.runner import Counts
from ..errors import BminfError, UsageError
from ..server.client import EngineFailure

MAX_FAILED_STARTS = 3
"""A batch ends when this number of replicas in a row could not be started."""
MAX_ATTEMPTS = 5
"""A batch ends when this number of replicas have ended while they had the same block."""
MAX_REPORTS = 100
"""Reports of progress per second, of all replicas. A replica reports at most every second."""
RECRUIT_SECONDS = 2.0
"""How often the cluster is asked whether there is room for more replicas."""


@dataclass(eq=False)
class _Member:
    """A replica. ``room`` is the number of blocks that it takes at a time, 0 until it has started."""

    actor: Any
    room: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class _Call:
    """A call of a replica's method that has not ended; ``block`` is what it answers."""

    member: _Member
    method: str
    block: BatchBlock | None = None


@dataclass(eq=False)
class Fleet:
    """The replicas of a batch.

    - ``start``: starts an actor :class:`.Replica`. ``size``: how many there should be now.
    - ``told`` is called with what was answered since the last call.
    """

    start: Callable[[], Any]
    size: Callable[[], int]
    told: Callable[[Counts], None]
    _members: list[_Member] = field(default_factory=list, init=False)
    _calls: dict[Any, _Call] = field(default_factory=dict, init=False)
    _queue: deque[BatchBlock] = field(default_factory=deque, init=False)
    _attempts: dict[BatchBlock, int] = field(default_factory=dict, init=False)
    _failed_starts: int = field(default=0, init=False)
    _looked: float = field(default=float("-inf"), init=False)

    def run(self, blocks: Sequence[BatchBlock]) -> Counts:
        """Answer blocks, the first ones first. Raises what a replica raises, and ``BminfError``."""
        self._queue.extend(blocks)
        total, left = Counts(), len(blocks)
        try:
            while left:
                self._recruit(left)
                self._hand_out()
                for ref in self._ended():
                    counts = self._settle(ref)
                    if counts is not None:
                        total.add_all(counts)
                        left -= 1
        finally:
            for member in self._members:
                ray.kill(member.actor)
        return total

    def _recruit(self, left: int) -> None:
        """Start replicas, as many as there should be, and no more than there are blocks."""
        if time.monotonic() < self._looked + RECRUIT_SECONDS:
            return
        self._looked = time.monotonic()
        for _ in range(min(self.size(), left) - len(self._members)):
            member = _Member(self.start())
            self._members.append(member)
            self._call(member, "start")

    def _hand_out(self) -> None:
        """Give blocks to the replicas that have fewest, and near the end to each the same number."""
        under_way = sum(member.blocks for member in self._members)
        share = -(-(len(self._queue) + under_way) // max(1, len(self._members)))
        while self._queue:
            takers = [member for member in self._members if member.blocks < min(member.room, share)]
            if not takers:
                return
            member = min(takers, key=lambda member: member.blocks)
            member.blocks += 1
            block = self._queue.popleft()
            self._call(member, "answer", block, block=block)

    def _call(self, member: _Member, method: str, *arguments: object, block: BatchBlock | None = None) -> None:
        self._calls[getattr(member.actor, method).remote(*arguments)] = _Call(member, method, block)

    def _ended(self) -> list[Any]:
        """The calls that have ended, when there is one, or after a while none."""
        refs = list(self._calls)
        if not refs:
            time.sleep(RECRUIT_SECONDS)
            return []
        first, _ = ray.wait(refs, timeout=RECRUIT_SECONDS, fetch_local=False)
        return ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0] if first else []

    def _settle(self, ref: Any) -> Counts | None:
        """Take what a call has brought. Returns the counts of a block that is complete."""
        call = self._calls.pop(ref, None)
        if call is None:
            return None  # of a replica that was lost
        try:
            value = ray.get(ref)
        except RayActorError as error:
            self._lose(call, error)
            return None
        except RayTaskError as error:
            if call.method != "start" and not isinstance(error.cause, EngineFailure):
                raise error.cause from None
            self._lose(call, error.cause)
            return None
        member = call.member
        if call.method == "answer":
            member.blocks -= 1
            return value  # type: ignore[no-any-return]
        if call.method == "start":
            self._failed_starts, member.room = 0, value
        else:
            self.told(value)
        self._call(member, "progress", max(1.0, len(self._members) / MAX_REPORTS))
        return None

    def _lose(self, call: _Call, error: Exception) -> None:
        """A replica has ended: others get its blocks, the unfinished rows of which are answered again."""
        member = call.member
        lost = [ref for ref, other in self._calls.items() if other.member is member]
        blocks = [call.block, *(self._calls.pop(ref).block for ref in lost)]
        self._members.remove(member)
        self._looked = float("-inf")
        ray.kill(member.actor)
        if not member.room:
            if isinstance(error, UsageError):  # which others would raise too
                raise error
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                text = str(error) if isinstance(error, BminfError) else f"{type(error).__name__}: {error}"
                raise BminfError(f"{self._failed_starts} replicas in a row could not be started; the last: {text}")
        for block in sorted((block for block in blocks if block is not None), key=lambda b: b.first_row, reverse=True):
            self._attempts[block] = self._attempts.get(block, 0) + 1
            if self._attempts[block] >= MAX_ATTEMPTS:
                rows = f"{block.first_row:,} to {block.first_row + block.num_rows - 1:,}"
                problem = f"{MAX_ATTEMPTS} replicas have ended while they answered the rows {rows}"
                raise BminfError(f"{problem}; the last: {error}\nwhat is finished is kept: the same command goes on")
            self._queue.appendleft(block)
