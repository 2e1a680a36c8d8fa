"""Finds snapshots of states by the prefix that they stand for.

A layer with a state cannot go back to an earlier position. So a prefix is reused exactly where there is a snapshot: a
slot that no sequence holds. Its prefix consists of full blocks, the last of which is its parent, and of the ``rest``,
fewer tokens than a block has. If there is no rest, the prefix has the key of its parent. A slot may stand for two
prefixes, of which one has a token more (see :class:`.State`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .prefix_index import block_key


class PrefixEnd(NamedTuple):
    """The end of a prefix: its ``key``, the key of its last full block (or the root), and the tokens behind it."""

    key: bytes
    parent: bytes
    rest: bytes

    @classmethod
    def of(cls, parent: bytes, token_ids: Sequence[int]) -> PrefixEnd:
        """The end of a prefix: full blocks up to ``parent``, then ``token_ids``."""
        if not len(token_ids):
            return cls(parent, parent, b"")
        return cls(block_key(parent, token_ids), parent, array("i", token_ids).tobytes())


class SnapshotIndex:
    """Slots by the prefixes that they stand for, one slot for each prefix."""

    def __init__(self) -> None:
        self._slot_of: dict[bytes, int] = {}
        self._ends_of: dict[int, list[PrefixEnd]] = {}
        self._behind: dict[bytes, dict[bytes, bytes]] = {}

    def __len__(self) -> int:
        return len(self._ends_of)

    def __contains__(self, slot: int) -> bool:
        return slot in self._ends_of

    def find(self, key: bytes) -> int | None:
        """The slot that stands for the prefix with this key."""
        return self._slot_of.get(key)

    find_end = find

    def behind(self, parent: bytes) -> Mapping[bytes, bytes]:
        """The keys of the prefixes that end less than a block behind ``parent``, by their rests."""
        return self._behind.get(parent, {})

    def add(self, end: PrefixEnd, slot: int) -> None:
        """Enter a slot. An earlier one for the same prefix stays."""
        if end.key not in self._slot_of:
            self._slot_of[end.key] = slot
            self._ends_of.setdefault(slot, []).append(end)
            self._behind.setdefault(end.parent, {})[end.rest] = end.key

    def forget(self, slot: int) -> None:
        """Remove a slot, whose contents are about to change."""
        for end in self._ends_of.pop(slot, ()):
            self._remove(end)

    def forget_block(self, key: bytes) -> list[int]:
        """Remove the prefixes that need a block which a key does not find any more: its own and those behind it.

        Returns the slots that stand for no prefix any more.
        """
        keys = {key, *self.behind(key).values()}
        slots = {slot for slot in map(self._slot_of.get, keys) if slot is not None}
        for slot in slots:
            for end in self._ends_of[slot]:
                if end.key in keys:
                    self._remove(end)
            self._ends_of[slot] = [end for end in self._ends_of[slot] if end.key not in keys]
        gone = [slot for slot in slots if not self._ends_of[slot]]
        for slot in gone:
            del self._ends_of[slot]
        return gone

    def _remove(self, end: PrefixEnd) -> None:
        del self._slot_of[end.key]
        siblings = self._behind[end.parent]
        del siblings[end.rest]
        if not siblings:
            del self._behind[end.parent]
