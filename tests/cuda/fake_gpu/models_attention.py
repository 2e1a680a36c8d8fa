"""What the kernels of attention do, by the reference's functions on the fake memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from bminf_lite.backend.base import attend as attend_rows
from bminf_lite.backend.base import cached
from bminf_lite.backend.functions import normalise, rotate
from bminf_lite.backend.quantization import quantize_heads
from bminf_lite.backend.values import LayerCache, Norm, RelativeBias, Rope
from bminf_lite.cuda.kernels.constants import BLOCK_SIZE, DECODE_HEADS, AttentionMask

from .launching import Call, model
from .models_rows import product_values, rounded

F32, F16 = np.float32, np.float16


def prepared(call: Call, x: np.ndarray, positions: np.ndarray, norm_weight: str | None) -> np.ndarray:
    """Heads ``[T, heads, head_dim]`` fp32 normalised and rotated, if that is asked for, and rounded to fp16."""
    if norm_weight is not None and call.arguments[norm_weight]:
        x = normalise(x, Norm(call.vector(norm_weight, call.head_dim, F32), call.eps))
    if norm_weight is not None and call.frequencies:
        x = rotate(x, positions, Rope(call.vector("frequencies", call.head_dim // 2, F32), call.rope_scale))
    return x.astype(F16)


def split(call: Call, qkv: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values fp16 ``[T, heads, head_dim]`` of fp32 columns side by side."""
    heads = qkv.reshape(len(qkv), -1, call.head_dim)
    q, k, v = np.split(heads, [call.heads, call.heads + call.kv_heads], axis=1)
    return prepared(call, q, positions, "q_norm_weight"), prepared(call, k, positions, "k_norm_weight"), v.astype(F16)


def cache_of(call: Call, slots: np.ndarray, head_pitch: int) -> LayerCache:
    """Keys and values ``[slots, kv_heads, capacity, head_pitch]``, fp16, or int8 with scales."""
    call.require(head_pitch % 16 == 0 and head_pitch >= call.head_dim, "heads are not padded")
    shape = int(slots.max()) + 1, call.kv_heads, call.capacity
    int8 = call.template["CACHE"] == "bminf::int8"
    keys, values = (call.tensor(n, (*shape, head_pitch), np.int8 if int8 else F16) for n in ("keys", "values"))
    if not int8:
        return LayerCache(keys, values)
    return LayerCache(keys, values, *(call.tensor(name, shape, F16) for name in ("key_scales", "value_scales")))


def store(cache: LayerCache, slot: int, first: int, keys: np.ndarray, values: np.ndarray) -> None:
    """New tokens' heads ``[n, kv_heads, head_dim]``, with zeros in the padding; what does not fit is left out."""
    pairs = (cache.keys, cache.key_scales, keys), (cache.values, cache.value_scales, values)
    for whole, scales, heads in pairs:
        heads = heads[: max(0, cache.capacity - first)].swapaxes(0, 1)
        tokens = slice(first, first + heads.shape[1])
        if scales is not None:
            heads, scales[slot, :, tokens] = quantize_heads(heads)
        whole[slot, :, tokens, : heads.shape[2]], whole[slot, :, tokens, heads.shape[2] :] = heads, 0


@model
def prepare_heads(call: Call) -> None:
    cu_seqlens = call.vector("cu_seqlens", call.sequences + 1, np.int32)
    context_lens, slots = (
        call.vector("context_lens", call.sequences, np.int32),
        call.vector("slots", call.sequences, np.int32),
    )
    tokens, width = call.launch.grid[0], (call.heads + 2 * call.kv_heads) * call.head_dim
    call.require(tokens == cu_seqlens[-1], "a block for each token")
    positions = np.arange(tokens) - np.repeat(cu_seqlens[:-1] - context_lens, np.diff(cu_seqlens))
    if call.number("FROM_INT32"):
        qkv = rounded(product_values(call, tokens, width, call.number("IN"), call.pitch, vector=1))
    else:
        qkv = call.rows("data", tokens, call.pitch, width, F16, align=0).astype(F32)
    q, k, v = split(call, qkv, positions)
    out = call.tensor("q", (tokens, call.heads, call.head_pitch), F16)
    out[..., : call.head_dim], out[..., call.head_dim :] = q, 0
    cache = cache_of(call, slots, call.head_pitch)
    for b in range(call.sequences):
        rows = slice(cu_seqlens[b], cu_seqlens[b + 1])
        store(cache, slots[b], context_lens[b], k[rows], v[rows])


