"""The pools of blocks that a cache consists of, and what each kind of group does with the blocks of a sequence.

A group is a set of layers that keep the same of a sequence: :class:`TokenGroup` tokens by a
:class:`~bminf_lite.backend.cache_values.Retention`, :class:`StateGroup` a state, :class:`SlotGroup` one that no result
depends on, :class:`SourceGroup` the sources of an encoder-decoder. :class:`.BlockManager` composes them, and does not
ask which is which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ..backend.cache_values import LatestState, Retention
from ..backend.values import NULL_BLOCK
from .prefix_index import PrefixIndex, block_key
from .snapshot_index import PrefixEnd, SnapshotIndex

SNAPSHOT_TOKENS = 4096
"""Tokens between two snapshots within a prompt, at least. A prompt of a chat is longer only with documents in it."""


class BlockIndex(Protocol):
    """Finds the blocks of a pool by keys."""

    def __contains__(self, block: int) -> bool: ...
    def find_end(self, key: bytes) -> int | None: ...
    def forget(self, block: int) -> None: ...


Index = TypeVar("Index", bound=BlockIndex)


class BlockPool(Generic[Index]):
    """The blocks of one group; block 0 is the null block, which no sequence holds."""

    def __init__(self, num_blocks: int, index: Index):
        self.num_blocks = num_blocks
        self.index = index
        self.highest = NULL_BLOCK
        """The highest block that was ever taken; lower ones are taken first."""
        self._holders = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`take` can give: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, and whose contents are of no use."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks that no sequence holds, and whose contents may be reused."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - 1 - self.num_available

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these indexed blocks no sequence holds."""
        return sum(map(self._idle.__contains__, blocks))

    def take(self) -> int:
        """A block for one holder: a free one, else the least recently used idle one, which leaves the index."""
        block = self._free.pop() if self._free else self._idle.popitem(last=False)[0]
        self.index.forget(block)
        self.highest = max(self.highest, block)
        self._holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks of the index."""
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] += 1

    def give_back(self, block: int) -> None:
        """Remove a holder. After the last one, the block is idle if it is in the index, else free."""
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if block in self.index:
                self._idle[block] = None
            else:
                self._free.append(block)

    def use(self, block: int) -> None:
        """Make an indexed block the most recently used one, if no sequence holds it."""
        if block in self._idle:
            self._idle.move_to_end(block)

    def discard(self, key: bytes) -> None:
        """Remove the block with this key from the index, so that its contents are not reused; free it if it is idle."""
        block = self.index.find_end(key)
        if block is not None:
            self.index.forget(block)
            self.free_if_idle(block)

    def free_if_idle(self, block: int) -> None:
        """Free a block that is not in the index any more, if no sequence holds it."""
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def check(self, held: Iterable[int]) -> None:
        """Assert that the accounts are exact; ``held`` has each block once for each of its holders."""
        counts = Counter(held)
        assert NULL_BLOCK not in counts and self._holders == [counts[b] for b in range(self.num_blocks)]
        assert sorted([*counts, *self._idle, *self._free]) == list(range(1, self.num_blocks))
        assert all(b in self.index for b in self._idle) and not any(b in self.index for b in self._free)


class PooledGroup(Generic[Index]):
    """Layers with common block tables, and their pool, whose index ``new_index`` makes."""

    def __init__(self, num_blocks: int, block_size: int, new_index: Callable[[], Index]):
        self.block_size = block_size
        self._new_index = new_index
        self.pool = BlockPool(num_blocks, new_index())

    def clear(self) -> None:
        """Forget the contents of every block. No sequence may hold one."""
        self.pool = BlockPool(self.pool.num_blocks, self._new_index())

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def shortage(self, num_tokens: int, needed: int) -> str | None:
        """Why the pool can't hold the ``needed`` blocks of a sequence of ``num_tokens`` tokens; None if it can."""
        have = self.pool.num_blocks - 1
        if needed <= have:
            return None
        return (
            f"{num_tokens:,} tokens need {needed:,} blocks of {self.block_size} tokens in the key-value cache, "
            f"which has {have:,}"
        )

    def release(self, table: list[int]) -> None:
        """Give the blocks of a table back. Later ones are evicted first: without earlier ones they are useless."""
        for block in reversed(table):
            if block != NULL_BLOCK:
                self.pool.give_back(block)
        table.clear()


