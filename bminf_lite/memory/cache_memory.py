"""The device memory of a key-value cache, in bytes.

Layers that keep the same tokens form a group. A layer has several arrays of as many blocks as the pool of its group:
keys, values, and in an int8 cache their scales. They lie one behind the other. If one page would hold them, they are
allocated at once; otherwise pages are mapped as they grow, so a layer takes whole pages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..backend.values import BLOCK_SIZE, Retention
from .arena import ALIGNMENT

PAGE_BYTES = 2 << 20
"""The least memory that NVIDIA GPUs map to addresses."""
BALANCED_CONTEXT = 8192
"""Layers with windows take most of the cache of short sequences, and those without take most of that of long ones. For
models of longer contexts, pools are balanced for sequences of so many tokens."""


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


def block_bytes(kv_heads: int, head_dim: int, int8: bool, itemsize: int = 2) -> tuple[int, ...]:
    """Bytes of a block in each array of a layer: keys, values, and for ``int8`` codes the fp16 scales of both.

    ``head_dim`` includes the padding of a head, and ``itemsize`` is that of values that are not int8.
    """
    heads = kv_heads * BLOCK_SIZE
    return (heads * head_dim, heads * head_dim, 2 * heads, 2 * heads) if int8 else (heads * head_dim * itemsize,) * 2


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share block tables, and what they keep.

    ``layers`` has pairs of the bytes of a block in each array of a layer, and how many layers have such arrays.
    """

    layers: tuple[tuple[tuple[int, ...], int], ...]
    retention: Retention

    @classmethod
    def of(cls, layers: Iterable[tuple[int, ...]], retention: Retention) -> CacheGroup:
        """The group of layers that have these arrays each."""
        return cls(tuple(Counter(layers).items()), retention)

    @property
    def num_layers(self) -> int:
        """How many layers the group has."""
        return sum(count for _, count in self.layers)

    @property
    def is_int8(self) -> bool:
        """Whether the arrays hold codes and their scales."""
        return any(len(arrays) > 2 for arrays, _ in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers."""
        return sum(count * sum(arrays) for arrays, count in self.layers) // BLOCK_SIZE

    def tokens_read(self, context: int) -> int:
        """Tokens that the last one of ``context`` tokens sees."""
        return self.retention.tokens_read(context)

    def blocks(self, context: int, piece: int) -> int:
        """The most blocks that a sequence of ``context`` tokens holds at once, if steps compute ``piece`` of them."""
        return self.retention.most_blocks(context, piece)

    def nbytes(self, num_blocks: int) -> int:
        """The memory of pools of ``num_blocks`` blocks."""
        return sum(count * layer_bytes(arrays, num_blocks) for arrays, count in self.layers)


def cache_blocks(
    groups: Sequence[CacheGroup], context: int, chunk: int, room: int, max_num_seqs: int, batch: int = 1
) -> tuple[int, ...]:
    """Blocks of each group, null blocks included, that fit in ``room`` bytes.

    They hold ``batch`` sequences of ``context`` tokens at least, and ``max_num_seqs`` at most. Groups share the rest of
    the room so that each can serve the same number of sequences of ``context`` tokens, or of ``BALANCED_CONTEXT`` if
    that is less.
    """
    needed = [group.blocks(context, chunk) for group in groups]
    shares = [group.blocks(min(context, BALANCED_CONTEXT), chunk) for group in groups]
    largest = max(shares)

    def blocks(share: int) -> tuple[int, ...]:
        """The blocks of ``share / largest`` sequences."""
        return tuple(
            1 + min(max(part * share // largest, batch * n), max_num_seqs * n)
            for part, n in zip(shares, needed, strict=True)
        )

    def nbytes(share: int) -> int:
        return sum(group.nbytes(count) for group, count in zip(groups, blocks(share), strict=True))

    every_block = largest * max_num_seqs * max(needed)
    return blocks(max(bisect_right(range(every_block + 1), room, key=nbytes) - 1, 0))
