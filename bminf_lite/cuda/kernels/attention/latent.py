"""Attention to latent rows: the launchers of ``latent*.cu`` and ``head_products*.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ....backend.cache_values import LatentCache
from ....backend.values import ForwardBatch, LatentSpec
from ...runtime.driver import shared_memory_per_block
from ...runtime.tensor_maps import TensorMapDataType, tensor_map_2d
from ..arrays import HEAD_PAD, address, ceil_div, nbytes_of, pitch_of, round_up
from ..constants import (
    BLOCK_SIZE,
    HEAD_PRODUCTS_COLUMNS,
    HEAD_PRODUCTS_THREADS,
    LATENT_CLUSTER,
    LATENT_FEW_ROWS,
    LATENT_HEADS,
    LATENT_KEYS,
    LATENT_MAX_KEY,
    LATENT_MERGED_TOKENS,
    LATENT_ROWS_THREADS,
    LATENT_SEGMENT,
    LATENT_THREADS,
)
from ..instantiations import BOOLEANS, Capability, KernelFamily, Together
from ..launcher import Launcher, StepContext
from .heads import ELEMENTS, INT8, LOG2_E

if TYPE_CHECKING:
    import cupy as cp

COLUMNS = (32, 64)
"""Elements of a latent that one of eight warps sums."""
KEY_COLUMNS = 64
"""Elements of a row behind those of the latent that the kernel has room for."""
ROWS = (64, 32, 16)
"""Pairs of a token and a head that a block has."""
TOKENS = (16, 64)
"""Tokens of a block of products with the matrices of heads."""
FEW_TOKENS_STAGES = (4, 8)
"""Chunks in shared memory of a block of few tokens: the most that all products of a model's heads need, if the GPU has
the room for two such blocks on an SM."""
MERGED_TOKENS = LATENT_MERGED_TOKENS
"""Tokens up to which these products merge the records of the segments before."""
MANY_TOKENS_STAGES = 2
"""The same of a block of many tokens."""
MMA_TOKENS = 32
"""Tokens up to which products with the matrices of heads are left to ``mma.sync`` on compute capability 9.0."""
HOPPER_TOKENS, HOPPER_COLUMNS = 128, 128
"""Tokens and columns of a block of these products by wgmma."""
HOPPER_PRODUCTS_THREADS, HOPPER_PRODUCTS_SHARED = 256, 3 * (HOPPER_TOKENS + HOPPER_COLUMNS) * 128 + 1024
"""Threads of such a block, and its bytes of dynamic shared memory: three chunks of 64 elements."""
BLOCKS_PER_SM = 4
"""A launch has at most about this many blocks for each SM, of which one runs at a time."""
FEW_SEGMENTS_PER_SM = 0.25
"""Segments of row tiles for each SM up to which clusters share a segment."""
HOPPER_THREADS = 512
"""Two warpgroups that sum latents, one that computes scores, and one of which one thread copies."""
HOPPER_ROWS, HOPPER_RANKS = 64, (256, 512)
"""Pairs of a token and a head in a tile by wgmma, and the elements of latents that wgmma takes, with keys of 64."""
HOPPER_OVERHEAD = 0.5
"""What an item of work by wgmma costs beside its segments, in the time of a segment."""
FEW_COLUMNS = (32, 64)
"""Elements of a latent that one block of a cluster sums."""


def unsupported(spec: LatentSpec) -> str | None:
    """Why no kernel takes such rows, or None."""
    if spec.rank % 8 or spec.rank > COLUMNS[-1] * 8:
        return f"latents of {spec.rank} elements; kernels take multiples of 8 up to {COLUMNS[-1] * 8}"
    if spec.rope_dim % 2 or spec.rope_dim > LATENT_MAX_KEY or depth_of(spec) > COLUMNS[-1] * 8 + KEY_COLUMNS:
        return (
            f"rotated keys of {spec.rope_dim} elements behind latents of {spec.rank}; kernels take even sizes up to "
            f"{LATENT_MAX_KEY}, and {COLUMNS[-1] * 8 + KEY_COLUMNS} elements in all"
        )
    return None


def depth_of(spec: LatentSpec) -> int:
    """Elements from one row of the cache to the next."""
    return round_up(spec.row_dim, HEAD_PAD)


@dataclass(frozen=True, order=True)
class LatentConfig:
    """One kernel without the type of the cache: the template arguments ``ROWS``, ``COLUMNS`` and ``STAGES``."""

    rows: int
    columns: int
    stages: int

    def template(self) -> Together:
        """The template arguments."""
        return Together((self.rows, self.columns, self.stages))

    def shared(self, depth: int) -> int:
        """Bytes of dynamic shared memory for rows of ``depth`` elements."""
        return (self.rows + self.stages * LATENT_KEYS) * (depth + 8) * 2 + 2 * self.rows * (LATENT_KEYS + 4) * 4

    def max_depth(self) -> int:
        """The longest rows."""
        return self.columns * 8 + KEY_COLUMNS


def latent_config(capability: Capability, rank: int, depth: int, rows: int, element: str) -> LatentConfig:
    """The kernel for blocks that have ``rows`` rows of queries, or for the next larger number.

    All of them sum in the same order.
    """
    columns = next(c for c in COLUMNS if rank <= 8 * c and depth <= 8 * c + KEY_COLUMNS)
    static = 4 * 4 * ROWS[0]
    room = shared_memory_per_block(capability) - static
    wanted = next(r for r in reversed(ROWS) if rows <= r or r == ROWS[0])
    deepest = (2,) if element == INT8 else (3, 2)
    possible = [
        LatentConfig(r, columns, stages)
        for stage_counts in (deepest, (1,))
        for r in ROWS
        for stages in stage_counts
        if r <= wanted
    ]
    return next(c for c in possible if c.shared(c.max_depth()) <= room)


def few_shared(columns: int, depth: int) -> int:
    """Bytes of dynamic shared memory of a block of ``latent_few`` with ``columns`` columns of latents."""
    rows = LATENT_FEW_ROWS + LATENT_SEGMENT // LATENT_CLUSTER
    scores = LATENT_FEW_ROWS * (LATENT_SEGMENT + 4) * 4
    return rows * (depth + 8) * 2 + LATENT_SEGMENT * (columns + 8) * 2 + scores


def few_columns(capability: Capability) -> tuple[int, ...]:
    """Those of :data:`FEW_COLUMNS` for which a GPU has clusters and room in shared memory."""
    if capability < (9, 0):
        return ()
    room = shared_memory_per_block(capability) - 2048
    return tuple(c for c in FEW_COLUMNS if few_shared(c, LATENT_CLUSTER * c + KEY_COLUMNS) <= room)


def hopper_shared(rank: int) -> int:
    """Bytes of dynamic shared memory of ``latent_hopper``."""
    pieces = (rank + KEY_COLUMNS) // 64
    stages, tile = 2 if rank > 256 else 4, pieces * HOPPER_ROWS * 128
    told, barriers = 5 * HOPPER_ROWS * 4 + 16, (pieces + 3) * 8
    return (stages + 1) * tile + stages * (told + barriers)


class Form(Enum):
    """The kernels that compute attention to latent rows; all give the same bits."""

    MMA_SYNC = "latent.cu"
    FEW = "latent_few.cu"
    HOPPER = "latent_hopper.cu"


@dataclass(frozen=True)
class LatentGrid:
    """``tiles`` tiles of rows, each with ``blocks`` blocks, which share its segments.

    A tile has ``records`` records: one, or where it has several blocks one for each segment. ``FEW`` has a cluster for
    each segment of a tile of ``LATENT_FEW_ROWS`` rows. ``HOPPER`` has items of work, ``blocks`` of a tile, and
    ``residents`` blocks that take them.
    """

    config: LatentConfig
    tiles: int
    blocks: int
    records: int
    form: Form = Form.MMA_SYNC
    residents: int = 0

    @property
    def merges_in_pairs(self) -> bool:
        """Whether the two blocks of each tile are a cluster, which merges its records."""
        return self.form is Form.HOPPER and self.blocks == 2 and self.residents == 2 * self.tiles

    def record_elements(self, rank: int, pairs: int) -> int:
        """fp32 numbers of all records, for ``pairs`` pairs of a token and a head."""
        if self.form is Form.FEW:
            return self.tiles * self.records * LATENT_FEW_ROWS * (rank + 2 * LATENT_CLUSTER)
        if self.form is Form.HOPPER:
            return pairs * self.records * (rank + 2) if self.blocks > 1 else self.residents * HOPPER_ROWS * rank
        return self.tiles * self.records * self.config.rows * (rank + 2)


class LatentAttentionKernels:
    """The kernels of ``latent.cu``, ``latent_few.cu`` and ``latent_hopper.cu``."""

    source = "attention/latent.cu"
    few = "attention/latent_few.cu"
    hopper = "attention/latent_hopper.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        chosen = {
            (latent_config(capability, 8 * columns, 8 * columns + KEY_COLUMNS, rows, element), element)
            for columns in COLUMNS
            for rows in ROWS
            for element in ELEMENTS
        }
        configs = sorted({config for config, _ in chosen})
        for config in configs:
            elements = tuple(element for element in ELEMENTS if (config, element) in chosen)
            yield KernelFamily(cls.source, "latent_attention", ((config.template(),), elements))
        yield KernelFamily(cls.source, "latent_merge", (tuple(dict.fromkeys(config.rows for config in configs)),))
        if few_columns(capability):
            yield KernelFamily(cls.few, "latent_few", (few_columns(capability), ELEMENTS))
        if capability == (9, 0):
            yield KernelFamily(cls.hopper, "latent_hopper", (HOPPER_RANKS,))
            yield KernelFamily(cls.hopper, "latent_hopper_merge", (HOPPER_RANKS,))

    def grid(self, spec: LatentSpec, batch: ForwardBatch, element: str, max_record_bytes: int) -> LatentGrid:
        """Which blocks compute what. It depends only on bounds that stay the same for a captured graph."""
        config = latent_config(
            self._launcher.device.compute_capability,
            spec.rank,
            depth_of(spec),
            batch.max_query_len * spec.heads,
            element,
        )
        capability, num_sms = self._launcher.device.compute_capability, self._launcher.num_sms
        segments, pairs = ceil_div(batch.max_context_len, LATENT_SEGMENT), len(batch.tokens) * spec.heads

        def fits(grid: LatentGrid) -> bool:
            return segments == 1 or 4 * grid.record_elements(spec.rank, pairs) <= max_record_bytes

        few = LatentGrid(config, max_tiles(spec, batch, LATENT_FEW_ROWS), segments, segments, Form.FEW)
        takes_few = spec.rank in [LATENT_CLUSTER * c for c in few_columns(capability)]
        if takes_few and few.tiles * segments <= self.max_few and fits(few):
            return few
        if self.has_wgmma and spec.rank in HOPPER_RANKS and depth_of(spec) == spec.rank + 64 and element != INT8:
            tiles = max_tiles(spec, batch, HOPPER_ROWS)
            parts = min(
                range(1, segments + 1),
                key=lambda n: (ceil_div(tiles * n, num_sms) * (ceil_div(segments, n) + HOPPER_OVERHEAD), n),
            )
            for blocks in (parts, 1):
                records = segments if blocks > 1 else 1
                items = tiles * blocks
                found = LatentGrid(config, tiles, blocks, records, Form.HOPPER, min(items, num_sms))
                if fits(found):
                    return found
        tiles = max_tiles(spec, batch, config.rows)
        blocks = min(segments, ceil_div(BLOCKS_PER_SM * num_sms, tiles))
        found = LatentGrid(config, tiles, blocks, segments)
        if blocks == 1 or 4 * found.record_elements(spec.rank, pairs) > max_record_bytes:
            return LatentGrid(config, tiles, 1, 1)
        return found

    def merges(self, tokens: int, grid: LatentGrid) -> bool:
        """Whether the products with the values' matrices merge the records: :meth:`.HeadProducts.values`."""
        return grid.form is Form.FEW and grid.records > 1 and tokens <= MERGED_TOKENS

    @property
    def has_wgmma(self) -> bool:
        """Whether the GPU has wgmma."""
        return self._launcher.device.compute_capability == (9, 0)

    @property
    def max_few(self) -> int:
        """The most segments of row tiles that clusters compute."""
        return int(FEW_SEGMENTS_PER_SM * self._launcher.num_sms)

    @property
    def arrival_elements(self) -> int:
        """int32 numbers of the scratch ``arrivals``, which is zero before the first launch and after each."""
        return LATENT_CLUSTER * self.max_few

    def launch(
        self, step: StepContext, queries: cp.ndarray, spec: LatentSpec, cache: LatentCache, batch: ForwardBatch,
        table: cp.ndarray, grid: LatentGrid, records: cp.ndarray | None, arrivals: cp.ndarray | None, means: cp.ndarray,
    ) -> None:  # fmt: skip
        """``queries`` fp16 ``[T, heads, depth]`` -> ``means`` fp16 ``[T, heads, mean_pitch]`` of the latents they see.

        The rows of the step's tokens are in the cache. ``records`` is fp32, of ``grid.record_elements``; it may be None
        if no sequence has more than ``LATENT_SEGMENT`` tokens. ``arrivals`` is int32, of ``arrival_elements``; no other
        kernel may use it at the same time. It may be None where the next kernel :meth:`merges`: then tiles of several
        segments have records alone.
        """
        config, depth, pitch = grid.config, depth_of(spec), means.shape[2]
        sequences = address(batch.cu_seqlens), address(batch.context_lens), batch.batch_size, spec.heads
        nbytes = nbytes_of(queries, means) + batch.batch_size * batch.max_context_len * depth * cache.rows.itemsize
        # In a step with drafts, the step itself writes some rows before a sequence's own.
        is_unwritten = step.is_unwritten(cache.rows.data.ptr, writes=True) and not batch.has_drafts
        if grid.form is Form.HOPPER:
            most = len(cache.rows) if cache.memory is None else cache.memory.most
            map_ = tensor_map_2d(
                cache.rows.data.ptr,
                TensorMapDataType.FLOAT16,
                most * BLOCK_SIZE,
                depth,
                depth,
                BLOCK_SIZE,
                promote_256b=False,
            )
            pairs = len(queries) * spec.heads
            merged, records_at = (0, address(records)) if grid.blocks > 1 else (address(records), 0)
            self._launcher.launch(
                step, self.hopper, f"latent_hopper<{spec.rank}>", grid.residents, HOPPER_THREADS,
                (queries.data.ptr, cache.rows.data.ptr, table.data.ptr, pitch_of(table), *sequences,
                 spec.scale * LOG2_E, grid.tiles, grid.blocks, merged, records_at, pairs, grid.records,
                 means.data.ptr, pitch, map_),
                shared=hopper_shared(spec.rank), cluster=2 if grid.merges_in_pairs else None, bytes_moved=nbytes,
            )  # fmt: skip
            if grid.blocks > 1 and not grid.merges_in_pairs:
                self._launcher.launch(
                    step,
                    self.hopper,
                    f"latent_hopper_merge<{spec.rank}>",
                    (len(queries), ceil_div(spec.heads * spec.rank // 4, LATENT_THREADS)),
                    LATENT_THREADS,
                    (*sequences, records_at, pairs, grid.records, means.data.ptr, pitch),
                )
            return
        if grid.form is Form.FEW:
            columns = spec.rank // LATENT_CLUSTER
            self._launcher.launch(
                step, self.few, f"latent_few<{columns}, {element_of(cache)}>",
                (LATENT_CLUSTER * grid.records, grid.tiles), LATENT_THREADS,
                (queries.data.ptr, cache.rows.data.ptr, address(cache.scales), table.data.ptr, pitch_of(table),
                 *sequences, depth, spec.rank, spec.scale * LOG2_E, address(records), address(arrivals),
                 means.data.ptr, pitch),
                shared=few_shared(columns, depth), cluster=LATENT_CLUSTER, dependent=is_unwritten, bytes_moved=nbytes,
            )  # fmt: skip
            return
        self._launcher.launch(
            step, self.source, f"latent_attention<{config.template()}, {element_of(cache)}>",
            (grid.tiles, grid.blocks), LATENT_THREADS,
            (queries.data.ptr, cache.rows.data.ptr, address(cache.scales), table.data.ptr, pitch_of(table), *sequences,
             depth, spec.rank, spec.scale * LOG2_E, address(records), grid.records, means.data.ptr, pitch),
            shared=config.shared(depth), bytes_moved=nbytes,
        )  # fmt: skip
        if grid.blocks > 1:
            vectors = config.rows * spec.rank // 4
            self._launcher.launch(
                step,
                self.source,
                f"latent_merge<{config.rows}>",
                (grid.tiles, ceil_div(vectors, LATENT_THREADS)),
                LATENT_THREADS,
                (*sequences, spec.rank, address(records), grid.records, means.data.ptr, pitch),
            )


class LatentRows:
    """The kernels of ``latent_rows.cu`` and ``latent_queries.cu``."""

    source = "attention/latent_rows.cu"
    queries = "attention/latent_queries.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "latent_rows", (ELEMENTS,))
        yield KernelFamily(cls.queries, "latent_queries", (ELEMENTS,))

    def launch_queries(
        self,
        step: StepContext,
        q: cp.ndarray,
        kv: cp.ndarray,
        spec: LatentSpec,
        cache: LatentCache,
        batch: ForwardBatch,
        table: cp.ndarray,
        matrix: cp.ndarray,
        queries: cp.ndarray,
    ) -> None:
        """:meth:`launch` and the products with the keys' matrices in one launch, of at most ``TOKENS[0]`` tokens.

        ``matrix`` is fp16 ``[heads * (nope_dim + value_dim), rank]`` with padded rows. The products are the first
        ``rank`` columns of ``queries``. The spec has no position scale.
        """
        assert len(batch.tokens) <= TOKENS[0] and spec.position_scale is None
        parts, columns = 1 + ceil_div(spec.heads, LATENT_HEADS), ceil_div(spec.rank, HEAD_PRODUCTS_COLUMNS)
        blocks = ceil_div(len(batch.tokens) * parts, columns)
        head = spec.nope_dim + spec.rope_dim
        self._launcher.launch(
            step, self.queries, f"latent_queries<{element_of(cache)}>",
            (1, columns, spec.heads + blocks), HEAD_PRODUCTS_THREADS,
            (kv.data.ptr, pitch_of(kv), spec.norm.weight.data.ptr, round_up(spec.rank, 8), spec.norm.eps,
             spec.rope.frequencies.data.ptr, spec.rope.scale, q.data.ptr, pitch_of(q), spec.heads, spec.nope_dim,
             spec.rope_dim, spec.rank, depth_of(spec), address(batch.cu_seqlens), address(batch.context_lens),
             table.data.ptr, pitch_of(table), batch.batch_size, cache.rows.data.ptr, address(cache.scales),
             queries.data.ptr, pitch_of(q) % 8 == 0 and head % 8 == 0, matrix.data.ptr, pitch_of(matrix),
             spec.nope_dim + spec.value_dim, len(batch.tokens), parts),
            bytes_moved=nbytes_of(q, kv) + spec.heads * spec.nope_dim * spec.rank * matrix.itemsize,
        )  # fmt: skip

    def launch(
        self,
        step: StepContext,
        q: cp.ndarray,
        kv: cp.ndarray,
        spec: LatentSpec,
        cache: LatentCache,
        batch: ForwardBatch,
        table: cp.ndarray,
        queries: cp.ndarray,
        factors: cp.ndarray | None,
    ) -> None:
        """Write the rows of the step's tokens to ``cache``, and all but the first ``rank`` columns of ``queries``.

        ``q`` is fp16 ``[T, query_features]``, ``kv`` fp32 ``[T, row_dim]``, both with padded rows, ``queries`` fp16
        ``[T, heads, depth]``. ``factors`` fp32 ``[T]`` takes those of the spec's position scale, if it has one.
        """
        scale, weight = spec.position_scale, spec.norm.weight
        self._launcher.launch(
            step, self.source, f"latent_rows<{element_of(cache)}>",
            (len(batch.tokens), 1 + ceil_div(spec.heads, LATENT_HEADS)), LATENT_ROWS_THREADS,
            (kv.data.ptr, pitch_of(kv), weight.data.ptr, round_up(spec.rank, 8), spec.norm.eps,
             spec.rope.frequencies.data.ptr, spec.rope.scale, q.data.ptr, pitch_of(q), spec.heads, spec.nope_dim,
             spec.rope_dim, spec.rank, depth_of(spec), scale.beta if scale else 0.0, scale.original if scale else 0,
             address(batch.cu_seqlens), address(batch.context_lens), table.data.ptr, pitch_of(table), batch.batch_size,
             cache.rows.data.ptr, address(cache.scales), queries.data.ptr, address(factors)),
            bytes_moved=nbytes_of(q, kv),
        )  # fmt: skip


class HeadProducts:
    """The kernels of ``head_products.cu`` and ``head_products_hopper.cu``."""

    source = "attention/head_products.cu"
    hopper = "attention/head_products_hopper.cu"
    merging = "attention/latent_values.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        blocks = (Together((TOKENS[0], few_tokens_stages(capability))), Together((TOKENS[1], MANY_TOKENS_STAGES)))
        yield KernelFamily(cls.source, "head_products", (blocks, BOOLEANS))
        if capability == (9, 0):
            yield KernelFamily(cls.hopper, "head_products_hopper", (BOOLEANS,))
        if few_columns(capability):
            yield KernelFamily(cls.merging, "latent_values", (few_columns(capability),))

    def values(
        self, step: StepContext, records: cp.ndarray, grid: LatentGrid, means: cp.ndarray, spec: LatentSpec,
        batch: ForwardBatch, matrix: cp.ndarray, out: cp.ndarray,
    ) -> None:  # fmt: skip
        """The values of the few tokens of a step, fp16 ``[T, heads * value_dim]``, of what ``latent_few`` has left.

        ``means`` fp16 ``[T, heads, mean_pitch]`` are those of tiles with one segment, ``records`` those of the others.
        ``matrix`` is fp16 ``[heads * (nope_dim + value_dim), rank]`` with padded rows.
        """
        columns, pitch = spec.rank // LATENT_CLUSTER, pitch_of(matrix)
        self._launcher.launch(
            step, self.merging, f"latent_values<{columns}>",
            (ceil_div(spec.value_dim, HEAD_PRODUCTS_COLUMNS), spec.heads), HEAD_PRODUCTS_THREADS,
            (records.data.ptr, grid.records, means.data.ptr, means.shape[2], address(batch.cu_seqlens),
             address(batch.context_lens), batch.batch_size, spec.heads,
             matrix.data.ptr + spec.nope_dim * pitch * matrix.itemsize, pitch, spec.nope_dim + spec.value_dim,
             spec.value_dim, out.data.ptr, pitch_of(out), len(means)),
            shared=products_shared(TOKENS[0], spec.rank // HEAD_PRODUCTS_COLUMNS),
            bytes_moved=spec.heads * spec.rank * spec.value_dim * matrix.itemsize,
        )  # fmt: skip

    def launch(
        self, step: StepContext, x: cp.ndarray, x_pitch: int, x_head: int, matrix: cp.ndarray, first_row: int,
        rows_of_head: int, heads: int, k: int, n: int, by_input: bool, out: cp.ndarray, out_pitch: int, out_head: int,
        tokens: int, factors: cp.ndarray | None = None,
    ) -> None:  # fmt: skip
        """``tokens`` rows of ``x`` times the matrices of ``heads`` heads, into rows of ``out``, both fp16.

        A head's elements lie ``x_head`` behind those of the head before, in rows ``x_pitch`` apart; those of ``out``
        likewise. A head has ``rows_of_head`` rows of ``matrix``, fp16 with padded rows, of which its own begin with
        ``first_row``: ``k`` of ``n`` elements if ``by_input``, else ``n`` of ``k``. ``factors`` fp32 ``[tokens]``
        multiply the results.
        """
        capability = self._launcher.device.compute_capability
        size = TOKENS[tokens > TOKENS[0]]
        stages = MANY_TOKENS_STAGES if tokens > TOKENS[0] else few_tokens_stages(capability)
        pitch = pitch_of(matrix)
        own = matrix.data.ptr + first_row * pitch * matrix.itemsize
        whole = (
            k % 64 == 0 and n % HOPPER_COLUMNS == 0 and not any(i % 8 for i in (x_pitch, x_head, out_pitch, out_head))
        )
        if tokens > MMA_TOKENS and whole and capability == (9, 0):
            element = TensorMapDataType.FLOAT16
            x_map = tensor_map_2d(x.data.ptr, element, tokens, x_head * (heads - 1) + k, x_pitch, 64)
            w_map = tensor_map_2d(own, element, rows_of_head * heads - first_row, pitch, pitch, 64)
            self._launcher.launch(
                step,
                self.hopper,
                f"head_products_hopper<{BOOLEANS[by_input]}>",
                (n // HOPPER_COLUMNS, ceil_div(tokens, HOPPER_TOKENS), heads),
                HOPPER_PRODUCTS_THREADS,
                (x_head, rows_of_head, k, address(factors), out.data.ptr, out_pitch, out_head, tokens, x_map, w_map),
                shared=HOPPER_PRODUCTS_SHARED,
                bytes_moved=heads * k * n * matrix.itemsize,
            )
            return
        self._launcher.launch(
            step, self.source, f"head_products<{size}, {stages}, {BOOLEANS[by_input]}>",
            (ceil_div(tokens, size), ceil_div(n, HEAD_PRODUCTS_COLUMNS), heads), HEAD_PRODUCTS_THREADS,
            (x.data.ptr, x_pitch, x_head, x_pitch % 8 == 0 and x_head % 8 == 0,
             own, pitch, rows_of_head, k, n, address(factors),
             out.data.ptr, out_pitch, out_head, tokens),
            shared=products_shared(size, stages), bytes_moved=heads * k * n * matrix.itemsize,
        )  # fmt: skip


def few_tokens_stages(capability: Capability) -> int:
    """Chunks in shared memory of a block of products of few tokens."""
    few, all_of_them = FEW_TOKENS_STAGES
    fits = 2 * (products_shared(TOKENS[0], all_of_them) + 1024) <= shared_memory_per_block(capability)
    return all_of_them if fits else few


def products_shared(tokens: int, stages: int) -> int:
    """Bytes of dynamic shared memory of a block of ``head_products``."""
    return stages * (tokens + HEAD_PRODUCTS_COLUMNS) * (HEAD_PRODUCTS_COLUMNS + 8) * 2


def max_tiles(spec: LatentSpec, batch: ForwardBatch, rows: int) -> int:
    """The most tiles of ``rows`` pairs of a token and a head of one sequence."""
    tokens = len(batch.tokens)
    return max(1, min(tokens * spec.heads // rows + batch.batch_size, tokens * ceil_div(spec.heads, rows)))


def element_of(cache: LatentCache) -> str:
    """The element type of the cache, as the kernels name it."""
    return ELEMENTS[cache.scales is not None]
