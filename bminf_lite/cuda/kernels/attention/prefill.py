"""Attention for steps with several new tokens per sequence: over the key-value cache, a source, or each other.

The kernels multiply tile by tile on the tensor cores and never write scores to memory: ``attention/prefill.cu`` for
every GPU and ``attention/prefill_hopper.cu`` for compute capability 9.0. They are templates over the head size and the
tile sizes, compiled at their first launch. The Hopper kernel supports causal attention without a bias only.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...runtime.driver import Device, DeviceAttribute, shared_memory_per_block
from ...runtime.kernel import Kernel
from ..constants import AttentionMask
from ..instantiations import Capability, KernelFamily
from ..sources import load
from .heads import ELEMENTS, HALF, INT8

WARP = 32
LARGE_SHARED_MEMORY = 163 << 10
"""With so much shared memory per block, two blocks for heads of more than 64 elements fit an SM."""
KERNEL_CACHE_SIZE = 1024
"""Shapes whose kernels are remembered."""
LOG2_E = math.log2(math.e)
COMMON_DEPTHS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)
MASKS = (
    (AttentionMask.CAUSAL, False), (AttentionMask.CAUSAL, True), (AttentionMask.CROSS, False),
    (AttentionMask.BIDIRECTIONAL, False), (AttentionMask.BIDIRECTIONAL, True),
)  # fmt: skip
"""Masks, and whether scores have a bias."""


@dataclass(frozen=True)
class AttentionTileConfig:
    """One kernel without its last template argument, the element of the cache.

    A block has ``threads`` threads and ``shared`` bytes, and computes ``rows`` rows. A row is one query token of one of
    the heads that share a key-value head.
    """

    source: str
    kernel: str
    rows: int
    threads: int
    shared: int

    def expression(self, element: str) -> str:
        """The name expression for a cache of ``HALF`` or ``INT8``."""
        return f"{self.kernel}, {element}>"


def synchronous(
    depth: int, rows: int, keys: int, blocks: int, mask: AttentionMask, biased: bool
) -> AttentionTileConfig:
    """For any GPU: four warps per block, registers for ``blocks`` blocks per SM, ``keys`` keys per tile."""
    kind = f"{int(mask)}, {'true' if biased else 'false'}"
    return AttentionTileConfig(
        source="attention/prefill.cu",
        kernel=f"bminf::attention_prefill<{depth}, {rows}, {keys}, 4, {blocks}, {kind}",
        rows=rows,
        threads=4 * WARP,
        shared=(rows + 2 * keys) * (depth + 8) * 2,
    )


def hopper(depth: int, rows: int, keys: int, stages: int = 2) -> AttentionTileConfig:
    """For compute capability 9.0: four warps per 64 rows and four producer warps, ``keys`` keys per stage."""
    return AttentionTileConfig(
        source="attention/prefill_hopper.cu",
        kernel=f"bminf::attention_prefill_hopper<{depth}, {rows}, {keys}, {stages}",
        rows=rows,
        threads=(rows // 64 + 1) * 4 * WARP,
        shared=(rows + 2 * stages * keys) * depth * 2 + 1024,
    )


def tile_config_for(
    compute_capability: Capability,
    depth: int,
    small: bool,
    mask: AttentionMask = AttentionMask.CAUSAL,
    biased: bool = False,
) -> AttentionTileConfig:
    """The tiling for heads padded to ``depth`` columns; ``small`` if 128 rows per block would leave SMs idle."""
    if compute_capability == (9, 0) and depth in (64, 128, 256) and mask is AttentionMask.CAUSAL and not biased:
        return hopper(depth, rows=128, keys=64 if depth == 256 else 128)
    tile = functools.partial(synchronous, depth, mask=mask, biased=biased)
    if depth > 128:  # the output accumulator takes half of a thread's registers
        return tile(rows=64, keys=48 if compute_capability >= (8, 0) else 16, blocks=1)
    little = shared_memory_per_block(compute_capability) < LARGE_SHARED_MEMORY
    if depth > 64 and compute_capability >= (8, 0) and little:
        return tile(rows=64, keys=48, blocks=2)
    if small or biased:  # the biases of 128 rows would not fit the registers
        return tile(rows=64, keys=64, blocks=2)
    return tile(rows=128, keys=64 if depth <= 64 else 32, blocks=2)


class PrefillAttention:
    """Attention of new tokens over a cache that already holds their keys and values."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._num_sms = device.attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
        self._kernel = functools.cache(self._load)
        self._find = functools.lru_cache(KERNEL_CACHE_SIZE)(self._find_uncached)

    @staticmethod
    def instantiations(capability: Capability) -> Iterator[KernelFamily]:
        """For common head sizes; other multiples of 16 are compiled when needed."""
        for depth, small, (mask, biased) in itertools.product(COMMON_DEPTHS, (False, True), MASKS):
            tile_config = tile_config_for(capability, depth, small, mask, biased)
            elements = (HALF,) if mask is AttentionMask.BIDIRECTIONAL else ELEMENTS
            yield from (KernelFamily(tile_config.source, tile_config.expression(element)) for element in elements)

    def launch(
        self,
        q: int,
        q_pitch: int,
        keys: int,
        values: int,
        out: int,
        out_pitch: int,
        cu_seqlens: int,
        context_lens: int,
        slots: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        scale: float,
        window: int | None,
        tokens: int,
        batch_size: int,
        mask: AttentionMask = AttentionMask.CAUSAL,
        bias: int = 0,
        max_distance: int = 0,
        lengths: int = 0,
        key_scales: int = 0,
        value_scales: int = 0,
        stream: int = 0,
        dependent: bool = False,
    ) -> None:
        """Launch on ``stream``. Addresses are of the GPU; with ``D = head_dim`` padded to a multiple of 16:

        - ``q`` fp16 ``[T, heads, D]`` with ``q_pitch`` elements from token to token, normalised and rotated already;
        - ``keys``, ``values`` fp16 ``[slots, kv_heads, capacity, D]``, with the new tokens' in place, zero in padding;
          or int8 codes with ``key_scales``, ``value_scales`` fp16 ``[slots, kv_heads, capacity]``;
        - ``out`` fp16 ``[T, heads * head_dim]`` with ``out_pitch`` elements from token to token;
        - ``bias`` fp32 ``[heads, 2 * max_distance + 1]``, by distance; 0 for none;
        - ``lengths`` int32 ``[slots]``, of the sources, for ``AttentionMask.CROSS``;
        - ``cu_seqlens`` int32 ``[batch_size + 1]``, ``context_lens`` and ``slots`` int32 ``[batch_size]``, as in
          ``backend.values.ForwardBatch``.

        Addresses are multiples of 16 bytes, pitches of 8 elements. ``tokens`` is ``T``, ``scale`` is positive,
        ``heads`` a multiple of ``kv_heads``, ``window`` at least 1 or None, and ``head_dim`` at most ``MAX_HEAD_DIM``.
        For ``AttentionMask.BIDIRECTIONAL``, ``keys`` and ``values`` are one slot with all tokens in order.
        ``dependent`` as in :class:`Kernel`.
        """
        rows = tokens * (heads // kv_heads)
        kernel, tile_config = self._find(rows, kv_heads, head_dim, mask, bias != 0, key_scales != 0)
        # The last tile of each sequence may be partly empty.
        tiles = (rows + batch_size * (tile_config.rows - 1)) // tile_config.rows
        kernel(
            (kv_heads, tiles), tile_config.threads,
            (
                q, q_pitch, keys, values, out, out_pitch, cu_seqlens, context_lens, slots,
                scale * LOG2_E, window or 0, heads, head_dim, capacity, batch_size,
                bias, max_distance, lengths, key_scales, value_scales,
            ),
            tile_config.shared, stream, dependent,
        )  # fmt: skip

    def _find_uncached(
        self, rows: int, kv_heads: int, head_dim: int, mask: AttentionMask, biased: bool, int8: bool
    ) -> tuple[Kernel, AttentionTileConfig]:
        small = -(-rows // 128) * kv_heads < 2 * self._num_sms
        tile_config = tile_config_for(self._device.compute_capability, -(-head_dim // 16) * 16, small, mask, biased)
        return self._kernel(tile_config, INT8 if int8 else HALF), tile_config

    def _load(self, tile_config: AttentionTileConfig, element: str) -> Kernel:
        expression = tile_config.expression(element)
        return load(self._device, tile_config.source, expression)
