"""Turns for work that takes long: clients take turns, and none of them has all workers."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairTurns(Generic[T]):
    """Items that wait for one of ``workers``, of which a client has ``per_client`` at most. Thread-safe.

    Clients are served one after another, each client's items in their order. So one that sends many items, each of
    which takes long, delays its own.
    """

    def __init__(self, workers: int, per_client: int):
        self._free = workers
        self._per_client = per_client
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._waiting and not self._running

    def add(self, client: str, item: T) -> None:
        """Let an item wait; :meth:`start` returns it."""
        with self._lock:
            self._waiting.setdefault(client, deque()).append(item)

    def remove(self, client: str, item: T) -> bool:
        """Drop an item; returns False if it does not wait any more."""
        with self._lock:
            items = self._waiting.get(client, deque())
            if item not in items:
                return False
            items.remove(item)
            if not items:
                del self._waiting[client]
            return True

    def start(self) -> tuple[str, T] | None:
        """The client and the item whose turn it is, which takes a worker until :meth:`end`; None if none may start."""
        with self._lock:
            if not self._free:
                return None
            client = next((c for c in self._waiting if self._running[c] < self._per_client), None)
            if client is None:
                return None
            item = self._waiting[client].popleft()
            self._waiting.move_to_end(client)
            if not self._waiting[client]:
                del self._waiting[client]
            self._free -= 1
            self._running[client] += 1
            return client, item

    def end(self, client: str) -> None:
        """An item of ``client`` has ended."""
        with self._lock:
            self._free += 1
            self._running[client] -= 1
            self._running += Counter()  # drops zeros
