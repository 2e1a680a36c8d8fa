"""Gives the blocks of the key-value cache to sequences. It counts and names blocks, and holds no arrays.

Layers that keep the same of a sequence form a group and share block tables (see ``CacheLayout``); each group has a pool
of blocks, and so have the sources of an encoder-decoder (:mod:`.block_groups`). A block is held by one or more
sequences, idle (held by none, but found by its key and reused until it is evicted, the least recently used first), or
free.

A block whose first tokens alone are those of a sequence is copied for it; the caller copies the contents.

A sequence holds the blocks of the tokens that a group keeps, and gives back those that a window has passed. A prefix is
reused as far as every group has the blocks that the next token sees.

Layers with states have one block for each sequence, a slot, and a prefix is reused only where they have a snapshot of
it. Snapshots are sparse: one at the end of each prompt, the slot that a sequence leaves when it ends, one where a
prompt branches off from an earlier one, and some within long prompts, into free slots alone. A snapshot leaves when a
group of tokens forgets a block that its prefix needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..backend.cache_values import Retention
from ..backend.values import BLOCK_SIZE, NULL_BLOCK
from .block_groups import SNAPSHOT_TOKENS, BlockPool, SourceGroup, make_groups
from .prefix_index import PrefixIndex, append_keys, block_key, root_key
from .snapshot_index import PrefixEnd

MIN_COPIED = 1 / 4
"""The part of a block's tokens that a copy must bring at least; fewer are computed."""
TokenIds = Callable[[int, int], Sequence[int]]
"""The tokens of a sequence from a position to another."""


@dataclass(eq=False)
class SequenceBlocks:
    """The blocks of one sequence.

    ``tables`` has a list of blocks for each group, ``NULL_BLOCK`` where the window has passed; ``source_table`` has the
    blocks of the source. ``keys`` are the keys of the leading full blocks; the index has the first ``num_indexed``.
    ``partial_keys`` are those of the blocks of which it has copies, and of those that it left partly full; and those of
    prefixes of which there are snapshots.

    ``snapshot_position`` is that of the last snapshot, and ``prompt_length`` the tokens that the sequence starts with,
    where the next one is made at the latest. Until then ``prompt_ends`` has the prefixes for which it will stand.
    ``branch`` is the position where a piece of the prompt is to end for a snapshot, 0 for none: up to it the cache has
    blocks of an earlier prompt, but no snapshot.
    """

    root: bytes
    num_source_tokens: int
    tables: list[list[int]]
    source_table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_indexed: int = 0
    partial_keys: list[bytes] = field(default_factory=list)
    snapshot_position: int = 0
    prompt_length: int = 0
    prompt_ends: Sequence[tuple[int, bytes]] = ()
    branch: int = 0


class Prefix(NamedTuple):
    """What the cache has of a sequence: ``num_tokens`` tokens, ``num_blocks`` full blocks of which are shared.

    ``copied`` is empty, or has for each group the key and the number of the block whose contents are to be copied.
    ``branch`` is the position up to which it would be found, if there were a snapshot.
    """

    num_blocks: int
    num_tokens: int
    copied: Sequence[tuple[bytes, int]] = ()
    branch: int = 0


