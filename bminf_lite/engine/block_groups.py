"""The pools of blocks that a cache consists of, and what each kind of group does with the blocks of a sequence.

A group is a set of layers that keep the same tokens: :class:`TokenGroup` by a
:class:`~bminf_lite.backend.values.Retention`, :class:`SourceGroup` the sources of an encoder-decoder.
:class:`.BlockManager` composes them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from ..backend.values import NULL_BLOCK, Retention
from .prefix_index import PrefixIndex, block_key


class BlockPool:
    """The blocks of one group; block 0 is the null block, which no sequence holds."""

    def __init__(self, num_blocks: int, start_tokens: int):
        self.num_blocks = num_blocks
        self.index = PrefixIndex(start_tokens)
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

    def discard(self, key: bytes) -> None:
        """Remove the block with this key from the index, so that its contents are not reused; free it if it is idle."""
        block = self.index.find(key)
        if block is not None:
            self.index.forget(block)
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def check(self, held: Iterable[int]) -> None:
        """Assert that the accounts are exact; ``held`` has each block once for each of its holders."""
        counts = Counter(held)
        assert NULL_BLOCK not in counts and self._holders == [counts[b] for b in range(self.num_blocks)]
        assert sorted([*counts, *self._idle, *self._free]) == list(range(1, self.num_blocks))
        assert all(b in self.index for b in self._idle) and not any(b in self.index for b in self._free)


class Group:
    """Layers with common block tables, and their pool."""

    def __init__(self, num_blocks: int, block_size: int, start_tokens: int):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, start_tokens)

    def clear(self) -> None:
        """Forget the contents of every block. No sequence may hold one."""
        self.pool = BlockPool(self.pool.num_blocks, self.pool.index.start_tokens)

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


class TokenGroup(Group):
    """Layers that keep the tokens of a sequence that ``retention`` names."""

    def __init__(self, retention: Retention, num_blocks: int, block_size: int, start_tokens: int):
        super().__init__(num_blocks, block_size, start_tokens)
        self.retention = retention

    def most_blocks(self, num_tokens: int, max_piece: int) -> int:
        """The most blocks that a sequence holds at once, if steps compute up to ``max_piece`` of its tokens."""
        return self.retention.most_blocks(num_tokens, max_piece, self.block_size)

    def first_block(self, position: int) -> int:
        """The first block that a token at ``position`` sees."""
        return self.retention.first_visible(position) // self.block_size

    def end(self, num_tokens: int, next_tokens: int) -> int:
        """Up to which token a sequence gets blocks when it starts: all, or ``next_tokens`` where earlier ones pass."""
        return num_tokens if self.retention.keeps_all else min(num_tokens, next_tokens)

    def num_hits(self, keys: Sequence[bytes]) -> int:
        """An upper bound of how many of the blocks with these keys can be reused."""
        return self.pool.index.num_leading(keys) if self.retention.keeps_all else len(keys)

    def sees(self, keys: Sequence[bytes], hits: int) -> bool:
        """Whether the pool has those of the first ``hits`` blocks that the token behind them sees."""
        if self.retention.keeps_all:
            return True  # num_hits has looked
        first, find = self.first_block(hits * self.block_size), self.pool.index.find
        return all(find(key) is not None for key in reversed(keys[first:hits]))

    def hit_blocks(self, keys: Sequence[bytes], hits: int, position: int) -> list[int]:
        """The blocks of a prefix of ``hits`` blocks, from the first that a token at ``position`` sees."""
        return self.pool.index.blocks_of(keys[self.first_block(position) : hits])

    def has_room(self, blocks: Sequence[int], new: int, wanted: int) -> bool:
        """Whether ``wanted`` blocks are left after ``new`` ones are taken and the idle ``blocks`` are shared."""
        left = self.pool.num_available - new
        return left - len(blocks) >= wanted or left - self.pool.count_idle(blocks) >= wanted

    def pass_blocks(self, table: list[int], num_computed: int) -> None:
        """Give back the blocks that no token from ``num_computed`` on sees."""
        passed = min(self.first_block(num_computed), len(table)) - 1
        while passed >= 0 and table[passed] != NULL_BLOCK:
            self.pool.give_back(table[passed])
            table[passed] = NULL_BLOCK
            passed -= 1


class SourceGroup(Group):
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
