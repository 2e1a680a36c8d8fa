"""The device memory of a key-value cache, in bytes.

Layers that keep the same tokens form a group. A layer has several arrays of as many blocks as the pool of its group:
keys and values, or latent rows, and in an int8 cache their scales; or of as many slots: the arrays of a state. They lie
one behind the other. If one page would hold them, they are allocated at once; otherwise pages are mapped as they grow,
so a layer takes whole pages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..backend.cache_values import LatestState, Retention
from ..backend.values import BLOCK_SIZE
from .arena import ALIGNMENT

PAGE_BYTES = 2 << 20
"""The least memory that NVIDIA GPUs map to addresses."""
MIN_SNAPSHOTS = 16
"""Snapshots of states for which there are slots, if there is room, however few sequences a step has."""
BALANCED_CONTEXT = 8192
"""Layers with windows take most of the cache of short sequences, and those without take most of that of long ones. For
models of longer contexts, pools are balanced for sequences of ``BALANCED_CONTEXT`` tokens."""


def grows(nbytes: int, page: int = PAGE_BYTES) -> bool:
    """Whether pages are mapped one after another to arrays of up to ``nbytes`` together."""
    return nbytes > page


def lane_bytes(item_bytes: int, count: int) -> int:
    """Addresses that an array of ``count`` items takes: the next one is aligned."""
    return -(-item_bytes * count // ALIGNMENT) * ALIGNMENT


def layer_bytes(item_bytes: Sequence[int], count: int) -> int:
    """The memory of the arrays of a layer, with ``count`` items each."""
    nbytes = sum(lane_bytes(item, count) for item in item_bytes)
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES if grows(nbytes) else nbytes


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share block tables, and what they keep.

    ``layers`` has pairs of the bytes of a block in each array of a layer, and how many layers have such arrays. The
    blocks of layers with states are slots, of which a sequence holds one; others hold snapshots, which prefixes reuse.
    ``is_int8``: the arrays hold codes and their scales.
    """

    layers: tuple[tuple[tuple[int, ...], int], ...]
    retention: Retention
    is_int8: bool = False

    @classmethod
    def of(cls, layers: Iterable[tuple[int, ...]], retention: Retention, is_int8: bool = False) -> CacheGroup:
        """The group of layers that have these arrays each."""
        return cls(tuple(Counter(layers).items()), retention, is_int8)

    @property
    def num_layers(self) -> int:
        """How many layers the group has."""
        return sum(count for _, count in self.layers)

    @property
    def has_snapshots(self) -> bool:
        """Whether there are slots for snapshots of states beside those of sequences."""
        return isinstance(self.retention, LatestState) and self.retention.has_snapshots

    @property
    def _block_bytes(self) -> int:
        return sum(count * sum(arrays) for arrays, count in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers."""
        return 0 if self.retention.per_sequence else self._block_bytes // BLOCK_SIZE

    @property
    def sequence_bytes(self) -> int:
        """Bytes that one sequence takes in all layers, however long it is: those of a slot."""
        return self._block_bytes if self.retention.per_sequence else 0

    def bytes_read(self, context: int) -> int:
        """Bytes that a step reads of a sequence behind ``context`` tokens."""
        return self.token_bytes * self.tokens_read(context) + self.sequence_bytes

    def tokens_read(self, context: int) -> int:
        """Tokens that the last one of ``context`` tokens sees."""
        return self.retention.tokens_read(context)

    def blocks(self, context: int, piece: int) -> int:
        """The most blocks that a sequence of ``context`` tokens holds at once, if steps compute ``piece`` of them."""
        return self.retention.most_blocks(context, piece)

    def share(self, context: int, piece: int, snapshots: bool) -> int:
        """The blocks of a sequence for which the group gets a share of the memory, and a snapshot of its state."""
        return self.blocks(context, piece) + (snapshots and self.has_snapshots)

    def most(self, context: int, piece: int, max_num_seqs: int, snapshots: bool) -> int:
        """The most blocks that are of use, the null block left out."""
        held = max_num_seqs * self.blocks(context, piece)
        return held + max(max_num_seqs, MIN_SNAPSHOTS) * (snapshots and self.has_snapshots)

    def nbytes(self, num_blocks: int) -> int:
        """The memory of pools of ``num_blocks`` blocks."""
        return sum(count * layer_bytes(arrays, num_blocks) for arrays, count in self.layers)


def cache_blocks(
    groups: Sequence[CacheGroup],
    context: int,
    chunk: int,
    room: int,
    max_num_seqs: int,
    batch: int = 1,
    snapshots: bool = True,
) -> tuple[int, ...]:
    """Blocks of each group, null blocks included, that fit in ``room`` bytes.

    They hold ``batch`` sequences of ``context`` tokens at least, and ``max_num_seqs`` at most. Groups share the rest of
    the room so that each can serve the same number of sequences of ``context`` tokens, or of ``BALANCED_CONTEXT`` if
    that is less. With ``snapshots``, layers with states have one for each of these sequences, as far as there is room.
    """
    if not groups:
        return ()
    needed = [group.blocks(context, chunk) for group in groups]
    shares = [group.share(min(context, BALANCED_CONTEXT), chunk, snapshots) for group in groups]
    most = [group.most(context, chunk, max_num_seqs, snapshots) for group in groups]
    largest = max(shares)

    def blocks(share: int) -> tuple[int, ...]:
        """The blocks of ``share / largest`` sequences."""
        return tuple(
            1 + min(max(part * share // largest, batch * n), bound)
            for part, n, bound in zip(shares, needed, most, strict=True)
        )

    def nbytes(share: int) -> int:
        return sum(group.nbytes(count) for group, count in zip(groups, blocks(share), strict=True))

    every_block = largest * max(most)
    return blocks(max(bisect_right(range(every_block + 1), room, key=nbytes) - 1, 0))
