"""The key-value cache of a whole model: a row ("slot") per sequence, growing with the longest of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..backend.base import Backend
from ..backend.values import CACHE_BLOCK, LayerCache


@dataclass(frozen=True)
class CacheShape:
    """The shape of a token's keys and values. With ``int8`` they are codes, with an fp16 scale per head and token."""

    layers: int
    kv_heads: int
    head_dim: int
    int8: bool = False

    def bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes that one token of one sequence takes; ``itemsize`` is that of the activation type."""
        return 2 * self.layers * self.kv_heads * (self.head_dim + 2 if self.int8 else self.head_dim * itemsize)


class KVCache:
    """Keys and values of ``slots`` sequences of up to ``capacity`` tokens; ``limit`` is the model's context length.

    ``source`` holds the encoded sources, which the decoder of an encoder-decoder reads beside its own tokens.
    """

    BLOCK = CACHE_BLOCK

    def __init__(self, ops: Backend, shape: CacheShape, slots: int, capacity: int, limit: int):
        self.ops = ops
        self.slots = slots
        self.limit = limit
        self.capacity = self._rounded(capacity)
        self.layers: list[LayerCache] = []
        self.source: SourceCache | None = None
        try:
            for _ in range(shape.layers):
                layer = ops.layer_cache(slots, shape.kv_heads, self.capacity, shape.head_dim, int8=shape.int8)
                self.layers.append(layer)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory now, even if a traceback or a caller still refers to the cache or to its layers."""
        for layer in self.layers:
            layer.keys = layer.values = layer.key_scales = layer.value_scales = None
        self.layers.clear()
        if self.source is not None:
            self.source.close()

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` per slot; growth is by half at least. Contents are kept, arrays are replaced."""
        if tokens <= self.capacity:
            return
        capacity = self._rounded(max(tokens, min(self.limit, self.capacity * 3 // 2)))
        for layer in self.layers:
            self.ops.grow(layer, capacity)
        self.capacity = capacity

    def _rounded(self, tokens: int) -> int:
        return min(-(-max(tokens, 1) // self.BLOCK) * self.BLOCK, max(self.limit, tokens))


class SourceCache(KVCache):
    """Keys and values of encoded sources, one per slot, for each layer of a decoder.

    ``lengths`` is int32 ``[slots]`` on the device: how many tokens the source of each slot has.
    """

    def __init__(self, ops: Backend, shape: CacheShape, slots: int, capacity: int, limit: int):
        super().__init__(ops, shape, slots, capacity, limit)
        self.lengths = ops.array(np.zeros(slots, np.int32))
        self._lengths = np.zeros(slots, np.int32)

    def set_lengths(self, lengths: dict[int, int]) -> None:
        """Set the lengths of some sources: slot -> tokens."""
        for slot, length in lengths.items():
            self._lengths[slot] = length
        self.ops.assign(self.lengths, self._lengths)
