"""The key-value cache of a whole model: a pool of blocks of tokens for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..backend.base import Backend
from ..backend.values import BLOCK_SIZE, NULL_BLOCK, LayerCache, sequential_tables


@dataclass(frozen=True)
class CacheShape:
    """The shape of a token's keys and values. With ``int8`` they are codes, with an fp16 scale per head and token.

    ``windows`` has an entry for each layer, unless no layer has a window: how many tokens the layer sees, or None for
    all. Layers with equal windows form a group, whose layers share block tables.
    """

    layers: int
    kv_heads: int
    head_dim: int
    int8: bool = False
    windows: tuple[int | None, ...] = ()

    @property
    def groups(self) -> tuple[int | None, ...]:
        """The window of each group of layers, in order of their first layers."""
        return tuple(dict.fromkeys(self.windows)) or (None,)

    def group_of(self, layer: int) -> int:
        """The group of a layer, as an index of :attr:`groups`."""
        return self.groups.index(self.windows[layer]) if self.windows else 0

    def layers_of(self, group: int) -> int:
        """How many layers a group has."""
        return sum(self.group_of(layer) == group for layer in range(self.layers))

    def bytes_per_layer_token(self, itemsize: int = 2) -> int:
        """Bytes that one token takes in one layer; ``itemsize`` is that of the activation type."""
        return 2 * self.kv_heads * (self.head_dim + 2 if self.int8 else self.head_dim * itemsize)

    def bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes that one token of one sequence takes in all layers."""
        return self.layers * self.bytes_per_layer_token(itemsize)


class KVCache:
    """A pool of blocks for each layer. The caller gives blocks to sequences; block 0 belongs to none.

    ``num_blocks`` gives the blocks of each group of layers, the null block included. ``source`` holds the encoded
    sources, which the decoder of an encoder-decoder reads beside its own tokens; it has one group. The pools of a group
    can grow to ``max_blocks`` of it, at the same addresses. Of several ranks, each keeps its part of the heads.
    """

    def __init__(
        self, ops: Backend, shape: CacheShape, num_blocks: Sequence[int], max_blocks: Sequence[int] | None = None
    ):
        self.ops = ops
        self.shape = shape
        self.num_blocks = list(num_blocks)
        self.layers: list[LayerCache] = []
        self.source: KVCache | None = None
        try:
            for index in range(shape.layers):
                group = shape.group_of(index)
                layer = ops.layer_cache(
                    self.num_blocks[group], shape.kv_heads // ops.communicator.tp_size, shape.head_dim,
                    int8=shape.int8, max_blocks=max_blocks[group] if max_blocks else None,
                )  # fmt: skip
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
    def for_sequences(cls, ops: Backend, shape: CacheShape, sequences: int, tokens: int) -> KVCache:
        """A cache with the blocks of :meth:`tables`, for ``sequences`` sequences of up to ``tokens`` tokens."""
        count = 1 + sequential_tables(sequences, tokens).size
        return cls(ops, shape, [count] * len(shape.groups))

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
