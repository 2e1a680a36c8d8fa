"""What the kernels of latent attention do, by the reference's functions on the fake memory."""

from __future__ import annotations

import numpy as np

from bminf_lite.backend.attention import attend
from bminf_lite.backend.cache_values import LatentCache
from bminf_lite.backend.functions import product_by_row
from bminf_lite.backend.latent import cached_rows, position_factors, store_rows
from bminf_lite.backend.latent import latent_queries as queries_of
from bminf_lite.backend.latent import latent_rows as rows_of
from bminf_lite.backend.values import BLOCK_SIZE, LATENT_SEGMENT, LatentSpec, Norm, PositionScale, Rope
from bminf_lite.cuda.kernels.attention.heads import LOG2_E
from bminf_lite.cuda.kernels.attention.latent import (
    HOPPER_COLUMNS,
    HOPPER_PRODUCTS_SHARED,
    HOPPER_ROWS,
    HOPPER_THREADS,
    HOPPER_TOKENS,
    few_shared,
    hopper_shared,
    products_shared,
)
from bminf_lite.cuda.kernels.constants import (
    HEAD_PRODUCTS_COLUMNS,
    LATENT_CLUSTER,
    LATENT_FEW_ROWS,
    LATENT_HEADS,
    LATENT_KEYS,
    LATENT_MAX_KEY,
    LATENT_MERGED_TOKENS,
)

from .launching import Call, model
from .models_attention import tables_of

F32, F16 = np.float32, np.float16


def cache_of(call: Call, tables: np.ndarray) -> LatentCache:
    """The blocks up to the last that the tables name."""
    call.require(call.depth % 16 == 0, "rows are not padded")
    shape, int8 = (int(tables.max(initial=0)) + 1, BLOCK_SIZE), call.template["CACHE"] == "bminf::int8"
    rows = call.tensor("cache", (*shape, call.depth), np.int8 if int8 else F16)
    return LatentCache(rows, call.tensor("scales", (*shape, 2), F16) if int8 else None)


