"""Gives the blocks of the key-value cache to sequences. It counts and names blocks, and holds no arrays.

Layers with equal windows form a group and share block tables (see ``CacheShape``); each group has a pool of blocks, and
so have the sources of an encoder-decoder. A block has one of three states: held by one or more sequences, idle (held by
none, but found by its key and reused until it is evicted, the least recently used first), or free.

A block whose first tokens alone are those of a sequence is copied for it; the caller copies the contents.

A sequence holds the blocks of its tokens in a group without a window. In a group with one it gives back the blocks that
its window has passed. A prefix is reused as far as every group has the blocks that the next token sees.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..backend.values import BLOCK_SIZE, NULL_BLOCK
from .prefix_index import PrefixIndex, append_keys, block_key, root_key

MIN_COPIED = 1 / 4
"""The part of a block's tokens that a copy must bring at least; fewer are computed."""


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


@dataclass(eq=False)
class SequenceBlocks:
    """The blocks of one sequence.

    ``tables`` has a list of blocks for each group, ``NULL_BLOCK`` where the window has passed; ``source_table`` has the
    blocks of the source. ``keys`` are the keys of the leading full blocks; the index has the first ``num_indexed``.
    ``partial_keys`` are those of the blocks of which it has copies, and of those that it left partly full.
    """

    root: bytes
    num_source_tokens: int
    tables: list[list[int]]
    source_table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_indexed: int = 0
    partial_keys: list[bytes] = field(default_factory=list)


class Admission(NamedTuple):
    """What a sequence found in the cache: the tokens of its prefix, and whether its source is there.

    ``copies`` is empty, or has a pair for each group: the block that holds the last of these tokens, and the sequence's
    block that is to get its contents before the next step.
    """

    num_cached_tokens: int
    source_is_cached: bool
    copies: Sequence[tuple[int, int]] = ()


