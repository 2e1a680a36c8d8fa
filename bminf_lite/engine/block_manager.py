"""Gives the blocks of the key-value cache to sequences. It counts and names blocks, and holds no arrays.

Layers that keep the same tokens form a group and share block tables (see ``CacheLayout``); each group has a pool of
blocks, and so have the sources of an encoder-decoder (:mod:`.block_groups`). A block has one of three states: held by
one or more sequences, idle (held by none, but found by its key and reused until it is evicted, the least recently used
first), or free.

A block whose first tokens alone are those of a sequence is copied for it; the caller copies the contents.

A sequence holds the blocks of the tokens that a group keeps, and gives back those that a window has passed. A prefix is
reused as far as every group has the blocks that the next token sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..backend.values import BLOCK_SIZE, NULL_BLOCK, Retention
from .block_groups import BlockPool, SourceGroup, TokenGroup
from .prefix_index import append_keys, block_key, root_key

MIN_COPIED = 1 / 4
"""The part of a block's tokens that a copy must bring at least; fewer are computed."""


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
    """The groups of a cache; ``retentions`` and ``num_blocks`` have an entry for each.

    ``max_piece`` is the most tokens of one sequence in a step. Without ``prefix_cache`` nothing is reused.
    """

    def __init__(
        self,
        retentions: Sequence[Retention],
        num_blocks: Sequence[int],
        num_source_blocks: int = 0,
        *,
        max_piece: int,
        prefix_cache: bool = True,
        block_size: int = BLOCK_SIZE,
    ):
        self.max_piece = max_piece
        self.prefix_cache = prefix_cache
        self.block_size = block_size
        self.start_tokens = max(int(block_size * MIN_COPIED), 1)
        sizes = block_size, self.start_tokens
        self.groups = [TokenGroup(kept, n, *sizes) for kept, n in zip(retentions, num_blocks, strict=True)]
        self.sources = SourceGroup(num_source_blocks, *sizes) if num_source_blocks else None

    @property
    def pools(self) -> list[BlockPool]:
        """The pool of each group."""
        return [group.pool for group in self.groups]

    @property
    def source_pool(self) -> BlockPool | None:
        """The pool of the sources of an encoder-decoder."""
        return self.sources.pool if self.sources else None

    def clear(self) -> None:
        """Forget the contents of every block. No sequence may hold one."""
        for group in (*self.groups, *([self.sources] if self.sources else [])):
            group.clear()

    # -- what fits ----------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def shortage(self, num_tokens: int, num_source_tokens: int = 0, max_piece: int = 0) -> str | None:
        """Why a sequence of this length does not fit even if it is alone; None if it fits.

        ``max_piece`` is the most tokens that it has in a step, if that is more than the manager's.
        """
        piece = max(max_piece, self.max_piece)
        reasons = [group.shortage(num_tokens, group.most_blocks(num_tokens, piece)) for group in self.groups]
        if self.sources:
            reasons.append(self.sources.shortage(num_source_tokens, self.blocks_for(num_source_tokens)))
        return next((reason for reason in reasons if reason is not None), None)

    # -- a sequence's life --------------------------------------------------------------------------------------------

    def new_sequence(self, salt: str = "", source_token_ids: Sequence[int] = ()) -> SequenceBlocks:
        """A sequence without blocks. Sequences with different salts share none."""
        root = root_key(salt, source_token_ids) if self.prefix_cache else b""
        return SequenceBlocks(root, len(source_token_ids), [[] for _ in self.groups])

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
        starts = [group.pool.index.find_start(self._parent(sequence, hits), rest) for group in self.groups]
        cached = first + min(count for _, count in starts)
        found = [group.hit_blocks(sequence.keys, hits, cached) for group in self.groups]
        new = [self.blocks_for(group.end(num_tokens, cached + budget)) - hits for group in self.groups]
        for group, blocks, count in zip(self.groups, found, new, strict=True):
            if not group.has_room(blocks, count, spare + growth * group.retention.keeps_all):
                return None
        source, num_source_blocks = self.cached_source(sequence), self.blocks_for(sequence.num_source_tokens)
        if self.sources and source is None and self.sources.pool.num_available < num_source_blocks:
            return None
        copied_keys = [key for key, _ in starts] if cached > first else []
        copied = [group.pool.index.find(key) for group, key in zip(self.groups, copied_keys, strict=False)]
        sequence.partial_keys += copied_keys
        for table, group, blocks, count in zip(sequence.tables, self.groups, found, new, strict=True):
            group.pool.share(blocks)
            table += [NULL_BLOCK] * (hits - len(blocks)) + blocks
            table += [group.pool.take() for _ in range(count)]
        if self.sources:
            self.sources.pool.share(source or ())
            sequence.source_table = source or [self.sources.pool.take() for _ in range(num_source_blocks)]
        sequence.num_indexed = hits
        copies = [(b, table[hits]) for b, table in zip(copied, sequence.tables, strict=False) if b is not None]
        return Admission(cached, source is not None, copies)

    def extend(self, sequence: SequenceBlocks, num_computed: int, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens, of which ``num_computed`` are in the cache.

        Gives back the blocks that windows have passed. Takes no block and returns False if a group has too few.
        """
        missing = []
        for table, group in zip(sequence.tables, self.groups, strict=True):
            group.pass_blocks(table, num_computed)
            missing.append(self.blocks_for(num_tokens) - len(table))
        if any(n > group.pool.num_available for n, group in zip(missing, self.groups, strict=True)):
            return False
        for table, group, count in zip(sequence.tables, self.groups, missing, strict=True):
            table += [group.pool.take() for _ in range(count)]
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
            for table, group in zip(sequence.tables, self.groups, strict=True):
                if table[place] != NULL_BLOCK:
                    group.pool.index.add(key, table[place], parent, ids)

    def enter_source(self, sequence: SequenceBlocks) -> None:
        """Enter the blocks of a source in the index, after its encoding has been launched."""
        if self.prefix_cache and self.sources:
            self.sources.enter(sequence.root, sequence.num_source_tokens, sequence.source_table)

    def release(self, sequence: SequenceBlocks) -> None:
        """Give every block back."""
        for table, group in zip(sequence.tables, self.groups, strict=True):
            group.release(table)
        if self.sources:
            self.sources.release(sequence.source_table)
        sequence.num_indexed = 0

    def discard(self, sequence: SequenceBlocks) -> None:
        """Remove the blocks of a sequence, shared ones included, from the index: no other sequence finds them."""
        for group in self.groups:
            for key in (*sequence.keys, *sequence.partial_keys):
                group.pool.discard(key)
        if self.sources:
            self.sources.discard(sequence.root, sequence.num_source_tokens)

    def cached_prefix(self, sequence: SequenceBlocks, num_tokens: int) -> int:
        """How many of the leading full blocks of ``num_tokens`` tokens can be reused.

        In every group the cache has those of them that the next token sees.
        """
        keys = sequence.keys[: num_tokens // self.block_size]
        for group in self.groups:
            del keys[group.num_hits(keys) :]
        hits = len(keys)
        while hits and not all(group.sees(keys, hits) for group in self.groups):
            hits -= 1
        return hits

    def cached_source(self, sequence: SequenceBlocks) -> list[int] | None:
        """The blocks of the sequence's source if the cache has all of them: an encoder reads a source as a whole."""
        if not (self.prefix_cache and self.sources):
            return None
        return self.sources.find(sequence.root, sequence.num_source_tokens)

    def check(self, sequences: Sequence[SequenceBlocks]) -> None:
        """Assert that the accounts of every pool are exact, given all sequences that hold blocks."""
        for place, group in enumerate(self.groups):
            group.pool.check(b for s in sequences for b in s.tables[place] if b != NULL_BLOCK)
        if self.sources:
            self.sources.pool.check(b for s in sequences for b in s.source_table)

    def _parent(self, sequence: SequenceBlocks, block: int) -> bytes:
        return sequence.keys[block - 1] if block else sequence.root
