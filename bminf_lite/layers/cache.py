"""What the layers of a model keep of the tokens that they have seen, and the memory in which a device keeps it.

Each layer states a layout. Layouts with equal retention form a group, whose layers share block tables: what one of them
keeps of a token lies in the block of the same number in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..backend.base import Backend
from ..backend.values import BLOCK_SIZE, NULL_BLOCK, AllTokens, LayerCache, Retention, Window, sequential_tables


@dataclass(frozen=True)
class KeyValues:
    """A layer with ``kv_heads`` heads of keys and values, each of ``head_dim`` elements, for each token.

    With ``int8`` they are codes, with an fp16 scale per head and token. With a ``window`` the layer sees that many
    tokens.
    """

    kv_heads: int
    head_dim: int
    int8: bool = False
    window: int | None = None

    @property
    def retention(self) -> Retention:
        """Which tokens are kept."""
        return AllTokens() if self.window is None else Window(self.window)

    def bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes that one token takes; ``itemsize`` is that of the activation type."""
        return 2 * self.kv_heads * (self.head_dim + 2 if self.int8 else self.head_dim * itemsize)

    def make(self, ops: Backend, num_blocks: int, max_blocks: int | None) -> LayerCache:
        """The layer's memory on a device, which can grow to ``max_blocks`` blocks. A rank has its part of the heads."""
        heads = self.kv_heads // ops.communicator.tp_size
        return ops.layer_cache(num_blocks, heads, self.head_dim, int8=self.int8, max_blocks=max_blocks)


@dataclass(frozen=True)
class CacheLayout:
    """The layouts of a model's layers, in order."""

    layers: tuple[KeyValues, ...]

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, head_dim: int, windows: Sequence[int | None] = ()) -> CacheLayout:
        """Layers with equal heads; ``windows`` has an entry for each, or none if no layer has a window."""
        return cls(tuple(KeyValues(kv_heads, head_dim, window=w) for w in windows or (None,) * layers))

    @property
    def groups(self) -> tuple[Retention, ...]:
        """The retention of each group of layers, in order of their first layers."""
        return tuple(dict.fromkeys(layer.retention for layer in self.layers))

    def group_of(self, layer: int) -> int:
        """The group of a layer, as an index of :attr:`groups`."""
        return self.groups.index(self.layers[layer].retention)

    def layers_of(self, group: int) -> tuple[KeyValues, ...]:
        """The layouts of a group."""
        retention = self.groups[group]
        return tuple(layer for layer in self.layers if layer.retention == retention)

    def with_int8(self, int8: bool = True) -> CacheLayout:
        """The same layers with keys and values in int8, or not."""
        return CacheLayout(tuple(replace(layer, int8=int8) for layer in self.layers))

    def bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes that one token of one sequence takes in all layers."""
        return sum(layer.bytes_per_token(itemsize) for layer in self.layers)


class KVCache:
    """A pool of blocks for each layer. The caller gives blocks to sequences; block 0 belongs to none.

    ``num_blocks`` gives the blocks of each group of layers, the null block included. ``source`` holds the encoded
    sources, which the decoder of an encoder-decoder reads beside its own tokens; it has one group. The pools of a group
    can grow to ``max_blocks`` of it, at the same addresses.
    """

    def __init__(
        self, ops: Backend, layout: CacheLayout, num_blocks: Sequence[int], max_blocks: Sequence[int] | None = None
    ):
        self.ops = ops
        self.num_blocks = list(num_blocks)
        self.layers: list[LayerCache] = []
        self.source: KVCache | None = None
        try:
            for index, own in enumerate(layout.layers):
                group = layout.group_of(index)
                layer = own.make(ops, self.num_blocks[group], max_blocks[group] if max_blocks else None)
                layer.group = group
                self.layers.append(layer)
                self._clear_null_block(layer)
        except BaseException:
            self.close()
            raise

    def _clear_null_block(self, layer: LayerCache) -> None:
        """Zeros, because kernels may read the null block where a window has passed: 0 times a NaN would be a NaN."""
        for array in layer.arrays:
            null_block = array[NULL_BLOCK]
            self.ops.assign(null_block, np.zeros(null_block.shape, null_block.dtype))

    @classmethod
    def for_sequences(cls, ops: Backend, layout: CacheLayout, sequences: int, tokens: int) -> KVCache:
        """A cache with the blocks of :meth:`tables`, for ``sequences`` sequences of up to ``tokens`` tokens."""
        count = 1 + sequential_tables(sequences, tokens).size
        return cls(ops, layout, [count] * len(layout.groups))

    def tables(self, sequences: int, tokens: int) -> list[np.ndarray]:
        """For each group a block table int32 ``[sequences, W]`` that gives every sequence blocks of its own."""
        return [sequential_tables(sequences, tokens)] * len(self.num_blocks)

    def close(self) -> None:
        """Free the memory now, even if a traceback or a caller still refers to the cache or to its layers."""
        for layer in self.layers:
            self.ops.free_layer_cache(layer)
        self.layers.clear()
        if self.source is not None:
            self.source.close()

    def grow(self, group: int, num_blocks: int) -> None:
        """Enlarge the pools of a group to ``num_blocks`` blocks. Contents are kept."""
        for layer in self.layers:
            if layer.group == group:
                self.ops.grow(layer, num_blocks)
        self.num_blocks[group] = num_blocks

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy a block in all layers of a group to another, after what was started before: a pair for each group."""
        self.ops.copy_blocks([(layer, *pairs[layer.group]) for layer in self.layers])


def blocks_for(tokens: int) -> int:
    """Blocks that hold ``tokens`` tokens of one sequence."""
    return -(-tokens // BLOCK_SIZE)
