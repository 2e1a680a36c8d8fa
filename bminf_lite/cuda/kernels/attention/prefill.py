"""Attention for steps with several new tokens per sequence: over the paged cache, a source, or each other.

The kernels multiply tile by tile on the tensor cores and never write scores to memory: ``attention/prefill.cu`` for
every GPU, and for compute capability 9.0 ``attention/prefill_hopper.cu``, which supports causal attention without a
table of biases, and ``attention/packed_hopper.cu``, for texts with heads of 64. They are templates over the head size
and the tile sizes, compiled at their first launch. The order of all sums is that of ``attention/softmax.cuh``, so a
query's output has the same bits however the work is divided.

Few queries that see many keys are split: several blocks share a tile of queries, each with some segments of the keys.
They hand over a record per segment in scratch memory, and ``attention/prefill_merge.cu`` merges these. The kernels
divide the work by the lengths that they find on the device; the launch depends only on the number of tokens and
sequences and on whether contexts may exceed ``SEGMENT`` and ``SPLIT_CONTEXT``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ...runtime.driver import Device, DeviceAttribute, shared_memory_per_block
from ...runtime.kernel import Kernel
from ...runtime.tensor_maps import NBYTES as TENSOR_MAP_BYTES
from ...runtime.tensor_maps import TensorMapDataType, tensor_map_2d
from ..arrays import ceil_div
from ..constants import BLOCK_SIZE, LARGE_SHARED_MEMORY, SEGMENT, AttentionMask, ScoreKind, attention_tile
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..sources import load
from .heads import ELEMENTS, HALF, INT8, LARGE_HEAD_DIM, Scores, max_head_dim

WARP = 32
HOPPER_SHARED = (227 << 10) - 512
"""Bytes of dynamic shared memory of a block on compute capability 9.0."""
MERGE_WARPS = 8
"""Warps of a block of ``prefill_merge.cu``, each of which merges eight columns of 16 rows."""
SPLIT_CONTEXT = 4 * SEGMENT
"""Tiles are split only in steps whose contexts may be longer."""
MAX_RECORD_BYTES = 256 << 20
"""Scratch memory for records. Sequences whose records do not fit are not split."""
TILE_ROWS = SMALL_TILE, TILE, CLUSTER_TILE = 64, 128, 256
"""Rows of a tile, from which :func:`tile_rows` chooses."""
CLUSTER_ROWS, CLUSTER_WORK = 4096, 30 << 20
"""A step uses tiles of ``CLUSTER_TILE`` rows if its sequences have at least ``CLUSTER_ROWS`` rows in the mean, and at
least ``CLUSTER_WORK`` products of a row and a key that it sees each.

For less work, a launch with clusters has taken longer: a prompt of 2,048 tokens with 32 and 4 heads 86.1 us instead of
83.9.
"""
SHORT_ROWS, LIGHT_DEPTH, LIGHT_DEPTH_90 = 512, 32, 64
"""Sequences of up to ``SHORT_ROWS`` rows in the mean, whose tokens see all of them, have tiles of ``SMALL_TILE`` rows
if heads have up to ``LIGHT_DEPTH`` columns, on compute capability 9.0 up to ``LIGHT_DEPTH_90``, unless
:func:`is_packed`.

