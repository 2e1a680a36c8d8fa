"""The caches of layers on a GPU: pools of blocks of keys and values, or of slots of states, that grow in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np

from ...cuda.kernels.arrays import HEAD_PAD, round_up
from ...cuda.kernels.attention.heads import max_head_dim
from ...cuda.runtime.driver import Device
from ...errors import DeviceError
from ...memory.arena import Arena
from ...memory.device import GrowingMemory
from ..cache_values import AnyCache, LatentCache, LayerCache, StateArray, StateCache, block_bytes, latent_block_bytes
from ..values import BLOCK_SIZE
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
        most = max_head_dim(self.device.compute_capability)
        if head_dim > most or head_dim % 2:
            raise DeviceError(
                f"heads of {head_dim} elements; attention kernels take even sizes up to {most} on this GPU"
            )
        if max_blocks is not None:
            return self._growing_cache(num_blocks, max_blocks, kv_heads, head_dim, int8)
        shape, padded = (num_blocks, kv_heads, BLOCK_SIZE), round_up(head_dim, HEAD_PAD)
        keys, values = (self.arrays.empty((*shape, padded), np.int8 if int8 else np.float16) for _ in range(2))
        scales = (self.arrays.empty(shape, np.float16) for _ in range(2 if int8 else 0))
        return LayerCache(keys[..., :head_dim], values[..., :head_dim], *scales)

    def make_latent(self, num_blocks: int, row_dim: int, int8: bool, max_blocks: int) -> LatentCache:
        """The latent rows of a layer; they can grow to ``max_blocks`` blocks without being copied."""
        padded = round_up(row_dim, HEAD_PAD)
        memory = self._memory(latent_block_bytes(padded, int8), num_blocks, max_blocks)
        shape = (num_blocks, BLOCK_SIZE)
        rows = self._array(memory, 0, (*shape, padded), np.int8 if int8 else np.float16)[..., :row_dim]
        return LatentCache(rows, self._array(memory, 1, (*shape, 2), np.float16) if int8 else None, memory=memory)

    def make_states(self, num_slots: int, arrays: Sequence[StateArray], max_slots: int) -> StateCache:
        """The states of a layer; they can grow to ``max_slots`` slots without being copied."""
        memory = self._memory([array.slot_bytes() for array in arrays], num_slots, max_slots)
        cache = StateCache({}, memory=memory)
        for lane, array in enumerate(arrays):
            dtype = np.dtype(np.float16 if array.dtype is None else array.dtype)
            shape = array.slot_shape
            dense = (dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
            strides = (array.slot_bytes(), *dense)
            cache.named[array.name] = self._array(memory, lane, (num_slots, *shape), dtype, strides)
        return cache

    def grow(self, cache: AnyCache, num_blocks: int) -> None:
        """Map memory for ``num_blocks`` blocks or slots of a cache that was made to grow."""
        memory: GrowingMemory = cache.memory
        memory.grow(num_blocks)
        cache.set_arrays(
            [
                self._array(memory, lane, (num_blocks, *array.shape[1:]), array.dtype, array.strides)
                for lane, array in enumerate(cache.arrays)
            ]
        )

    def free(self, cache: AnyCache) -> None:
        """Give back the memory of a cache that was made to grow, after all work under way."""
        if cache.memory is not None:
            self.arrays.stream.synchronize()
            cache.memory.free()

    def _memory(self, item_bytes: Sequence[int], count: int, most: int) -> GrowingMemory:
        """Memory for ``count`` items in each lane, which can grow to ``most``."""
        memory = GrowingMemory(self.device, self.arena, item_bytes, most)
        try:
            memory.grow(count)
        except BaseException:
            memory.free()
            raise
        return memory

    def _growing_cache(self, num_blocks: int, max_blocks: int, kv_heads: int, head_dim: int, int8: bool) -> LayerCache:
        padded = round_up(head_dim, HEAD_PAD)
        memory = self._memory(block_bytes(kv_heads, padded, int8), num_blocks, max_blocks)
        codes, shape = np.int8 if int8 else np.float16, (num_blocks, kv_heads, BLOCK_SIZE)
        keys, values = (self._array(memory, lane, (*shape, padded), codes)[..., :head_dim] for lane in range(2))
        cache = LayerCache(keys, values, memory=memory)
        if int8:
            cache.key_scales, cache.value_scales = (self._array(memory, lane, shape, np.float16) for lane in (2, 3))
        return cache

    def _array(
        self,
        memory: GrowingMemory,
        lane: int,
        shape: tuple[int, ...],
        dtype: Any,
        strides: tuple[int, ...] | None = None,
    ) -> cp.ndarray:
        """The first items of a lane as an array; the strides of padded items are given."""
        nbytes = shape[0] * strides[0] if strides else math.prod(shape) * np.dtype(dtype).itemsize
        unowned = cp.cuda.UnownedMemory(memory.address(lane), nbytes, memory, self.arrays.device)
        return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(unowned, 0), strides)


def copies_of_blocks(copies: Sequence[tuple[AnyCache, int, int]]) -> np.ndarray:
    """What :meth:`.CopyBlocks.launch` reads for the copies of :meth:`.Backend.copy_blocks`; padding is copied too."""
    rows = [
        (start + target * nbytes, start + source * nbytes, nbytes)
        for cache, source, target in copies
        for start, nbytes in _lanes(cache)
    ]
    return np.array(rows, np.int64)


def _lanes(cache: AnyCache) -> Sequence[tuple[int, int]]:
    """The address of each array of a cache, which stays, and the bytes of a block; arrays take long to tell them."""
    cache.lanes = cache.lanes or [(array.data.ptr, array.strides[0]) for array in cache.arrays]
    return cache.lanes


def reserved_blocks(cache: LayerCache) -> int:
    """The blocks that a cache can grow to without moving."""
    return cache.num_blocks if cache.memory is None else int(cache.memory.most)