class BlockManager:
    """The pools of all groups; ``windows`` and ``num_blocks`` have an entry for each.

    ``max_piece`` is the most tokens of one sequence in a step. Without ``prefix_cache`` nothing is reused.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        num_blocks: Sequence[int],
        num_source_blocks: int = 0,
        *,
        max_piece: int,
        prefix_cache: bool = True,
        block_size: int = BLOCK_SIZE,
    ):
        self.windows = tuple(windows)
        self.max_piece = max_piece
        self.prefix_cache = prefix_cache
        self.block_size = block_size
        self.start_tokens = max(int(block_size * MIN_COPIED), 1)
        self.pools = [BlockPool(n, self.start_tokens) for n in num_blocks]
        self.source_pool = BlockPool(num_source_blocks, self.start_tokens) if num_source_blocks else None

    def clear(self) -> None:
        """Forget the contents of every block. No sequence may hold one."""
        self.pools = [BlockPool(pool.num_blocks, self.start_tokens) for pool in self.pools]
        if self.source_pool:
            self.source_pool = BlockPool(self.source_pool.num_blocks, self.start_tokens)

    # -- what fits ----------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def shortage(self, num_tokens: int, num_source_tokens: int = 0, max_piece: int = 0) -> str | None:
        """Why a sequence of this length does not fit even if it is alone; None if it fits.

        ``max_piece`` is the most tokens that it has in a step, if that is more than the manager's.
        """
        max_piece = max(max_piece, self.max_piece)
        for pool, window in zip(self.pools, self.windows, strict=True):
            needed = self.blocks_for(num_tokens)
            if window is not None:
                needed = min(needed, self.blocks_for(window + max_piece) + 1)
            if needed > pool.num_blocks - 1:
                return self._shortage(num_tokens, needed, pool)
        needed = self.blocks_for(num_source_tokens)
        if self.source_pool and needed > self.source_pool.num_blocks - 1:
            return self._shortage(num_source_tokens, needed, self.source_pool)
        return None

    def _shortage(self, num_tokens: int, needed: int, pool: BlockPool) -> str:
        have = pool.num_blocks - 1
        return (
            f"{num_tokens:,} tokens need {needed:,} blocks of {self.block_size} tokens in the key-value cache, "
            f"which has {have:,}"
        )

    # -- a sequence's life --------------------------------------------------------------------------------------------

    def new_sequence(self, salt: str = "", source_token_ids: Sequence[int] = ()) -> SequenceBlocks:
        """A sequence without blocks. Sequences with different salts share none."""
        root = root_key(salt, source_token_ids) if self.prefix_cache else b""
        return SequenceBlocks(root, len(source_token_ids), [[] for _ in self.pools])

    def compute_keys(self, sequence: SequenceBlocks, token_ids: Sequence[int], start: int = 0) -> None:
        """Extend the keys to all full blocks of the accepted tokens: ``token_ids`` from the position ``start`` on.

        Those before ``start`` have keys already.
        """
        if not self.prefix_cache:
            return
        known = len(sequence.keys) * self.block_size
        append_keys(sequence.keys, sequence.root, token_ids[known - start :], self.block_size)

    def admit(
        self, sequence: SequenceBlocks, num_tokens: int, budget: int, *, spare: int = 0, growth: int = 0,
        max_cached_tokens: int | None = None, token_ids: Callable[[int, int], Sequence[int]] = lambda start, stop: (),
        hits: int | None = None,
    ) -> Admission | None:  # fmt: skip
        """Give a sequence what the cache has of its prefix, and new blocks for the rest of its ``num_tokens`` tokens.

        At most ``max_cached_tokens`` come from the cache, by default all but the last. A group with a window gets
        blocks for the next ``budget`` tokens only. Returns None and changes nothing if fewer than ``spare`` blocks of a
        group would be left, and in a group without a window ``growth`` more. ``token_ids`` gives the tokens from a
        position to another; without it only full blocks are found. ``hits`` is :meth:`cached_prefix` of the most that
        may come from the cache, if the caller has it.
        """
        most = num_tokens - 1 if max_cached_tokens is None else max_cached_tokens
        hits = self.cached_prefix(sequence, most) if hits is None else hits
        first = hits * self.block_size  # token that the full blocks lack
        rest = token_ids(first, min(first + self.block_size, most))
        starts = [pool.index.find_start(self._parent(sequence, hits), rest) for pool in self.pools]
        cached = first + min(count for _, count in starts)
        found = [self._hit_blocks(sequence, group, hits, cached) for group in range(len(self.pools))]
        ends = [num_tokens if w is None else min(num_tokens, cached + budget) for w in self.windows]
        for pool, window, blocks, end in zip(self.pools, self.windows, found, ends, strict=True):
            left = pool.num_available - (self.blocks_for(end) - hits)
            wanted = spare if window is not None else spare + growth
            if left - len(blocks) < wanted and left - pool.count_idle(blocks) < wanted:
                return None
        source, num_source_blocks = self.cached_source(sequence), self.blocks_for(sequence.num_source_tokens)
        if self.source_pool and source is None and self.source_pool.num_available < num_source_blocks:
            return None
        copied_keys = [key for key, _ in starts] if cached > first else []
        copied = [pool.index.find(key) for pool, key in zip(self.pools, copied_keys, strict=False)]
        sequence.partial_keys += copied_keys
        for table, pool, blocks, end in zip(sequence.tables, self.pools, found, ends, strict=True):
            pool.share(blocks)
            table += [NULL_BLOCK] * (hits - len(blocks)) + blocks
            table += [pool.take() for _ in range(self.blocks_for(end) - hits)]
        if self.source_pool:
            self.source_pool.share(source or ())
            sequence.source_table = source or [self.source_pool.take() for _ in range(num_source_blocks)]
        sequence.num_indexed = hits
        copies = [(b, table[hits]) for b, table in zip(copied, sequence.tables, strict=False) if b is not None]
        return Admission(cached, source is not None, copies)

    def extend(self, sequence: SequenceBlocks, num_computed: int, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens, of which ``num_computed`` are in the cache.

        Gives back the blocks that windows have passed. Takes no block and returns False if a group has too few.
        """
        missing = []
        for table, pool, window in zip(sequence.tables, self.pools, self.windows, strict=True):
            if window is not None:
                self._pass(table, pool, self._first_visible(num_computed, window))
            missing.append(self.blocks_for(num_tokens) - len(table))
        if any(n > pool.num_available for n, pool in zip(missing, self.pools, strict=True)):
            return False
        for table, pool, count in zip(sequence.tables, self.pools, missing, strict=True):
            table += [pool.take() for _ in range(count)]
        return True

    def enter(
        self, sequence: SequenceBlocks, token_ids: Sequence[int], start: int = 0, *, has_ended: bool = False
    ) -> None:
        """Enter the full blocks of accepted tokens whose computation has been launched; see :meth:`compute_keys`.

        If the sequence ``has_ended``, also the one that is partly full. Blocks before ``start`` were entered before.
        """
        if not self.prefix_cache:
            return
        self.compute_keys(sequence, token_ids, start)
        size = self.block_size
        for first in range(sequence.num_indexed * size, start + len(token_ids), size):
            place, ids = first // size, token_ids[first - start : first - start + size]
            parent = self._parent(sequence, place)
            if len(ids) == size:
                key = sequence.keys[place]
                sequence.num_indexed = place + 1
            elif has_ended and len(ids) >= self.start_tokens:
                key = block_key(parent, ids)
                sequence.partial_keys.append(key)
            else:
                break
            for table, pool in zip(sequence.tables, self.pools, strict=True):
                if table[place] != NULL_BLOCK:
                    pool.index.add(key, table[place], parent, ids)

    def enter_source(self, sequence: SequenceBlocks) -> None:
        """Enter the blocks of a source in the index, after its encoding has been launched."""
        if self.prefix_cache and self.source_pool:
            for key, block in zip(self._source_keys(sequence), sequence.source_table, strict=True):
                self.source_pool.index.add(key, block)

    def release(self, sequence: SequenceBlocks) -> None:
        """Give every block back. Later blocks are evicted before earlier ones, without which they are useless."""
        for table, pool in zip(sequence.tables, self.pools, strict=True):
            for block in reversed(table):
                if block != NULL_BLOCK:
                    pool.give_back(block)
            table.clear()
        if self.source_pool:
            for block in reversed(sequence.source_table):
                self.source_pool.give_back(block)
            sequence.source_table = []
        sequence.num_indexed = 0

    def discard(self, sequence: SequenceBlocks) -> None:
        """Remove the blocks of a sequence, shared ones included, from the index: no other sequence finds them."""
        for pool in self.pools:
            for key in (*sequence.keys, *sequence.partial_keys):
                pool.discard(key)
        if self.source_pool:
            for key in self._source_keys(sequence):
                self.source_pool.discard(key)

    def cached_prefix(self, sequence: SequenceBlocks, num_tokens: int) -> int:
        """How many of the leading full blocks of ``num_tokens`` tokens can be reused.

        In every group the cache has those of them that the next token sees.
        """
        keys = sequence.keys[: num_tokens // self.block_size]
        for pool, window in zip(self.pools, self.windows, strict=True):
            if window is None:
                del keys[pool.index.num_leading(keys) :]
        hits = len(keys)
        while hits and not all(self._sees(group, keys, hits) for group in range(len(self.pools))):
            hits -= 1
        return hits

    def cached_source(self, sequence: SequenceBlocks) -> list[int] | None:
        """The blocks of the sequence's source if the cache has all of them: an encoder reads a source as a whole."""
        if not (self.prefix_cache and self.source_pool):
            return None
        found = [self.source_pool.index.find(key) for key in self._source_keys(sequence)]
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == len(found) else None

    def check(self, sequences: Sequence[SequenceBlocks]) -> None:
        """Assert that the accounts of every pool are exact, given all sequences that hold blocks."""
        for group, pool in enumerate(self.pools):
            pool.check(b for s in sequences for b in s.tables[group] if b != NULL_BLOCK)
        if self.source_pool:
            self.source_pool.check(b for s in sequences for b in s.source_table)

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def _sees(self, group: int, keys: Sequence[bytes], hits: int) -> bool:
        """Whether a group with a window has the blocks that a token behind ``hits`` blocks sees."""
        window, find = self.windows[group], self.pools[group].index.find
        if window is None:
            return True
        first = self._first_visible(hits * self.block_size, window)
        return all(find(key) is not None for key in reversed(keys[first:hits]))

    def _parent(self, sequence: SequenceBlocks, block: int) -> bytes:
        return sequence.keys[block - 1] if block else sequence.root

    def _hit_blocks(self, sequence: SequenceBlocks, group: int, hits: int, position: int) -> list[int]:
        """The blocks of a group for a prefix of ``hits`` blocks, from the first that a token at ``position`` sees."""
        window = self.windows[group]
        first = 0 if window is None else self._first_visible(position, window)
        return self.pools[group].index.blocks_of(sequence.keys[first:hits])

    def _source_keys(self, sequence: SequenceBlocks) -> list[bytes]:
        return [block_key(sequence.root, (-1, i)) for i in range(self.blocks_for(sequence.num_source_tokens))]

    def _first_visible(self, position: int, window: int) -> int:
        """The block of the first token that a token at ``position`` sees."""
        return max(position - window + 1, 0) // self.block_size

    @staticmethod
    def _pass(table: list[int], pool: BlockPool, first: int) -> None:
        """Give back the blocks before block ``first``."""
        passed = min(first, len(table)) - 1
        while passed >= 0 and table[passed] != NULL_BLOCK:
            pool.give_back(table[passed])
            table[passed] = NULL_BLOCK
            passed -= 1