@model
def attention_decode(call: Call) -> None:
    depth, cluster = call.number("D"), call.number("CLUSTER")
    splits, groups, count = call.launch.grid
    shared_heads = call.heads // call.kv_heads
    per_group = -(-shared_heads // DECODE_HEADS)
    warps, int8 = 8 if depth <= 128 else 4, call.template["CACHE"] == "bminf::int8"
    call.require(call.launch.block == 32 * warps and call.launch.cluster == cluster, "threads or clusters")
    call.require(groups == call.kv_heads * per_group, "blocks are missing")
    call.require(depth >= call.head_pitch, "the instantiation is too small")
    tile = depth * (1 if int8 else 2) * (32 if int8 or depth == 64 else 16)
    call.require(call.launch.shared >= warps * 2 * tile, "too little shared memory")
    context_lens, slots = call.vector("context_lens", count, np.int32), call.vector("slots", count, np.int32)
    if splits > cluster:
        clusters = splits // cluster
        call.vector("partials", count * call.heads * clusters * (2 * cluster + depth), F32)
        arrival_counts = call.vector("arrival_counts", count * groups * cluster, np.int32)
        call.require(not arrival_counts.any(), "the counters are not zero")
    from_source, biased = call.number("KIND") == 2, call.number("KIND") == 1
    if from_source:
        positions = call.vector("lengths", int(slots.max()) + 1, np.int32)[slots] - 1
    else:
        positions = np.minimum(context_lens, call.capacity - 1)
    width = (call.heads + (0 if from_source else 2 * call.kv_heads)) * call.head_dim
    q, k, v = split(call, call.rows("qkv", count, call.pitch, width, F16, align=0).astype(F32), positions)
    out = call.rows("out", count, call.out_pitch, call.heads * call.head_dim, F16, align=0)
    cache = cache_of(call, slots, call.head_pitch)
    bias = bias_of(call) if biased else None
    for b, position in enumerate(positions):
        if not from_source:
            store(cache, slots[b], position, k[b : b + 1], v[b : b + 1])
        out[b] = over_cache(call, q[b : b + 1], cache, slots[b], int(position), call.scale, bias)


def bias_of(call: Call) -> RelativeBias:
    values = call.vector("bias", call.heads * (2 * call.max_distance + 1), F32).reshape(call.heads, -1)
    return RelativeBias(values, call.max_distance)


def over_cache(
    call: Call, q: np.ndarray, cache: LayerCache, slot: int, context_len: int, scale: float, bias: RelativeBias | None
) -> np.ndarray:
    keys, values = cached(cache, slot, min(context_len + len(q), cache.capacity), F16)
    keys, values = keys[..., : call.head_dim], values[..., : call.head_dim]
    out = attend_rows(q, keys, values, scale, context_len, call.window or None, bias)
    return out.reshape(len(q), call.heads * call.head_dim)


@model
def attention_prefill(call: Call) -> None:
    prefill(call, AttentionMask(call.number("MASK")), bool(call.number("BIASED")))


@model
def attention_prefill_hopper(call: Call) -> None:
    prefill(call, AttentionMask.CAUSAL, False)


@model
def attention_prefill_merge(call: Call) -> None:
    """Nothing: :func:`prefill` writes the outputs of tiles that are split, too."""
    call.require(call.max_records > 0, "there are no records to merge")


def prefill(call: Call, mask: AttentionMask, biased: bool) -> None:
    causal, source = mask is AttentionMask.CAUSAL, mask is AttentionMask.CROSS
    depth, count, kv_heads = -(-call.head_dim // 16) * 16, call.sequences, call.kv_heads
    cu_seqlens = call.vector("cu_seqlens", count + 1, np.int32)
    call.require(call.number("D") == depth and call.q_pitch >= call.heads * depth, "the head's size")
    call.require(biased == bool(call.bias) and source == bool(call.source_lens), "the instantiation")
    call.require(call.launch.grid[0] > 0 or cu_seqlens[-1] == 0, "blocks are missing")
    call.require(not call.vector("counters", 2, np.int32).any(), "the counters are not zero")
    q = call.rows("q", int(cu_seqlens[-1]), call.q_pitch, call.heads * depth, F16, align=0)
    q = q.reshape(-1, call.heads, depth)[..., : call.head_dim]
    out = call.rows("out", int(cu_seqlens[-1]), call.out_pitch, call.heads * call.head_dim, F16, align=16)
    before = call.vector("context_lens", count, np.int32) if causal else np.zeros(count, np.int32)
    totals = call.vector("source_lens", count, np.int32) if source else before + np.diff(cu_seqlens)
    bias, scale = bias_of(call) if biased else None, call.scale / math.log2(math.e)
    window = call.window or None
    for b, tokens in enumerate(pool_tokens(call, mask, totals, cu_seqlens, depth, kv_heads)):
        own = slice(cu_seqlens[b], cu_seqlens[b + 1])
        if own.start == own.stop:
            continue
        keys, values = (x[..., : call.head_dim] for x in tokens)
        found = attend_rows(q[own], keys, values, scale, int(before[b]), window, bias, causal)
        out[own] = found.reshape(own.stop - own.start, -1)


def pool_tokens(
    call: Call, mask: AttentionMask, totals: np.ndarray, cu_seqlens: np.ndarray, depth: int, kv_heads: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The keys and values that each sequence sees, ``[kv_heads, total, depth]``."""
    if mask is AttentionMask.BIDIRECTIONAL:
        packed = [call.tensor(name, (kv_heads, call.capacity, depth), F16) for name in ("keys", "values")]
        for start, stop in itertools.pairwise(cu_seqlens):
            yield packed[0][:, start:stop], packed[1][:, start:stop]
        return
    tables = call.tensor("block_tables", (len(totals), call.table_pitch), np.int32)
    shape = (int(tables.max()) + 1, kv_heads, BLOCK_SIZE)
    int8 = call.template["CACHE"] == "bminf::int8"
    pools = [call.tensor(name, (*shape, depth), np.int8 if int8 else F16) for name in ("keys", "values")]
    scales = [call.tensor(name, shape, F16) for name in ("key_scales", "value_scales")] if int8 else None
    for table, total in zip(tables, totals, strict=True):
        blocks = table[: -(-int(total) // BLOCK_SIZE)]
        found = [pool[blocks].swapaxes(0, 1).reshape(kv_heads, -1, depth)[:, :total] for pool in pools]
        if scales is not None:
            factors = [x[blocks].swapaxes(0, 1).reshape(kv_heads, -1)[:, :total, None] for x in scales]
            found = [x * codes.astype(F16) for x, codes in zip(factors, found, strict=True)]
        yield found[0], found[1]