class UnderWay:
    """What running sequences compute, and others can share afterwards: full blocks, and prompts with snapshots."""

    def __init__(self, sequences: Iterable[SequenceBlocks]):
        sequences = [*sequences]
        self.keys = {key for s in sequences for key in s.keys[s.num_indexed :]}
        self.ends = [end for s in sequences for end in s.prompt_ends]

    def add(self, sequence: SequenceBlocks) -> None:
        """Add what a sequence that starts will compute."""
        self.keys.update(sequence.keys[sequence.num_indexed :])
        self.ends += sequence.prompt_ends


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
        self.groups = make_groups(retentions, num_blocks, block_size, self.start_tokens)
        self.has_snapshots = prefix_cache and any(group.has_snapshots for group in self.groups)
        self.sources: SourceGroup | None = None
        if num_source_blocks:
            self.sources = SourceGroup(num_source_blocks, block_size, lambda: PrefixIndex(self.start_tokens))

    @property
    def pools(self) -> list[BlockPool[Any]]:
        """The pool of each group."""
        return [group.pool for group in self.groups]

    @property
    def block_pools(self) -> list[BlockPool[Any]]:
        """The pools whose blocks hold tokens; all pools if a sequence's tokens are nowhere."""
        return [group.pool for group in self.groups if not group.retention.per_sequence] or self.pools

    @property
    def source_pool(self) -> BlockPool[PrefixIndex] | None:
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

    def new_sequence(self, salt: str = "", source_token_ids: Sequence[int] = (), adapter: int = 0) -> SequenceBlocks:
        """A sequence without blocks. Those with different salts, or serial numbers of adapters, share none."""
        root = root_key(salt, source_token_ids, adapter) if self.prefix_cache else b""
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
        self,
        sequence: SequenceBlocks,
        num_tokens: int,
        budget: int,
        *,
        spare: int = 0,
        growth: int = 0,
        max_cached_tokens: int | None = None,
        token_ids: TokenIds = lambda start, stop: (),
        prefix: Prefix | None = None,
    ) -> Admission | None:
        """Give a sequence what the cache has of its prefix, and new blocks for the rest of its ``num_tokens`` tokens.

        At most ``max_cached_tokens`` come from the cache, by default all but the last. A group with a window gets
        blocks for the next ``budget`` tokens only. Returns None and changes nothing if fewer than ``spare`` blocks of a
        group would be left, and in a group without a window ``growth`` more. ``token_ids`` gives the tokens from a
        position to another; without it only full blocks are found. ``prefix`` is :meth:`cached_prefix` of the most that
        may come from the cache, if the caller has it.
        """
        if prefix is None:
            most = num_tokens - 1 if max_cached_tokens is None else max_cached_tokens
            prefix = self.cached_prefix(sequence, most, token_ids)
        hits, cached, copied, _ = prefix
        found = [group.hit_blocks(sequence.keys, hits, cached) for group in self.groups]
        new = [group.num_new(num_tokens, cached + budget, hits) for group in self.groups]
        for group, blocks, count in zip(self.groups, found, new, strict=True):
            if not group.has_room(blocks, count, spare, growth):
                return None
        source, num_source_blocks = self.cached_source(sequence), self.blocks_for(sequence.num_source_tokens)
        if self.sources and source is None and self.sources.pool.num_available < num_source_blocks:
            return None
        sequence.partial_keys += [key for key, _ in copied]
        if self.has_snapshots:
            for group, (_, block) in zip(self.groups, copied, strict=False):
                group.pool.use(block)
        for table, group, blocks, count in zip(sequence.tables, self.groups, found, new, strict=True):
            group.start(table, hits, blocks)
            table += [group.pool.take() for _ in range(count)]
        if self.sources:
            self.sources.pool.share(source or ())
            sequence.source_table = source or [self.sources.pool.take() for _ in range(num_source_blocks)]
        sequence.num_indexed = hits
        if self.has_snapshots:
            self._expect_snapshots(sequence, prefix, num_tokens, token_ids)
        tables = zip(copied, self.groups, sequence.tables, strict=False)
        copies = [(b, group.copied_block(table, hits) if b else NULL_BLOCK) for (_, b), group, table in tables]
        return Admission(cached, source is not None, copies)

    def extend(self, sequence: SequenceBlocks, num_computed: int, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens, of which ``num_computed`` are in the cache.

        Gives back the blocks that windows have passed. Takes no block and returns False if a group has too few.
        """
        missing = []
        for table, group in zip(sequence.tables, self.groups, strict=True):
            group.pass_blocks(table, num_computed)
            missing.append(group.num_missing(table, num_tokens))
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
                group.enter(table, place, key, parent, ids)

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
        sequence.prompt_ends = ()

    def discard(self, sequence: SequenceBlocks) -> None:
        """Remove the blocks of a sequence, shared ones included, from the index: no other sequence finds them."""
        for group in self.groups:
            for key in (*sequence.keys, *sequence.partial_keys):
                group.pool.discard(key)
        if self.sources:
            self.sources.discard(sequence.root, sequence.num_source_tokens)

    def can_grow(self, sequences: int, num_tokens: int) -> bool:
        """Whether one sequence may have ``num_tokens`` tokens more and ``sequences`` sequences the next one."""
        return all(group.can_grow(sequences, num_tokens) for group in self.groups)

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def cached_prefix(self, sequence: SequenceBlocks, most: int, token_ids: TokenIds) -> Prefix:
        """The longest prefix of up to ``most`` tokens behind which every group can go on.

        In every group the cache has those full blocks of it that the next token sees, and the start of the one behind
        them, if the prefix ends there.
        """
        keys = sequence.keys[: most // self.block_size]
        for group in self.groups:
            del keys[group.num_hits(keys) :]
        hits = len(keys)
        while hits and not all(group.sees(keys, hits) for group in self.groups):
            hits -= 1
        if self.has_snapshots:
            return self._longest_snapshot(sequence, keys[:hits], most, token_ids)
        first = hits * self.block_size  # token that the full blocks lack
        rest, parent = token_ids(first, min(first + self.block_size, most)), self._parent(sequence, hits)
        starts = [group.find_start(parent, rest) for group in self.groups]
        count = min(count for *_, count in starts)
        return Prefix(hits, first + count, [(key, block) for key, block, _ in starts] if count else ())

    def _longest_snapshot(self, sequence: SequenceBlocks, keys: list[bytes], most: int, token_ids: TokenIds) -> Prefix:
        """The same where a sequence goes on from a snapshot; the groups have at most the full blocks of ``keys``."""
        size, first_exact = self.block_size, next(group for group in self.groups if group.has_snapshots)
        branch = len(keys) * size if any(not group.retention.per_sequence for group in self.groups) else 0
        for hits in range(len(keys), -1, -1):
            first = hits * size

            def rest(first: int = first) -> Sequence[int]:
                return token_ids(first, min(first + size - 1, most))

            for count, key in first_exact.keys_behind(self._parent(sequence, hits), rest):
                blocks = [group.find_end(key, count) for group in self.groups]
                if None not in blocks and all(group.sees(keys, hits) for group in self.groups):
                    return Prefix(hits, first + count, [(key, block or NULL_BLOCK) for block in blocks], branch)
        return Prefix(0, 0, branch=branch)

    def under_way(self, sequences: Iterable[SequenceBlocks]) -> UnderWay:
        """What running sequences compute."""
        return UnderWay(sequences)

    def is_under_way(
        self, sequence: SequenceBlocks, prefix: Prefix, most: int, under_way: UnderWay, token_ids: TokenIds
    ) -> bool:
        """Whether a running sequence computes what this one needs next behind its cached ``prefix``.

        That is the next of the full blocks of its first ``most`` tokens. Equal keys mean equal positions, because a key
        depends on the keys before it. Where snapshots are needed, it is a prompt with which this one begins.
        """
        if self.has_snapshots:
            ends = [(p, key) for p, key in under_way.ends if prefix.num_tokens < p <= most]
            return any(end.key == key for p, key in ends for end in self._ends(sequence, (p,), token_ids).values())
        hits = prefix.num_blocks
        return hits < most // self.block_size and sequence.keys[hits] in under_way.keys

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def snapshot(self, sequence: SequenceBlocks, position: int, token_ids: TokenIds) -> Sequence[tuple[int, int]]:
        """Take a slot for a snapshot of a sequence whose next step begins at ``position``, if the policy wants one.

        It is wanted at the prompt's end and where the prompt branches off, and elsewhere within a prompt behind
        ``SNAPSHOT_TOKENS`` tokens without one, if a slot is free. Returns the copies of :class:`Admission`, which the
        caller makes before that step; none without a snapshot.
        """
        if position > sequence.prompt_length:
            return ()
        at_end, is_branch = position == sequence.prompt_length, 0 < position == sequence.branch
        if at_end:
            sequence.prompt_ends = ()
        elif not is_branch and position - sequence.snapshot_position < SNAPSHOT_TOKENS:
            return ()
        ends = self._ends(sequence, (position - 1, position), token_ids)
        tables = [*zip(self.groups, sequence.tables, strict=True)]
        copies = [group.snapshot(table, [*ends.values()], at_end or is_branch) for group, table in tables]
        made = [pair for pair in copies if pair is not None]
        if len(made) < len(copies):
            return ()
        sequence.snapshot_position = position
        self._note(sequence, ends)
        return made

    def keep_state(self, sequence: SequenceBlocks, positions: Sequence[int], token_ids: TokenIds) -> None:
        """Let the slot of a sequence that is about to leave stand for its prefixes up to ``positions``."""
        ends = self._ends(sequence, positions, token_ids)
        self._note(sequence, ends)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for end in ends.values():
                group.keep_state(table, end)

    def _expect_snapshots(self, sequence: SequenceBlocks, prefix: Prefix, length: int, token_ids: TokenIds) -> None:
        """Note where snapshots of a prompt of ``length`` tokens will be made."""
        sequence.snapshot_position, sequence.prompt_length = prefix.num_tokens, length
        sequence.branch = prefix.branch if prefix.branch - prefix.num_tokens >= self.block_size else 0
        ends = self._ends(sequence, (length - 1, length), token_ids)
        sequence.prompt_ends = [(position, end.key) for position, end in ends.items()]

    def _ends(self, sequence: SequenceBlocks, positions: Sequence[int], token_ids: TokenIds) -> dict[int, PrefixEnd]:
        """The ends of a sequence's prefixes, by position; it has the keys of their full blocks."""
        ends = {}
        for position in positions:
            place = position // self.block_size
            rest = token_ids(place * self.block_size, position)
            if position and len(rest) == position % self.block_size:
                ends[position] = PrefixEnd.of(self._parent(sequence, place), rest)
        return ends

    def _note(self, sequence: SequenceBlocks, ends: dict[int, PrefixEnd]) -> None:
        """Let the blocks of a sequence be found where its prefixes end."""
        sequence.partial_keys += [end.key for end in ends.values()]
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for position, end in ends.items():
                group.note_end(table, position // self.block_size, end)

    # -- sources and checks -------------------------------------------------------------------------------------------

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
