"""Attention of one new token per sequence over the cache or a source: the launcher of ``decode.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....backend.values import AttentionSpec, ForwardBatch, LayerCache
from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..constants import DECODE_HEADS, DecodeMask
from ..instantiations import Capability, KernelFamily, numbers
from ..launcher import Launcher, StepContext
from .heads import ELEMENTS, bias_arguments, element_of, head_arguments, head_pitch_of

if TYPE_CHECKING:
    import cupy as cp

MAX_CLUSTER = 8
DEPTHS = (64, 128, 256)
"""Head sizes that the kernel is compiled for."""
MIN_TOKENS_PER_SPLIT = 128
"""Tokens of a context per block, at least: splitting further is slower."""
TOKENS_PER_CLUSTER = 1024
"""Tokens of a context per block above which several clusters, which exchange results in memory, beat one."""
CAUSAL, BIASED, CROSS = map(int, DecodeMask)


@dataclass(frozen=True)
class KVSplit:
    """How a context is split: blocks per cluster, blocks per context."""

    cluster: int
    blocks: int

    def partial_elements(self, spec: AttentionSpec, batch: ForwardBatch) -> int:
        """fp32 numbers that the clusters of all contexts exchange; 0 for one cluster per context."""
        clusters = self.blocks // self.cluster
        if clusters == 1:
            return 0
        return batch.batch_size * spec.heads * clusters * (2 * self.cluster + padded_head_dim(spec))


class AttentionDecode:
    """The kernel of ``decode.cu``."""

    source = "attention/decode.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._warps_divisor = 1 if launcher.device.compute_capability >= (8, 0) else 2

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        clusters = (1, 2, 4, MAX_CLUSTER) if capability >= (9, 0) else (1,)
        yield KernelFamily(cls.source, "attention_decode", (DEPTHS, clusters, numbers(DecodeMask), ELEMENTS))

    def split_kv(self, spec: AttentionSpec, batch: ForwardBatch, max_context_len: int) -> KVSplit:
        """How the blocks share a context of ``max_context_len`` tokens at most."""
        context_len = max_context_len if spec.window is None else min(max_context_len, spec.window)
        most = max(1, self._launcher.num_sms // (batch.batch_size * spec.kv_heads * head_groups(spec)))
        useful = min(most, ceil_div(context_len, MIN_TOKENS_PER_SPLIT))
        if not self._launcher.has_clusters:
            return KVSplit(1, useful)
        cluster = min(MAX_CLUSTER, 1 << (useful.bit_length() - 1))
        clusters = max(1, min(ceil_div(context_len, cluster * TOKENS_PER_CLUSTER), most // cluster))
        return KVSplit(cluster, cluster * clusters)

    def launch(
        self, step: StepContext, qkv: cp.ndarray, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch,
        split: KVSplit, partials: cp.ndarray | None, arrival_counts: cp.ndarray, out: cp.ndarray,
        lengths: cp.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Attention of one new token per sequence, fp16 ``[B, heads * head_dim]``.

        With ``lengths``, ``qkv`` holds queries only, and ``cache`` holds encoded sources of those lengths.
        """
        depth = padded_head_dim(spec)
        warps = (8 if depth <= 128 else 4) // self._warps_divisor
        mask = CROSS if lengths is not None else BIASED if spec.bias is not None else CAUSAL
        max_context_len = batch.max_context_len if lengths is None else cache.capacity
        expression = f"attention_decode<{depth}, {split.cluster}, {mask}, {element_of(cache)}>"
        self._launcher.launch(
            step, self.source, expression, (split.blocks, spec.kv_heads * head_groups(spec), batch.batch_size),
            32 * warps,
            (qkv.data.ptr, pitch_of(qkv), *head_arguments(spec), address(batch.context_lens), address(batch.slots),
             cache.keys.data.ptr, cache.values.data.ptr, address(partials), arrival_counts.data.ptr, out.data.ptr,
             pitch_of(out), spec.heads, spec.kv_heads, spec.head_dim, head_pitch_of(cache), cache.capacity,
             spec.window or 0, spec.scale, *bias_arguments(spec), address(lengths), address(cache.key_scales),
             address(cache.value_scales)),
            shared=warps * 2 * tile_bytes(depth, cache),
            cluster=split.cluster if split.cluster > 1 else None,
            dependent=step.is_unwritten(cache.keys.data.ptr, writes=mask != CROSS),
            bytes_moved=nbytes_of(qkv, out)
            + batch.batch_size * max_context_len * spec.kv_heads * 2 * head_bytes(cache),
        )  # fmt: skip


def padded_head_dim(spec: AttentionSpec) -> int:
    """The head size that the kernel is compiled for."""
    return max(DEPTHS[0], 1 << (spec.head_dim - 1).bit_length())


def head_groups(spec: AttentionSpec) -> int:
    """Blocks for the query heads of one key-value head."""
    return ceil_div(spec.heads // spec.kv_heads, DECODE_HEADS)


def head_bytes(cache: LayerCache) -> int:
    """Bytes of one token's key or value head, with its scale if it has one."""
    return int(cache.keys.strides[2] + (0 if cache.key_scales is None else cache.key_scales.itemsize))


def tile_bytes(depth: int, cache: LayerCache) -> int:
    """Bytes of the keys or the values that a warp takes at once: ``Tile`` in ``tiles.cuh``."""
    return int(depth * cache.keys.itemsize * (32 if cache.key_scales is not None or depth == 64 else 16))