class Group(PooledGroup[Index], ABC):
    """What :class:`.BlockManager` asks of the layers that keep what ``retention`` names of a sequence.

    ``has_snapshots``: a sequence can go on only where the group has a snapshot of a prefix. Then :meth:`keys_behind`
    names these, and other groups note the blocks in which they end (:meth:`note_end`).
    """

    has_snapshots = False

    def __init__(self, retention: Retention, num_blocks: int, block_size: int, new_index: Callable[[], Index]):
        super().__init__(num_blocks, block_size, new_index)
        self.retention = retention

    @abstractmethod
    def most_blocks(self, num_tokens: int, max_piece: int) -> int:
        """The most blocks that a sequence holds at once, if steps compute up to ``max_piece`` of its tokens."""

    @abstractmethod
    def num_hits(self, keys: Sequence[bytes]) -> int:
        """An upper bound of how many of the blocks with these keys can be reused."""

    @abstractmethod
    def sees(self, keys: Sequence[bytes], hits: int) -> bool:
        """Whether the pool has those of the first ``hits`` blocks that the token behind them sees."""

    @abstractmethod
    def find_start(self, parent: bytes, token_ids: Sequence[int]) -> tuple[bytes, int, int]:
        """A block behind ``parent`` to copy: key, number, and how many tokens from its first on are ``token_ids``."""

    @abstractmethod
    def find_end(self, key: bytes, count: int) -> int | None:
        """The block to copy for a prefix whose last ``count`` tokens fill no block; the null block for none.

        None if the group does not have it.
        """

    @abstractmethod
    def hit_blocks(self, keys: Sequence[bytes], hits: int, position: int) -> list[int]:
        """The blocks to share of a prefix of ``hits`` blocks, behind which a token at ``position`` is the next."""

    @abstractmethod
    def num_new(self, num_tokens: int, next_tokens: int, hits: int) -> int:
        """Blocks to take when a sequence starts behind ``hits`` blocks; it computes ``next_tokens`` of its tokens."""

    @abstractmethod
    def has_room(self, blocks: Sequence[int], new: int, spare: int, growth: int) -> bool:
        """Whether a sequence may start: ``new`` blocks are taken and the idle ``blocks`` are shared.

        ``spare`` blocks are to be left for the next tokens of others, and ``growth`` more where every token is kept.
        """

    @abstractmethod
    def can_grow(self, sequences: int, num_tokens: int) -> bool:
        """Whether one sequence may have ``num_tokens`` tokens more and ``sequences`` sequences the next one."""

    @abstractmethod
    def num_missing(self, table: Sequence[int], num_tokens: int) -> int:
        """Blocks that a table lacks for ``num_tokens`` tokens."""

    @abstractmethod
    def start(self, table: list[int], hits: int, blocks: Sequence[int]) -> None:
        """Fill an empty table with the shared ``blocks`` of ``hits`` that were found."""

    @abstractmethod
    def pass_blocks(self, table: list[int], num_computed: int) -> None:
        """Give back the blocks that no token from ``num_computed`` on sees."""

    @abstractmethod
    def enter(self, table: Sequence[int], place: int, key: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        """Enter the block at ``place`` of a table, which holds ``token_ids``, in the index."""

    @abstractmethod
    def note_end(self, table: Sequence[int], place: int, end: PrefixEnd) -> None:
        """Let the block at ``place`` of a table, in which a prefix with a snapshot ends, be found by that prefix."""

    def keep_state(self, table: Sequence[int], end: PrefixEnd) -> None:
        """Let a sequence's own slot stand for a prefix, once the sequence has left."""

    @abstractmethod
    def copied_block(self, table: Sequence[int], place: int) -> int:
        """The sequence's block that gets the contents of another, if its prefix ends in block ``place``."""

    def snapshot(self, table: Sequence[int], ends: Sequence[PrefixEnd], may_evict: bool) -> tuple[int, int] | None:
        """Take a slot for a snapshot of a sequence that stands for ``ends``; returns the copy to make.

        Null blocks where nothing is to be copied, and None where no slot is to be had.
        """
        return NULL_BLOCK, NULL_BLOCK

    def keys_behind(self, parent: bytes, token_ids: Callable[[], Sequence[int]]) -> list[tuple[int, bytes]]:
        """The snapshots of prefixes of ``parent`` and the next tokens: how many of these, the most first, and the key.

        None of a group without snapshots.
        """
        return []


class TokenGroup(Group[PrefixIndex]):
    """Layers that keep the tokens of a sequence that ``retention`` names."""

    def find_start(self, parent: bytes, token_ids: Sequence[int]) -> tuple[bytes, int, int]:
        return self.pool.index.find_start(parent, token_ids)

    def find_end(self, key: bytes, count: int) -> int | None:
        return self.pool.index.find_end(key) if count else NULL_BLOCK

    def num_new(self, num_tokens: int, next_tokens: int, hits: int) -> int:
        """Counts blocks for all tokens, or for the next ones where a window passes earlier ones."""
        return self.blocks_for(num_tokens if self.retention.keeps_all else min(num_tokens, next_tokens)) - hits

    def has_room(self, blocks: Sequence[int], new: int, spare: int, growth: int) -> bool:
        left, wanted = self.pool.num_available - new, spare + growth * self.retention.keeps_all
        return left - len(blocks) >= wanted or left - self.pool.count_idle(blocks) >= wanted

    def can_grow(self, sequences: int, num_tokens: int) -> bool:
        return self.pool.num_available >= sequences + self.blocks_for(num_tokens)

    def num_missing(self, table: Sequence[int], num_tokens: int) -> int:
        return self.blocks_for(num_tokens) - len(table)

    def start(self, table: list[int], hits: int, blocks: Sequence[int]) -> None:
        self.pool.share(blocks)
        table += [NULL_BLOCK] * (hits - len(blocks))
        table += blocks

    def enter(self, table: Sequence[int], place: int, key: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        if table[place] != NULL_BLOCK:
            self.pool.index.add(key, table[place], parent, token_ids)

    def note_end(self, table: Sequence[int], place: int, end: PrefixEnd) -> None:
        if end.rest and table[place] != NULL_BLOCK:
            self.pool.index.add_end(end.key, table[place])

    def copied_block(self, table: Sequence[int], place: int) -> int:
        return table[place]

    def most_blocks(self, num_tokens: int, max_piece: int) -> int:
        return self.retention.most_blocks(num_tokens, max_piece, self.block_size)

    def first_block(self, position: int) -> int:
        """The first block that a token at ``position`` sees."""
        return self.retention.first_visible(position) // self.block_size

    def num_hits(self, keys: Sequence[bytes]) -> int:
        return self.pool.index.num_leading(keys) if self.retention.keeps_all else len(keys)

    def sees(self, keys: Sequence[bytes], hits: int) -> bool:
        if self.retention.keeps_all:
            return True  # num_hits has looked
        first, find = self.first_block(hits * self.block_size), self.pool.index.find
        return all(find(key) is not None for key in reversed(keys[first:hits]))

    def hit_blocks(self, keys: Sequence[bytes], hits: int, position: int) -> list[int]:
        return self.pool.index.blocks_of(keys[self.first_block(position) : hits])

    def pass_blocks(self, table: list[int], num_computed: int) -> None:
        passed = min(self.first_block(num_computed), len(table)) - 1
        while passed >= 0 and table[passed] != NULL_BLOCK:
            self.pool.give_back(table[passed])
            table[passed] = NULL_BLOCK
            passed -= 1


class StateGroup(Group[SnapshotIndex]):
    """Layers that sum the tokens of a sequence up in a state; see :class:`~bminf_lite.layers.cache.State`.

    A sequence holds one slot, from its admission to its end. The other slots are free, or idle snapshots: copies of a
    sequence's slot, and slots that sequences have left. They are evicted like blocks, the least recently used first.
    """

    has_snapshots = True

    def most_blocks(self, num_tokens: int, max_piece: int) -> int:
        return 1

    def num_hits(self, keys: Sequence[bytes]) -> int:
        return len(keys)

    def sees(self, keys: Sequence[bytes], hits: int) -> bool:
        return True

    def find_start(self, parent: bytes, token_ids: Sequence[int]) -> tuple[bytes, int, int]:
        return b"", NULL_BLOCK, 0

    def find_end(self, key: bytes, count: int) -> int | None:
        return self.pool.index.find(key)

    def hit_blocks(self, keys: Sequence[bytes], hits: int, position: int) -> list[int]:
        return []

    def num_new(self, num_tokens: int, next_tokens: int, hits: int) -> int:
        return 1

    def has_room(self, blocks: Sequence[int], new: int, spare: int, growth: int) -> bool:
        return self.pool.num_available >= new

    def can_grow(self, sequences: int, num_tokens: int) -> bool:
        return True

    def num_missing(self, table: Sequence[int], num_tokens: int) -> int:
        return 1 - len(table)

    def shortage(self, num_tokens: int, needed: int) -> str | None:
        return None if needed < self.pool.num_blocks else "the cache has no slot for the state of a sequence"

    def blocks_for(self, num_tokens: int) -> int:
        return 1

    def start(self, table: list[int], hits: int, blocks: Sequence[int]) -> None:
        """Nothing is shared: a snapshot is copied."""

    def pass_blocks(self, table: list[int], num_computed: int) -> None:
        """The slot stays until the sequence ends."""

    def enter(self, table: Sequence[int], place: int, key: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        """A state has nothing of a block."""

    def note_end(self, table: Sequence[int], place: int, end: PrefixEnd) -> None:
        """A state has nothing of a block."""

    def keep_state(self, table: Sequence[int], end: PrefixEnd) -> None:
        self.pool.index.add(end, table[0])

    def copied_block(self, table: Sequence[int], place: int) -> int:
        return table[0]

    def snapshot(self, table: Sequence[int], ends: Sequence[PrefixEnd], may_evict: bool) -> tuple[int, int] | None:
        room = self.pool.num_available if may_evict else self.pool.num_free
        if room == 0 or all(self.pool.index.find(end.key) is not None for end in ends):
            return None
        slot = self.pool.take()
        for end in ends:
            self.pool.index.add(end, slot)
        self.pool.give_back(slot)
        return table[0], slot

    def keys_behind(self, parent: bytes, token_ids: Callable[[], Sequence[int]]) -> list[tuple[int, bytes]]:
        keys = self.pool.index.behind(parent)
        if not keys:
            return []
        packed = array("i", token_ids()).tobytes()
        found = ((len(rest) // 4, key) for rest, key in keys.items() if packed.startswith(rest))
        return sorted(found, reverse=True)

    def forget_block(self, key: bytes) -> None:
        """Evict the snapshots of prefixes that need a block which another group has forgotten."""
        for slot in self.pool.index.forget_block(key):
            self.pool.free_if_idle(slot)


class SlotGroup(StateGroup):
    """Layers with a state that no result depends on: a sequence has a slot, and goes on behind any prefix."""

    has_snapshots = False

    def find_start(self, parent: bytes, token_ids: Sequence[int]) -> tuple[bytes, int, int]:
        return b"", NULL_BLOCK, len(token_ids)

    def find_end(self, key: bytes, count: int) -> int | None:
        return NULL_BLOCK

    def keep_state(self, table: Sequence[int], end: PrefixEnd) -> None:
        """The slot is of no use to others."""

    def snapshot(self, table: Sequence[int], ends: Sequence[PrefixEnd], may_evict: bool) -> tuple[int, int] | None:
        return NULL_BLOCK, NULL_BLOCK

    def keys_behind(self, parent: bytes, token_ids: Callable[[], Sequence[int]]) -> list[tuple[int, bytes]]:
        return []


class SourceGroup(PooledGroup[PrefixIndex]):
    """The sources of an encoder-decoder. Each is read and kept as a whole, under keys that follow from its root."""

    def find(self, root: bytes, num_tokens: int) -> list[int] | None:
        """The blocks of a source if the pool has all of them."""
        found = [self.pool.index.find(key) for key in self.keys(root, num_tokens)]
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == len(found) else None

    def enter(self, root: bytes, num_tokens: int, table: Sequence[int]) -> None:
        """Enter the blocks of a source in the index, after its encoding has been launched."""
        for key, block in zip(self.keys(root, num_tokens), table, strict=True):
            self.pool.index.add(key, block)

    def discard(self, root: bytes, num_tokens: int) -> None:
        """Remove a source from the index."""
        for key in self.keys(root, num_tokens):
            self.pool.discard(key)

    def keys(self, root: bytes, num_tokens: int) -> list[bytes]:
        """The keys of a source's blocks."""
        return [block_key(root, (-1, i)) for i in range(self.blocks_for(num_tokens))]


def make_groups(
    retentions: Sequence[Retention], num_blocks: Sequence[int], block_size: int, start_tokens: int
) -> list[Group[Any]]:
    """The group of each retention. Snapshots leave with the blocks that their prefixes need."""
    states: list[StateGroup] = []

    def forget_block(key: bytes) -> None:
        for group in states:
            group.forget_block(key)

    has_snapshots = any(isinstance(kept, LatestState) and kept.has_snapshots for kept in retentions)
    on_forget = forget_block if has_snapshots else None
    groups: list[Group[Any]] = []
    for kept, count in zip(retentions, num_blocks, strict=True):
        if isinstance(kept, LatestState) and not kept.has_snapshots:
            groups.append(SlotGroup(kept, count, block_size, SnapshotIndex))
        elif kept.per_sequence:
            states.append(StateGroup(kept, count, block_size, SnapshotIndex))
            groups.append(states[-1])
        else:
            groups.append(TokenGroup(kept, count, block_size, lambda: PrefixIndex(start_tokens, on_forget)))
    return groups
