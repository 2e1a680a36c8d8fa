"""What the kernels of attention do, by the reference's functions on the fake memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from bminf_lite.backend.attention import attend as attend_rows
from bminf_lite.backend.attention import cached
from bminf_lite.backend.cache_values import LayerCache
from bminf_lite.backend.functions import normalise, rotate
from bminf_lite.backend.quantization import quantize_heads
from bminf_lite.backend.rotation import pairs_of_rotation, rotated_heads
from bminf_lite.backend.values import BLOCK_SIZE, LinearBias, Norm, RelativeBias, Rope
from bminf_lite.cuda.kernels.attention.heads import LOG2_E
from bminf_lite.cuda.kernels.constants import (
    DECODE_HEADS,
    DECODE_MAX_DRAFTS,
    PREPARE_ELEMENTS,
    SEGMENT,
    DecodeMask,
    DecodeWork,
    ScoreKind,
)

from .launching import Call, model
from .models_rows import product_values, rounded, sigmoid

F32, F16 = np.float32, np.float16


def prepared(call: Call, x: np.ndarray, positions: np.ndarray, norm_weight: str, rotates: bool) -> np.ndarray:
    """Heads ``[T, heads, head_dim]`` fp32 normalised, rotated and transformed, if asked for, and rounded to fp16."""
    norm = Norm(call.vector(norm_weight, call.head_dim, F32), call.eps) if call.arguments[norm_weight] else None
    is_last = "NORM_AFTER_ROPE" in call.defines
    x = x if norm is None or is_last else normalise(x, norm)
    if norm_weight != "v_norm_weight" and call.frequencies:
        x = rotate(x, positions, Rope(call.vector("frequencies", call.head_dim // 2, F32), call.rope_scale))
    x = normalise(x, norm) if norm is not None and is_last else x
    return (rotated_heads(x) if rotates else x).astype(F16)


def split(
    call: Call, qkv: np.ndarray, positions: np.ndarray, rotates: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values fp16 ``[T, heads, head_dim]`` of fp32 columns side by side."""
    heads = qkv.reshape(len(qkv), qkv.shape[1] // call.head_dim, call.head_dim)
    q, k, v = np.split(heads, [call.heads, call.heads + call.kv_heads], axis=1)
    q, k = (prepared(call, x, positions, f"{name}_norm_weight", rotates) for name, x in (("q", q), ("k", k)))
    return q, k, prepared(call, v, positions, "v_norm_weight", rotates=False)


def cache_of(call: Call, tables: np.ndarray, head_pitch: int) -> LayerCache:
    """Keys and values ``[num_blocks, kv_heads, BLOCK_SIZE, head_pitch]``, fp16, or int8 with scales."""
    call.require(head_pitch % 16 == 0 and head_pitch >= call.head_dim, "heads are not padded")
    shape = int(tables.max(initial=0)) + 1, call.kv_heads, BLOCK_SIZE
    int8 = call.template["CACHE"] == "bminf::int8"
    keys, values = (call.tensor(n, (*shape, head_pitch), np.int8 if int8 else F16) for n in ("keys", "values"))
    if not int8:
        return LayerCache(keys, values)
    return LayerCache(keys, values, *(call.tensor(name, shape, F16) for name in ("key_scales", "value_scales")))


def tables_of(call: Call, lengths: np.ndarray) -> np.ndarray:
    """The block tables as far as sequences of these lengths use them; zeros behind."""
    table = call.rows("block_tables", len(lengths), call.table_pitch, call.table_pitch, np.int32, align=0).copy()
    table[np.arange(call.table_pitch) >= -(-lengths[:, None] // BLOCK_SIZE)] = 0
    return table


def store(cache: LayerCache, table: np.ndarray, first: int, keys: np.ndarray, values: np.ndarray) -> None:
    """New tokens' heads ``[n, kv_heads, head_dim]``, with zeros in the padding."""
    position = np.arange(first, first + len(keys))
    block, place = table[position // BLOCK_SIZE], position % BLOCK_SIZE
    for whole, scales, heads in (cache.keys, cache.key_scales, keys), (cache.values, cache.value_scales, values):
        if scales is not None:
            heads, scales[block, :, place] = quantize_heads(heads)
        padded = np.zeros((*heads.shape[:2], whole.shape[-1]), whole.dtype)
        padded[..., : heads.shape[2]] = heads
        whole[block, :, place] = padded


@model
def prepare_heads(call: Call) -> None:
    cu_seqlens = call.vector("cu_seqlens", call.sequences + 1, np.int32)
    context_lens = call.vector("context_lens", call.sequences, np.int32)
    first, end = int(cu_seqlens[0]), int(cu_seqlens[-1])
    tokens, width = call.launch.grid[0], (call.heads + 2 * call.kv_heads) * call.head_dim
    lanes = call.number("LANES")
    call.require(lanes or tokens >= end - first, "a block for each token")
    rows_of_lanes = not call.number("FROM_INT32") and call.head_dim == call.head_pitch == 2 * PREPARE_ELEMENTS * lanes
    call.require(not lanes or (lanes == call.lanes and rows_of_lanes), "heads that the lanes of the instantiation fill")
    threads = call.launch.grid[1] * call.launch.block
    call.require(
        call.lanes & (call.lanes - 1) == 0 and 2 * PREPARE_ELEMENTS * call.lanes >= call.head_dim
        and threads >= call.lanes * (call.heads + 2 * call.kv_heads - call.first_head), "threads for each head"
    )  # fmt: skip
    positions = np.arange(first, end) - np.repeat(cu_seqlens[:-1] - context_lens, np.diff(cu_seqlens))
    if call.number("FROM_INT32"):
        qkv = rounded(product_values(call, end, width, call.number("IN"), call.pitch, vector=1))[first:]
    else:
        align = 0 if call.head_dim % (2 * PREPARE_ELEMENTS) else 16
        qkv = call.rows("data", end, call.pitch, width, F16, align=align).astype(F32)[first:]
    int8 = call.template["CACHE"] == "bminf::int8"
    call.require(call.rotated_pairs in ((0, pairs_of_rotation(call.head_dim)) if int8 else (0,)), "the transform")
    q, k, v = split(call, qkv, positions, call.rotated_pairs > 0)
    if call.first_head < call.heads:
        out = call.tensor("q", (end, call.heads, call.head_pitch), F16)[first:]
        out[..., : call.head_dim], out[..., call.head_dim :] = q, 0
    if not call.block_tables:
        for name, heads in ("keys", k), ("values", v):
            whole = call.tensor(name, (end, call.kv_heads, call.head_pitch), F16)
            whole[first:end, :, : call.head_dim] = heads
            whole[first:end, :, call.head_dim :] = 0
        return
    tables = tables_of(call, context_lens + np.diff(cu_seqlens))
    cache = cache_of(call, tables, call.head_pitch)
    for b in np.flatnonzero(np.diff(cu_seqlens)):
        rows = slice(cu_seqlens[b] - first, cu_seqlens[b + 1] - first)
        store(cache, tables[b], int(context_lens[b]), k[rows], v[rows])


@model
def copy_blocks(call: Call) -> None:
    for target, source, nbytes in call.tensor("copies", (call.launch.grid[0], 3), np.int64).tolist():
        call.require(nbytes % 16 == 0, f"a copy of {nbytes} bytes")
        call.arguments.update(target=target, source=source)
        call.vector("target", nbytes, np.uint8, 16)[:] = call.vector("source", nbytes, np.uint8, 16)


@model
def attention_decode(call: Call) -> None:
    kind = DecodeMask(call.number("KIND"))
    from_source, has_new_key = kind is DecodeMask.CROSS, kind not in (DecodeMask.CROSS, DecodeMask.SHARED)
    scores = ScoreKind[kind.name] if kind.name in ScoreKind.__members__ else ScoreKind.PLAIN
    depth, int8 = call.number("D"), call.template["CACHE"] == "bminf::int8"
    keys = call.number("CHUNK") // (depth * (1 if int8 else 2))
    stage = call.number("CHUNK") + (-(-keys * call.number("UNIT") * 2 // 128) * 128 if int8 else 0)
    call.require(depth >= call.head_pitch, "the instantiation is too small")
    call.require(call.launch.shared >= SEGMENT * DECODE_HEADS * 4 + call.number("STAGES") * stage,
                 "too little shared memory")  # fmt: skip
    call.require(call.launch.grid[0] % (call.launch.cluster or 1) == 0, "a part of a cluster")
    work, unit = DecodeWork(call.number("WORK")), call.number("UNIT")
    count, groups = call.sequences, call.kv_heads * -(-(call.heads // call.kv_heads) // DECODE_HEADS)
    max_segments = 1 if work is DecodeWork.ONE_PAIR else call.max_segments
    call.require((call.launch.cluster or 1) == unit, "a unit is not a cluster")
    if work is DecodeWork.ITEMS:
        call.require(unit == 1, "a unit of several blocks finds no items")
    else:
        call.require(call.launch.grid[0] == count * groups * max_segments * unit, "not a unit for each segment")
        call.require(work is DecodeWork.ONE_PAIR or call.record_capacity >= count * groups * max_segments,
                     "too few records")  # fmt: skip
    call.vector("records", call.record_capacity * DECODE_HEADS * depth, F32)
    counters = call.vector("arrival_counts", count * groups * unit, np.int32)
    call.require(not counters.any(), "the counters are not zero")
    before = call.vector("lengths" if from_source else "context_lens", count, np.int32).astype(np.int64)
    positions = before - 1 if from_source else np.minimum(before, call.table_pitch * BLOCK_SIZE - 1)
    firsts = np.maximum(positions + 1 - (call.window or positions + 1), 0) // SEGMENT
    call.require(work is DecodeWork.ITEMS or (positions // SEGMENT - firsts).max(initial=0) < max_segments,
                 "a context has too many segments")  # fmt: skip
    width = (call.heads + (2 * call.kv_heads if has_new_key else 0)) * call.head_dim
    q, k, v = split(
        call, call.rows("qkv", count, call.pitch, width, F16, align=0).astype(F32), positions, int8 and not from_source
    )
    out = call.rows("out", count, call.out_pitch, call.heads * call.head_dim, F16, align=0)
    tables = tables_of(call, positions + 1)
    cache = cache_of(call, tables, call.head_pitch)
    score_options = score_options_of(call, scores)
    if call.template["DRAFTS"] == "true":  # a row's own stores come before the next row below
        offsets = call.vector("draft_offsets", count, np.int32)
        call.require(work is not DecodeWork.ITEMS and has_new_key, "no instantiation for drafts")
        call.require(bool((offsets <= DECODE_MAX_DRAFTS).all()), "too many drafts")
        for b, offset in enumerate(offsets.tolist()):
            call.require(offset in (0, offsets[b - 1] + 1) and positions[b] - positions[b - offset] == offset,
                         "rows that are not one after another")  # fmt: skip
    for b, position in enumerate(positions):
        if has_new_key:
            store(cache, tables[b], int(position), k[b : b + 1], v[b : b + 1])
        out[b] = over_cache(call, q[b : b + 1], cache, tables[b], int(position), score_options)
    if call.gate:
        call.require(work is DecodeWork.ONE_PAIR and unit > 1, "no instantiation for gates")
        gate = call.rows("gate", count, call.gate_pitch, call.heads * call.head_dim, F16, align=0)
        out[:] = (out.astype(F32) * sigmoid(gate.astype(F32))).astype(F16)


def score_options_of(call: Call, scores: ScoreKind) -> dict[str, Any]:
    """The scale, and the bias or the soft-cap, as arguments of the reference."""
    if scores is ScoreKind.CAPPED:
        cap = call.softcap / LOG2_E
        return {"scale": call.scale * cap / (2 * LOG2_E), "softcap": cap}
    options: dict[str, Any] = {"scale": call.scale / LOG2_E}
    if scores is ScoreKind.SINKS:
        options["sinks"] = call.vector("bias", call.heads, F32)
    if scores is ScoreKind.ALIBI:
        options["bias"] = LinearBias(call.vector("bias", call.heads, F32))
    if scores is ScoreKind.BIASED:
        values = call.vector("bias", call.heads * (2 * call.max_distance + 1), F32).reshape(call.heads, -1)
        options["bias"] = RelativeBias(values, call.max_distance)
    return options


def over_cache(
    call: Call, q: np.ndarray, cache: LayerCache, table: np.ndarray, context_len: int, score_options: dict[str, Any]
) -> np.ndarray:
    keys, values = cached(cache, table, context_len + len(q), F16)
    keys, values = keys[..., : call.head_dim], values[..., : call.head_dim]
    window = call.window or None
    out = attend_rows(q, keys, values, context_len=context_len, window=window, weight_dtype=F16, **score_options)
    return out.reshape(len(q), call.heads * call.head_dim)


@model
def attention_prefill(call: Call) -> None:
    prefill(call, call.number("MASK"))


@model
def attention_prefill_hopper(call: Call) -> None:
    prefill(call, 0)


@model
def attention_packed_hopper(call: Call) -> None:
    prefill(call, 2)


@model
def attention_prefill_merge(call: Call) -> None:
    """Nothing: the model of the kernel before it computes whole results."""


def prefill(call: Call, mask: int) -> None:
    _, source, within = (mask == kind for kind in range(3))
    depth, count = -(-call.head_dim // 16) * 16, call.sequences
    cu_seqlens = call.vector("cu_seqlens", count + 1, np.int32)
    context_lens = call.vector("context_lens", count, np.int32)
    tokens = int(cu_seqlens[-1])
    call.require(call.number("D") == depth and call.q_pitch >= call.heads * depth, "the head's size")
    scores = ScoreKind(call.number("SCORES")) if "SCORES" in call.template else ScoreKind.PLAIN
    has_bias = scores in (ScoreKind.BIASED, ScoreKind.ALIBI, ScoreKind.SINKS)
    call.require(has_bias == bool(call.bias) and source == bool(call.source_lens), "the instantiation")
    call.require((scores is ScoreKind.CAPPED) == bool(call.softcap), "the instantiation")
    call.require(not call.vector("counters", 2, np.int32).any(), "the counters are not zero")
    q = call.rows("q", tokens, call.q_pitch, call.heads * depth, F16, align=0).reshape(-1, call.heads, depth)
    out = call.rows("out", tokens, call.out_pitch, call.heads * call.head_dim, F16, align=16)
    score_options = score_options_of(call, scores)
    if within:
        call.require(call.stride >= call.kv_heads, "heads are missing")
        rows = (call.rows(name, tokens, call.stride * depth, call.kv_heads * depth, F16) for name in ("keys", "values"))
        keys, values = (x.reshape(tokens, call.kv_heads, depth).swapaxes(0, 1) for x in rows)
    else:
        lengths = call.vector("source_lens", count, np.int32) if source else context_lens + np.diff(cu_seqlens)
        tables = tables_of(call, lengths)
        cache = cache_of(call, tables, depth)
    for b in np.flatnonzero(np.diff(cu_seqlens)):
        own = slice(cu_seqlens[b], cu_seqlens[b + 1])
        mine = q[own, :, : call.head_dim]
        if mask == 0:
            out[own] = over_cache(call, mine, cache, tables[b], int(context_lens[b]), score_options)
            continue
        k, v = (x[:, own] for x in (keys, values)) if within else cached(cache, tables[b], int(lengths[b]), F16)
        k, v = k[..., : call.head_dim], v[..., : call.head_dim]
        window = (call.window or None) if within else None
        attended = attend_rows(mine, k, v, window=window, causal=False, weight_dtype=F16, **score_options)
        out[own] = attended.reshape(len(mine), -1)