A sequence's last tile is rarely full, and a small tile of such heads leaves registers for four blocks an SM.
"""
PACKED_KEYS = 64
"""Keys of a tile of ``packed_hopper.cu``."""
COUNTERS = 2
"""Elements of ``counters`` in :meth:`PrefillAttention.launch`."""
COMMON_DEPTHS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 512)
MASKS = (
    *((AttentionMask.CAUSAL, scores) for scores in ScoreKind),
    (AttentionMask.CROSS, ScoreKind.PLAIN),
    (AttentionMask.BIDIRECTIONAL, ScoreKind.PLAIN),
    (AttentionMask.BIDIRECTIONAL, ScoreKind.BIASED),
)
"""Masks, and the scores that they are used with."""


@dataclass(frozen=True)
class AttentionTileConfig:
    """One kernel without its last template argument, the element of the cache.

    A block has ``threads`` threads and ``shared`` bytes. The ``cluster`` blocks of a cluster compute a tile of ``rows``
    rows of ``depth`` elements. A row is one query token of one of the heads that share a key-value head. An SM runs up
    to ``blocks`` blocks at once. The running result of merged segments is in shared memory or, with ``external``, in
    scratch memory. ``tensor_maps``: the kernel gets tensor maps of keys and values. ``has_sinks``: its scores are
    ``ScoreKind.SINKS``.
    """

    source: str
    kernel: str
    depth: int
    rows: int
    threads: int
    shared: int
    blocks: int
    external: bool
    tensor_maps: bool
    has_sinks: bool
    cluster: int = 1

    def expression(self, element: str) -> str:
        """The name expression for a cache of ``HALF`` or ``INT8``."""
        return f"{self.kernel}, {element}>"

    @property
    def running_bytes(self) -> int:
        """Bytes of scratch memory for the running result of one tile."""
        return self.rows * self.depth * 4 if self.external else 0

    @property
    def record_bytes(self) -> int:
        """Bytes of the record of one tile and segment: outputs, maximum and sum of each row."""
        return self.rows * (self.depth + 2) * 4

    @property
    def merge(self) -> str:
        """The name expression of the kernel that merges records."""
        return f"bminf::attention_prefill_merge<{self.depth}, {self.rows}, {MERGE_WARPS}, {BOOLEANS[self.has_sinks]}>"


def synchronous(
    depth: int, rows: int, keys: int, blocks: int, mask: AttentionMask, scores: ScoreKind, warps: int = 4
) -> AttentionTileConfig:
    """For any GPU: ``warps`` warps per block, registers for ``blocks`` blocks per SM, ``keys`` keys per tile."""
    kind = f"{int(mask)}, {int(scores)}"
    return AttentionTileConfig(
        source="attention/prefill.cu",
        kernel=f"bminf::attention_prefill<{depth}, {rows}, {keys}, {warps}, {blocks}, {kind}",
        depth=depth,
        rows=rows,
        threads=warps * WARP,
        shared=(rows + 2 * keys) * (depth + 8) * 2,
        blocks=blocks,
        external=True,
        tensor_maps=False,
        has_sinks=scores is ScoreKind.SINKS,
    )


def hopper(
    depth: int, rows: int, keys: int, stages: int, scores: ScoreKind, int8: bool, cluster: int = 1
) -> AttentionTileConfig:
    """For compute capability 9.0: four warps per 64 rows, four producer warps, and for int8 four that convert codes.

    A block has ``rows`` rows, and a stage ``keys`` keys.
    """
    shared = (rows + 2 * stages * keys) * depth * 2 + 1024
    running = rows * depth * 4
    external = shared + running > HOPPER_SHARED
    sizes = f"{depth}, {rows}, {keys}, {stages}, {cluster}"
    return AttentionTileConfig(
        source="attention/prefill_hopper.cu",
        kernel=f"bminf::attention_prefill_hopper<{sizes}, {BOOLEANS[external]}, {int(scores)}",
        depth=depth,
        rows=rows * cluster,
        threads=(rows // 64 + 1 + int8) * 4 * WARP,
        shared=shared + (0 if external else running),
        blocks=1,
        external=external,
        tensor_maps=True,
        has_sinks=scores is ScoreKind.SINKS,
        cluster=cluster,
    )


def packed(depth: int, stages: int = 4, blocks: int = 2) -> AttentionTileConfig:
    """For compute capability 9.0 and packed texts: four warps per 64 rows, of which one finds work and copies tiles."""
    return AttentionTileConfig(
        source="attention/packed_hopper.cu",
        kernel=f"bminf::attention_packed_hopper<{depth}, {stages}, {blocks}",
        depth=depth,
        rows=TILE,
        threads=8 * WARP,
        shared=(2 * TILE + 2 * stages * PACKED_KEYS) * depth * 2 + 1024,
        blocks=blocks,
        external=True,
        tensor_maps=True,
        has_sinks=False,
    )


def tile_rows(
    tokens: int,
    batch_size: int,
    max_query_len: int,
    max_context_len: int,
    group: int,
    mask: AttentionMask = AttentionMask.CAUSAL,
    light: bool = False,
) -> int:
    """One of ``TILE_ROWS`` for a launch of these sizes; a token has ``group`` rows. ``light``: see :func:`is_light`."""
    mean = tokens * group / batch_size
    is_short = mask is AttentionMask.BIDIRECTIONAL and light and mean <= SHORT_ROWS
    if max_query_len * group <= SMALL_TILE or is_short:
        return SMALL_TILE
    work = mean * (max_context_len - max_query_len / 2)  # a query sees half of the new keys in the mean
    return CLUSTER_TILE if mean >= CLUSTER_ROWS and work >= CLUSTER_WORK else TILE


def is_packed(capability: Capability, depth: int, mask: AttentionMask, scores: ScoreKind) -> bool:
    """Whether ``packed_hopper.cu`` computes texts with heads padded to ``depth`` columns, unless all of them are short.

    It has taken 288 us for texts of 64 tokens, for which tiles of ``SMALL_TILE`` rows took 247.
    """
    is_plain = mask is AttentionMask.BIDIRECTIONAL and scores is ScoreKind.PLAIN
    return capability == (9, 0) and depth == 64 and is_plain


def is_light(capability: Capability, depth: int) -> bool:
    """Whether small tiles of heads padded to ``depth`` columns leave registers for four blocks an SM."""
    return depth <= (LIGHT_DEPTH_90 if capability == (9, 0) else LIGHT_DEPTH)


@functools.lru_cache(1024)
def tile_config_for(
    compute_capability: Capability,
    depth: int,
    rows: int,
    mask: AttentionMask = AttentionMask.CAUSAL,
    scores: ScoreKind = ScoreKind.PLAIN,
    int8: bool = False,
) -> AttentionTileConfig:
    """The tiling for heads padded to ``depth`` columns and tiles of up to ``rows`` rows, one of ``TILE_ROWS``.

    The keys of a tile depend on neither ``rows`` nor ``int8``: they are part of the order of sums.
    """
    biased = scores is ScoreKind.BIASED
    keys = attention_tile(compute_capability, depth, mask, biased)
    if compute_capability == (9, 0) and depth in (64, 128, 256) and mask is AttentionMask.CAUSAL and not biased:
        if rows == SMALL_TILE:  # the deeper pipeline is for reading many keys
            return hopper(depth, SMALL_TILE, keys, stages=3, scores=scores, int8=int8)
        cluster = 1 if int8 or depth > 128 else rows // TILE  # elsewhere it has not paid
        return hopper(depth, TILE, keys, stages=2, scores=scores, int8=int8, cluster=cluster)
    if rows > SMALL_TILE and is_packed(compute_capability, depth, mask, scores):
        return packed(depth)
    tile = functools.partial(synchronous, depth, keys=keys, mask=mask, scores=scores)
    little = shared_memory_per_block(compute_capability) < LARGE_SHARED_MEMORY
    if depth > LARGE_HEAD_DIM:  # two warps share a row
        return tile(rows=32 if little else 64, blocks=1, warps=4 if little else 8)
    if depth > 128:  # the output accumulator takes half of a thread's registers
        return tile(rows=64, blocks=1)
    if depth > (64 if compute_capability >= (8, 0) else 96) and little:
        return tile(rows=64, blocks=2)
    rows = SMALL_TILE if biased else min(rows, TILE)  # the biases of 128 rows would not fit the registers
    is_small = mask is AttentionMask.BIDIRECTIONAL and rows == SMALL_TILE and not biased
    return tile(rows=rows, blocks=4 if is_small and is_light(compute_capability, depth) else 2)


@dataclass(frozen=True)
class PrefillPlan:
    """What all launches of one shape have in common.

    The GPU computes ``residents`` tiles at once. All tiles make about ``parts`` parts: one for each resident, or two
    for small tiles. A step has at most ``tiles`` tiles per key-value head, of which the last one of each sequence may
    be partly empty. At most ``split_tiles`` of them are split, which adds as many pieces at most, and they leave
    ``records`` records in all; 0 if none may be split. ``running_bytes`` are those of running results in memory.
    """

    tile_config: AttentionTileConfig
    residents: int
    parts: int
    tiles: int
    split_tiles: int
    records: int
    running_bytes: int


class PrefillAttention:
    """Attention of new tokens over a cache that already holds their keys and values."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._num_sms = device.attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
        self._kernels = functools.cache(self._load)
        self._plan = functools.lru_cache(256)(self._find_plan)  # the layers of a step have one, or few

    @staticmethod
    def instantiations(capability: Capability) -> Iterator[KernelFamily]:
        """For common head sizes; other multiples of 16 are compiled when needed, as are large heads of rare kinds."""
        for depth, rows, (mask, scores), element in itertools.product(COMMON_DEPTHS, TILE_ROWS, MASKS, ELEMENTS):
            is_rare = depth > LARGE_HEAD_DIM and (mask, scores) != (AttentionMask.CAUSAL, ScoreKind.PLAIN)
            if is_rare or depth > max_head_dim(capability):
                continue
            if mask is AttentionMask.BIDIRECTIONAL and element == INT8:
                continue
            tile_config = tile_config_for(capability, depth, rows, mask, scores, element == INT8)
            yield KernelFamily(tile_config.source, tile_config.expression(element))
            yield KernelFamily("attention/prefill_merge.cu", tile_config.merge)

    def scratch_bytes(
        self, *, heads: int, kv_heads: int, head_dim: int, tokens: int, batch_size: int, max_query_len: int,
        max_context_len: int,
        mask: AttentionMask = AttentionMask.CAUSAL, scores: ScoreKind = ScoreKind.PLAIN, int8: bool = False,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> int:  # fmt: skip
        """Bytes of scratch memory that a launch can use; with less, it splits fewer sequences.

        It needs at least what this returns for ``max_record_bytes = 0``. The arguments are those of :meth:`launch`.
        """
        plan = self._plan(
            heads, kv_heads, head_dim, tokens, batch_size, max_query_len, max_context_len, mask, scores, int8
        )
        record_bytes = plan.tile_config.record_bytes
        return plan.running_bytes + min(plan.records, max_record_bytes // record_bytes) * record_bytes

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
        block_tables: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        table_pitch: int,
        num_blocks: int,
        scores: Scores,
        window: int | None,
        tokens: int,
        batch_size: int,
        max_query_len: int,
        max_context_len: int,
        counters: int,
        scratch: int,
        scratch_bytes: int,
        mask: AttentionMask = AttentionMask.CAUSAL,
        source_lens: int = 0,
        key_scales: int = 0,
        value_scales: int = 0,
        stream: int = 0,
        dependent: bool = False,
    ) -> None:
        """Launch on ``stream``. Addresses are of the GPU; with ``D = head_dim`` padded to a multiple of 16:

        - ``q`` fp16 ``[T, heads, D]`` with ``q_pitch`` elements from token to token, normalised and rotated already;
        - ``keys``, ``values`` fp16 ``[num_blocks, kv_heads, BLOCK_SIZE, D]``, with the new tokens' in place, zero in
          padding; or int8 codes with ``key_scales``, ``value_scales`` fp16 ``[num_blocks, kv_heads, BLOCK_SIZE]``;
        - ``out`` fp16 ``[T, heads * head_dim]`` with ``out_pitch`` elements from token to token;
        - ``source_lens`` int32 ``[batch_size]``, for ``AttentionMask.CROSS``;
        - ``cu_seqlens`` int32 ``[batch_size + 1]``, ``context_lens`` int32 ``[batch_size]`` and ``block_tables`` int32
          ``[batch_size, table_pitch]``, as in ``backend.values.ForwardBatch``;
        - ``counters`` int32 ``[COUNTERS]``, zero before and after;
        - ``scratch``, ``scratch_bytes``: see :meth:`scratch_bytes`.

        Addresses are multiples of 16 bytes, pitches of 8 elements. ``tokens`` is ``T``, ``scores.scale`` is positive,
        ``heads`` a multiple of ``kv_heads``, ``window`` at least 1 or None, and ``head_dim`` at most ``MAX_HEAD_DIM``.
        No sequence has more than ``max_query_len`` of these tokens or ``max_context_len`` keys. For
        ``AttentionMask.BIDIRECTIONAL``, ``keys`` and ``values`` are fp16 ``[T, num_blocks, D]``, of which the first
        ``kv_heads`` rows of each token are read, and ``block_tables`` is not. ``dependent`` as in :class:`Kernel`.
        """
        assert (mask, scores.kind) in MASKS
        int8 = key_scales != 0
        plan = self._plan(
            heads, kv_heads, head_dim, tokens, batch_size, max_query_len, max_context_len, mask, scores.kind, int8
        )
        tile_config, running_bytes = plan.tile_config, plan.running_bytes
        kernel, merge = self._kernels(tile_config, INT8 if int8 else HALF)
        pieces, max_records = plan.tiles, 0
        if plan.records:
            max_records = max(0, scratch_bytes - running_bytes) // tile_config.record_bytes
            pieces += plan.split_tiles
        args = (
            q, q_pitch, keys, values, out, out_pitch, cu_seqlens, context_lens, block_tables,
            table_pitch, num_blocks, scores.scale, window or 0, heads, kv_heads, head_dim, batch_size,
            scores.bias, scores.max_distance, scores.softcap, source_lens, key_scales, value_scales,
            scratch + running_bytes if max_records else 0, max_records, plan.parts,
            scratch if running_bytes else 0, counters,
        )  # fmt: skip
        maps: tuple[object, ...] = ()
        if mask is AttentionMask.BIDIRECTIONAL and tile_config.tensor_maps:
            depth, element = tile_config.depth, TensorMapDataType.FLOAT16
            maps = tuple(
                tensor_map_2d(x, element, tokens, kv_heads * depth, num_blocks * depth, PACKED_KEYS)
                for x in (keys, values)
            )
        elif tile_config.tensor_maps:
            pool_rows = num_blocks * kv_heads * BLOCK_SIZE
            depth, element = tile_config.depth, TensorMapDataType.FLOAT16
            maps = (bytes(TENSOR_MAP_BYTES),) * 2  # codes are read without them
            if not int8:
                maps = tuple(tensor_map_2d(x, element, pool_rows, depth, depth, BLOCK_SIZE) for x in (keys, values))
        blocks = min(pieces * kv_heads, plan.residents) * tile_config.cluster
        cluster = tile_config.cluster if tile_config.cluster > 1 else None
        kernel(blocks, tile_config.threads, args + maps, tile_config.shared, stream, dependent, cluster)
        if max_records:
            slices = tile_config.rows // 16 * (tile_config.depth // 8) // MERGE_WARPS
            merge(
                (kv_heads, min(plan.tiles, plan.split_tiles) * slices), MERGE_WARPS * WARP, args, 0, stream, dependent
            )

    def _find_plan(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        batch_size: int,
        max_query_len: int,
        max_context_len: int,
        mask: AttentionMask,
        scores: ScoreKind,
        int8: bool,
    ) -> PrefillPlan:
        group = heads // kv_heads
        capability, depth = self._device.compute_capability, -(-head_dim // 16) * 16
        light = is_light(capability, depth) and scores is ScoreKind.PLAIN
        light = light and not is_packed(capability, depth, mask, scores)
        rows = tile_rows(tokens, batch_size, max_query_len, max_context_len, group, mask, light)
        tile_config = tile_config_for(capability, depth, rows, mask, scores, int8)
        residents = self._num_sms * tile_config.blocks // tile_config.cluster
        parts = residents * (1 if tile_config.rows > SMALL_TILE else 2)
        tiles = (tokens * group + batch_size * (tile_config.rows - 1)) // tile_config.rows
        split_tiles = ceil_div(parts, kv_heads)
        may_split = mask is AttentionMask.CAUSAL and max_context_len > SPLIT_CONTEXT
        records = min(tiles, split_tiles) * kv_heads * ceil_div(max_context_len, SEGMENT) if may_split else 0
        running_bytes = residents * tile_config.running_bytes if max_context_len > SEGMENT else 0
        return PrefillPlan(tile_config, residents, parts, tiles, split_tiles, records, running_bytes)

    def _load(self, tile_config: AttentionTileConfig, element: str) -> tuple[Kernel, Kernel]:
        return (
            load(self._device, tile_config.source, tile_config.expression(element)),
            load(self._device, "attention/prefill_merge.cu", tile_config.merge),
        )
