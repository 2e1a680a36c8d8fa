"""Adapters by name, and which of them lie in the slots of the devices.

Every adapter is in the host's memory. Steps read adapters from slots, which are fewer: a request takes a slot for its
adapter when it starts, and several requests with one adapter share it. A slot that no request uses keeps its adapter
until another one needs the slot: the least recently used goes first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from ..errors import UsageError

_serials = count(1)


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter in the host's memory: what the sites of each rank copy into their slot.

    ``serial`` is a number that no other adapter of this process has, also not a later one of the same ``name``.
    ``source`` is the folder that it came from. ``nbytes`` is the size of its factors in 16 bits, and ``rank`` the
    largest of a matrix.
    """

    name: str
    source: str
    rank: int
    nbytes: int
    prepared: Sequence[Sequence[Any]]
    serial: int


class AdapterWrite(NamedTuple):
    """The adapter of a slot from the next step on."""

    slot: int
    adapter: LoadedAdapter


class AdapterRegistry:
    """The adapters of a model by name. Any thread may add, remove and find them.

    A removed adapter serves the requests that have it, and is found by no other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._adapters: dict[str, LoadedAdapter] = {}

    def __iter__(self) -> Iterator[LoadedAdapter]:
        return iter(tuple(self._adapters.values()))

    def __len__(self) -> int:
        return len(self._adapters)

    def add(
        self,
        name: str,
        source: str,
        rank: int,
        nbytes: int,
        prepare: Callable[[], Sequence[Sequence[Any]]],
        replace: bool = False,
    ) -> LoadedAdapter:
        """Enter an adapter. Raises ``UsageError`` for a name that is in use, unless it is to ``replace`` that one."""
        if not replace:
            self._require_free(name)
        adapter = LoadedAdapter(name, source, rank, nbytes, prepare(), next(_serials))
        with self._lock:
            if not replace:
                self._require_free(name)
            self._adapters[name] = adapter
        return adapter

    def _require_free(self, name: str) -> None:
        if (found := self._adapters.get(name)) is not None:
            raise UsageError(f"adapter {name!r} is loaded already, from {found.source}: unload it first")

    def remove(self, name: str) -> LoadedAdapter:
        """Forget an adapter. Raises ``UsageError`` for a name that is not in use."""
        with self._lock:
            return self._adapters.pop(self.find(name).name)

    def find(self, name: str) -> LoadedAdapter:
        """The adapter with this name. Raises ``UsageError`` if there is none."""
        found = self._adapters.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(map(repr, tuple(self._adapters))) or "none"
            raise UsageError(f"adapter is {name!r}, but the model has {known}: load it first (adapters=, load_adapter)")
        return found


class AdapterSlotTable:
    """Which adapter lies in which of ``num_slots`` slots, numbered from 1, and how many requests use each.

    Slots are given in the engine's thread. ``clear`` forgets the requests and what was to be written.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.clear()

    def clear(self) -> None:
        """Empty every slot."""
        self._slots: OrderedDict[LoadedAdapter, int] = OrderedDict()  # the least recently used first
        self._free = list(range(1, self.num_slots + 1))[::-1]
        self._users: dict[LoadedAdapter, int] = {}
        self._writes: list[AdapterWrite] = []

    def has_room(self, adapter: LoadedAdapter | None) -> bool:
        """Whether :meth:`acquire` finds a slot."""
        return adapter is None or adapter in self._slots or bool(self._free) or self._idle() is not None

    def acquire(self, adapter: LoadedAdapter | None) -> int:
        """The slot of an adapter, for one more request; 0 for none. Check :meth:`has_room` first."""
        if adapter is None:
            return 0
        if adapter not in self._slots:
            idle = None if self._free else self._idle()
            if idle is not None:
                self._free.append(self._slots.pop(idle))
            self._slots[adapter] = self._free.pop()
            self._writes.append(AdapterWrite(self._slots[adapter], adapter))
        self._slots.move_to_end(adapter)
        self._users[adapter] = self._users.get(adapter, 0) + 1
        return self._slots[adapter]

    def release(self, adapter: LoadedAdapter | None) -> None:
        """One request less uses an adapter. Steps under way may still read its slot: a later write comes after them."""
        if adapter is None:
            return
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]

    def take_writes(self) -> Sequence[AdapterWrite]:
        """The slots that were given to other adapters since the last call, in order."""
        writes, self._writes = self._writes, []
        return writes

    def _idle(self) -> LoadedAdapter | None:
        """The least recently used adapter that no request uses."""
        return next((adapter for adapter in self._slots if adapter not in self._users), None)
