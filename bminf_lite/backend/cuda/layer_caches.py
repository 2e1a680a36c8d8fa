"""The key-value caches of layers on a GPU: pools of blocks that grow where they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import HEAD_PAD, round_up
from ...cuda.kernels.attention.heads import MAX_HEAD_DIM
from ...cuda.runtime.driver import Device
from ...errors import DeviceError
from ...memory.arena import Arena
from ...memory.cache_memory import block_bytes
from ...memory.device import GrowingMemory
from ..values import BLOCK_SIZE, LayerCache
from .arrays import Arrays


class LayerCaches:
    """Makes, grows and frees caches. Heads are padded to multiples of ``HEAD_PAD`` elements."""

    def __init__(self, device: Device, arena: Arena, arrays: Arrays):
        self.device = device
        self.arena = arena
        self.arrays = arrays

    def make(self, num_blocks: int, kv_heads: int, head_dim: int, int8: bool, max_blocks: int | None) -> LayerCache:
        """The cache of a layer; it can grow to ``max_blocks`` blocks without being copied.

        Raises ``DeviceError`` for heads that no attention kernel takes.
        """
        if head_dim > MAX_HEAD_DIM or head_dim % 2:
            raise DeviceError(f"heads of {head_dim} elements; attention kernels take even sizes up to {MAX_HEAD_DIM}")
        if max_blocks is not None:
            return self._growing_cache(num_blocks, max_blocks, kv_heads, head_dim, int8)
        shape, padded = (num_blocks, kv_heads, BLOCK_SIZE), round_up(head_dim, HEAD_PAD)
        keys, values = (self.arrays.empty((*shape, padded), np.int8 if int8 else np.float16) for _ in range(2))
        scales = (self.arrays.empty(shape, np.float16) for _ in range(2 if int8 else 0))
        return LayerCache(keys[..., :head_dim], values[..., :head_dim], *scales)

    def grow(self, cache: LayerCache, num_blocks: int) -> None:
        """Map memory for ``num_blocks`` blocks of a cache that was made to grow."""
        _, kv_heads, _, head_dim = cache.keys.shape
        cache.memory.grow(num_blocks)
        self._set_pools(cache, num_blocks, kv_heads, head_dim)

    def free(self, cache: LayerCache) -> None:
        """Give back the memory of a cache that was made to grow, after all work under way."""
        if cache.memory is not None:
            self.arrays.stream.synchronize()
            cache.memory.free()

    def _growing_cache(self, num_blocks: int, max_blocks: int, kv_heads: int, head_dim: int, int8: bool) -> LayerCache:
        item_bytes = block_bytes(kv_heads, round_up(head_dim, HEAD_PAD), int8)
        memory = GrowingMemory(self.device, self.arena, item_bytes, max_blocks)
        try:
            memory.grow(num_blocks)
        except BaseException:
            memory.free()
            raise
        cache = LayerCache(None, None, memory=memory)
        self._set_pools(cache, num_blocks, kv_heads, head_dim)
        return cache

    def _set_pools(self, cache: LayerCache, num_blocks: int, kv_heads: int, head_dim: int) -> None:
        """Let a cache hold ``num_blocks`` blocks: keys, values, and for int8 the scales, in lanes of its memory."""
        memory: GrowingMemory = cache.memory
        shape, padded = (num_blocks, kv_heads, BLOCK_SIZE), round_up(head_dim, HEAD_PAD)

        def array(lane: int, shape: tuple[int, ...], dtype: type) -> cp.ndarray:
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            unowned = cp.cuda.UnownedMemory(memory.address(lane), nbytes, memory, self.arrays.device)
            return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(unowned, 0))

        int8 = memory.lanes == 4
        codes = np.int8 if int8 else np.float16
        cache.keys, cache.values = (array(lane, (*shape, padded), codes)[..., :head_dim] for lane in range(2))
        if int8:
            cache.key_scales, cache.value_scales = (array(lane, shape, np.float16) for lane in (2, 3))


def copies_of_blocks(copies: Sequence[tuple[LayerCache, int, int]]) -> np.ndarray:
    """What :meth:`.CopyBlocks.launch` reads for the copies of :meth:`.Backend.copy_blocks`; padding is copied too."""
    rows = [
        (start + target * nbytes, start + source * nbytes, nbytes)
        for cache, source, target in copies
        for start, nbytes in _lanes(cache)
    ]
    return np.array(rows, np.int64)


def _lanes(cache: LayerCache) -> Sequence[tuple[int, int]]:
    """The address of each array of a cache, which stays, and the bytes of a block; arrays take long to tell them."""
    cache.lanes = cache.lanes or [(array.data.ptr, array.strides[0]) for array in cache.arrays]
    return cache.lanes


def reserved_blocks(cache: LayerCache) -> int:
    """The blocks that a cache can grow to without moving."""
    return cache.num_blocks if cache.memory is None else int(cache.memory.most)