def sequences_of(call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``cu_seqlens``, ``context_lens``, and the block tables as far as the sequences use them."""
    cu_seqlens = call.vector("cu_seqlens", call.sequences + 1, np.int32)
    context_lens = call.vector("context_lens", call.sequences, np.int32)
    return cu_seqlens, context_lens, tables_of(call, context_lens + np.diff(cu_seqlens))


@model
def latent_rows(call: Call) -> None:
    cu_seqlens, context_lens, tables = sequences_of(call)
    tokens, parts = call.launch.grid[:2]
    call.require(tokens >= cu_seqlens[-1] and (parts - 1) * LATENT_HEADS >= call.heads, "blocks are missing")
    write_rows(call, cu_seqlens, context_lens, tables, tokens)


def write_rows(call: Call, cu_seqlens: np.ndarray, context_lens: np.ndarray, tables: np.ndarray, tokens: int) -> None:
    """The rows of the step's tokens, and the ends of their queries."""
    end, heads, rank, rope = int(cu_seqlens[-1]), call.heads, call.rank, call.rope_dim
    call.require(8 * call.launch.block >= rank and rope <= LATENT_MAX_KEY, "rows are too long")
    spec = LatentSpec(
        heads, call.nope_dim, rope, 0, rank, 1.0, Norm(call.vector("norm_weight", rank, F32, 16), call.eps),
        Rope(call.vector("frequencies", rope // 2, F32), call.rope_scale),
        PositionScale(call.beta, call.original) if call.original else None,
    )  # fmt: skip
    positions = np.arange(end) - np.repeat(cu_seqlens[:-1] - context_lens, np.diff(cu_seqlens))
    q = call.rows("q", end, call.q_pitch, spec.query_features, F16, align=0)
    queries = call.tensor("queries", (tokens, heads, call.depth), F16)[:end]
    without = np.zeros((heads, call.nope_dim, rank), F32)
    queries[..., rank : spec.row_dim] = queries_of(q, without, spec, positions)[..., rank:]
    queries[..., spec.row_dim :] = 0
    if call.original:
        call.vector("factors", tokens, F32)[:end] = position_factors(spec.position_scale, positions)
    rows = rows_of(call.rows("kv", end, call.kv_pitch, spec.row_dim, F32), spec, positions).astype(F16)
    padded = np.zeros((end, call.depth), F16)
    padded[:, : spec.row_dim] = rows
    cache = cache_of(call, tables)
    for b in np.flatnonzero(np.diff(cu_seqlens)):
        own = padded[cu_seqlens[b] : cu_seqlens[b + 1]]
        store_rows(cache, tables[b], int(context_lens[b]), own, rank)


@model
def latent_queries(call: Call) -> None:
    cu_seqlens, context_lens, tables = sequences_of(call)
    _, columns, blocks = call.launch.grid
    heads, rank, tokens, k = call.heads, call.rank, call.tokens, call.nope_dim
    call.require(tokens <= 16 and columns * HEAD_PRODUCTS_COLUMNS >= rank, "blocks are missing")
    call.require((blocks - heads) * columns >= tokens * call.parts, "blocks of rows are missing")
    call.require((call.parts - 1) * LATENT_HEADS >= heads and k <= call.w_rows, "parts, or the matrix")
    call.arguments |= {"original": 0, "beta": 0.0}
    write_rows(call, cu_seqlens, context_lens, tables, tokens)
    queries = call.tensor("queries", (tokens, heads, call.depth), F16)
    for head in range(heads):
        offset = head * (k + call.rope_dim)
        x = call.rows("q", tokens, call.q_pitch, k, F16, 16 if call.aligned else 2, 2 * offset)
        matrix = call.rows("matrix", k, call.w_pitch, rank, F16, 16, 2 * head * call.w_rows * call.w_pitch)
        queries[:, head, :rank] = product_by_row(x.astype(F32), matrix.astype(F32))


@model
def head_products(call: Call) -> None:
    tokens, k, n, by_input = call.tokens, call.k, call.n, call.number("BY_INPUT")
    blocks, columns, heads = call.launch.grid
    call.require(
        blocks * call.number("TOKENS") >= tokens and columns * HEAD_PRODUCTS_COLUMNS >= n, "blocks are missing"
    )
    rows, width = (k, n) if by_input else (n, k)
    call.require(call.launch.shared >= products_shared(call.number("TOKENS"), call.number("STAGES")), "shared memory")
    call.require(call.w_pitch % 8 == 0 and rows <= call.w_rows, "the matrix")
    factors = call.vector("factors", tokens, F32)[:, None] if call.factors else F32(1)
    for head in range(heads):
        x = call.rows("x", tokens, call.x_pitch, k, F16, 16 if call.aligned else 2, 2 * head * call.x_head)
        matrix = call.rows("w", rows, call.w_pitch, width, F16, 16, 2 * head * call.w_rows * call.w_pitch).astype(F32)
        out = call.rows("out", tokens, call.out_pitch, n, F16, 2, 2 * head * call.out_head)
        out[...] = product_by_row(x.astype(F32), matrix if by_input else matrix.T) * factors


@model
def latent_values(call: Call) -> None:
    """Of the means: the model of the kernel before it writes those of all tiles."""
    heads, tokens, n, rank = call.heads, call.tokens, call.n, LATENT_CLUSTER * call.number("LATENTS")
    columns, blocks = call.launch.grid[:2]
    call.require(columns * HEAD_PRODUCTS_COLUMNS >= n and blocks == heads, "blocks are missing")
    call.require(tokens <= LATENT_MERGED_TOKENS and call.w_pitch % 8 == 0 and n <= call.w_rows, "tokens, or the matrix")
    call.require(call.launch.shared >= products_shared(16, rank // HEAD_PRODUCTS_COLUMNS), "shared memory")
    means = call.rows("means", tokens * heads, call.mean_pitch, rank, F16, 8).reshape(tokens, heads, rank).astype(F32)
    for head in range(heads):
        matrix = call.rows("matrix", n, call.w_pitch, rank, F16, 16, 2 * head * call.w_rows * call.w_pitch).astype(F32)
        out = call.rows("out", tokens, call.out_pitch, n, F16, 2, 2 * head * n)
        out[...] = product_by_row(means[:, head], matrix.T)


@model
def head_products_hopper(call: Call) -> None:
    tokens, k, by_input, out_pitch = call.tokens, call.k, call.number("BY_INPUT"), call.out_pitch
    (columns, blocks, heads), n = call.launch.grid, call.launch.grid[0] * HOPPER_COLUMNS
    call.require(blocks * HOPPER_TOKENS >= tokens, "blocks are missing")
    call.require(call.launch.shared >= HOPPER_PRODUCTS_SHARED and k % 64 == 0 and columns > 0, "a chunk")
    x, w = call.mapped("x_map", 64), call.mapped("w_map", 64)
    factors = call.vector("factors", tokens, F32)[:, None] if call.factors else F32(1)
    for head in range(heads):
        own = w[head * call.w_rows : head * call.w_rows + (k if by_input else n)].astype(F32)
        own = own[:, :n] if by_input else own[:, :k].T
        out = call.rows("out", tokens, out_pitch, n, F16, 16, 2 * head * call.out_head)
        out[...] = product_by_row(x[:, head * call.x_head : head * call.x_head + k].astype(F32), own) * factors


@model
def latent_attention(call: Call) -> None:
    cu_seqlens, context_lens, tables = sequences_of(call)
    rows, heads, rank, depth = call.number("ROWS"), call.heads, call.rank, call.depth
    (tiles, blocks), counts = call.launch.grid[:2], np.diff(cu_seqlens)
    call.require(tiles >= (-(-counts * heads // rows)).sum(), "row tiles are missing")
    call.require(8 * call.number("COLUMNS") >= rank and rank % 8 == 0, "the instantiation is too small")
    call.require(
        call.launch.shared
        >= (rows + call.number("STAGES") * LATENT_KEYS) * (depth + 8) * 2 + 2 * rows * (LATENT_KEYS + 4) * 4,
        "too little shared memory",
    )  # fmt: skip
    segments = int((-(-(context_lens + counts) // LATENT_SEGMENT)).max(initial=0))
    call.require(call.records_of_tile >= (segments if blocks > 1 else 1), "records are missing")
    if segments > 1:
        call.vector("records", tiles * call.records_of_tile * rows * (rank + 2), F32, 16)
    attend_to_rows(call, cu_seqlens, context_lens, tables)


def attend_to_rows(call: Call, cu_seqlens: np.ndarray, context_lens: np.ndarray, tables: np.ndarray) -> None:
    """The means of all tokens."""
    heads, rank, counts, end = call.heads, call.rank, np.diff(cu_seqlens), int(cu_seqlens[-1])
    cache = cache_of(call, tables)
    queries = call.tensor("q", (end, heads, call.depth), F16)
    means = call.rows("means", end * heads, call.mean_pitch, rank, F16).reshape(end, heads, rank)
    for b in np.flatnonzero(counts):
        own, total = slice(cu_seqlens[b], cu_seqlens[b + 1]), int(context_lens[b] + counts[b])
        keys = cached_rows(cache, tables[b], total, rank, F16)[None]
        means[own] = attend(
            queries[own], keys, keys[..., :rank], call.scale / LOG2_E, int(context_lens[b]), segment=LATENT_SEGMENT,
            weight_dtype=F16,
        )  # fmt: skip


@model
def latent_few(call: Call) -> None:
    cu_seqlens, context_lens, tables = sequences_of(call)
    heads, rank = call.heads, call.rank
    (blocks, tiles), counts = call.launch.grid[:2], np.diff(cu_seqlens)
    call.require(tiles >= (-(-counts * heads // LATENT_FEW_ROWS)).sum(), "row tiles are missing")
    call.require(LATENT_CLUSTER * call.number("COLUMNS") == rank, "the instantiation has other columns")
    call.require(call.launch.cluster == LATENT_CLUSTER, "clusters")
    call.require(call.launch.shared >= few_shared(call.number("COLUMNS"), call.depth), "too little shared memory")
    segments = int((-(-(context_lens + counts) // LATENT_SEGMENT)).max(initial=0))
    call.require(blocks >= LATENT_CLUSTER * segments, "segments are missing")
    if segments > 1:
        call.vector("records", tiles * blocks // LATENT_CLUSTER * LATENT_FEW_ROWS * (rank + 2 * LATENT_CLUSTER), F32, 8)
    if call.arrivals:
        call.require(not call.vector("arrivals", tiles * LATENT_CLUSTER, np.int32).any(), "arrivals are counted from 0")
    attend_to_rows(call, cu_seqlens, context_lens, tables)


@model
def latent_hopper(call: Call) -> None:
    call.arguments |= {"rank": call.number("RANK"), "depth": call.number("RANK") + 64, "scales": 0}
    call.template["CACHE"] = "__half"
    cu_seqlens, context_lens, tables = sequences_of(call)
    counts = np.diff(cu_seqlens)
    call.require(call.pairs >= cu_seqlens[-1] * call.heads, "records of too few pairs")
    call.require(call.tiles >= (-(-counts * call.heads // HOPPER_ROWS)).sum(), "row tiles are missing")
    call.require(call.launch.block == HOPPER_THREADS, "threads")
    call.require(call.launch.shared >= hopper_shared(call.rank), "too little shared memory")
    segments = int((-(-(context_lens + counts) // LATENT_SEGMENT)).max(initial=0))
    if call.parts > 1:
        call.require(call.segments >= segments, "records are missing")
        call.vector("records", call.pairs * call.segments * (call.rank + 2), F32, 16)
    elif segments > 1:
        call.vector("merged", call.launch.grid[0] * HOPPER_ROWS * call.rank, F32, 16)
    attend_to_rows(call, cu_seqlens, context_lens, tables)


@model
def latent_hopper_merge(call: Call) -> None:
    """Nothing: the model of the kernel before it computes whole results."""


@model
def latent_merge(call: Call) -> None:
    """Nothing: the model of the kernel before it computes whole results."""
