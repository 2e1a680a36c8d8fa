"""What the kernels of attention do, by the reference's functions on the fake memory."""

from __future__ import annotations

import math

import numpy as np

from bminf_lite.backend.base import attend as attend_rows
from bminf_lite.backend.base import normalise, rotate
from bminf_lite.backend.values import Norm, RelativeBias, Rope

from .launching import Call, model
from .models_rows import product_values, rounded

F32, F16 = np.float32, np.float16
WARPS, STAGES = 8, 3


def prepared(call: Call, x: np.ndarray, positions: np.ndarray, gain: str | None) -> np.ndarray:
    """Heads ``[T, heads, head_dim]`` fp32 normalised and rotated, if that is asked for, and rounded to fp16."""
    if gain is not None and call.arguments[gain]:
        x = normalise(x, Norm(call.vector(gain, call.head_dim, F32), call.eps))
    if gain is not None and call.frequencies:
        x = rotate(x, positions, Rope(call.vector("frequencies", call.head_dim // 2, F32), call.rope_scale))
    return x.astype(F16)


def split(call: Call, qkv: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values fp16 ``[T, heads, head_dim]`` of fp32 columns side by side."""
    heads = qkv.reshape(len(qkv), -1, call.head_dim)
    q, k, v = np.split(heads, [call.heads, call.heads + call.kv_heads], axis=1)
    return prepared(call, q, positions, "q_gain"), prepared(call, k, positions, "k_gain"), v.astype(F16)


def caches(call: Call, slots: np.ndarray, head_pitch: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values fp16 ``[slots, kv_heads, capacity, head_pitch]``."""
    call.require(head_pitch % 8 == 0 and head_pitch >= call.head_dim, "heads are not padded")
    shape = int(slots.max()) + 1, call.kv_heads, call.capacity, head_pitch
    return call.tensor("keys", shape, F16), call.tensor("values", shape, F16)


def store(cache: np.ndarray, slot: int, first: int, heads: np.ndarray) -> None:
    """New tokens' heads ``[n, kv_heads, head_dim]``, with zeros in the padding; what does not fit is left out."""
    heads = heads[: max(0, cache.shape[2] - first)].swapaxes(0, 1)
    place = cache[slot, :, first : first + heads.shape[1]]
    place[..., : heads.shape[2]], place[..., heads.shape[2] :] = heads, 0


@model
def prepare(call: Call) -> None:
    starts = call.vector("starts", call.sequences + 1, np.int32)
    past, slots = call.vector("past", call.sequences, np.int32), call.vector("slots", call.sequences, np.int32)
    tokens, width = call.launch.grid[0], (call.heads + 2 * call.kv_heads) * call.head_dim
    call.require(tokens == starts[-1], "a block for each token")
    positions = np.arange(tokens) - np.repeat(starts[:-1] - past, np.diff(starts))
    if call.number("PRODUCT"):
        qkv = rounded(product_values(call, tokens, width, call.number("IN"), call.pitch, vector=1))
    else:
        qkv = call.rows("data", tokens, call.pitch, width, F16, align=0).astype(F32)
    q, k, v = split(call, qkv, positions)
    out = call.tensor("q", (tokens, call.heads, call.head_pitch), F16)
    out[..., : call.head_dim], out[..., call.head_dim :] = q, 0
    keys, values = caches(call, slots, call.head_pitch)
    for b in range(call.sequences):
        rows = slice(starts[b], starts[b + 1])
        store(keys, slots[b], past[b], k[rows])
        store(values, slots[b], past[b], v[rows])


@model
def attend(call: Call) -> None:
    depth, group, cluster = (call.number(name) for name in ("D", "GROUP", "CLUSTER"))
    splits, groups, count = call.launch.grid
    shared_heads = call.heads // call.kv_heads
    per_group = -(-shared_heads // group)
    call.require(call.launch.block == WARPS * 32 and call.launch.cluster == cluster, "threads or clusters")
    call.require(groups == call.kv_heads * per_group, "blocks are missing")
    call.require(depth >= call.head_pitch and min(group, shared_heads) + 2 <= WARPS, "the instantiation is too small")
    tile = 32 if depth <= 128 else 16
    call.require(call.launch.shared >= STAGES * 2 * tile * depth * 2, "too little shared memory")
    past, slots = call.vector("past", count, np.int32), call.vector("slots", count, np.int32)
    if splits > cluster:
        clusters = splits // cluster
        call.vector("parts", count * call.heads * clusters * (2 * cluster + depth), F32)
        arrived = call.vector("arrived", count * groups * cluster, np.int32)
        call.require(not arrived.any(), "the counters are not zero")
    from_source, biased = call.number("KIND") == 2, call.number("KIND") == 1
    if from_source:
        positions = call.vector("lengths", int(slots.max()) + 1, np.int32)[slots] - 1
    else:
        positions = np.minimum(past, call.capacity - 1)
    width = (call.heads + (0 if from_source else 2 * call.kv_heads)) * call.head_dim
    q, k, v = split(call, call.rows("qkv", count, call.pitch, width, F16, align=0).astype(F32), positions)
    out = call.rows("out", count, call.out_pitch, call.heads * call.head_dim, F16, align=0)
    keys, values = caches(call, slots, call.head_pitch)
    bias = bias_of(call) if biased else None
    for b, position in enumerate(positions):
        if not from_source:
            store(keys, slots[b], position, k[b : b + 1])
            store(values, slots[b], position, v[b : b + 1])
        out[b] = over_cache(call, q[b : b + 1], keys[slots[b]], values[slots[b]], int(position), call.scale, bias)


def bias_of(call: Call) -> RelativeBias:
    values = call.vector("bias", call.heads * (2 * call.reach + 1), F32).reshape(call.heads, -1)
    return RelativeBias(values, call.reach)


def over_cache(
    call: Call, q: np.ndarray, keys: np.ndarray, values: np.ndarray, past: int, scale: float,
    bias: RelativeBias | None = None,
) -> np.ndarray:  # fmt: skip
    total = min(past + len(q), keys.shape[1])
    keys, values = keys[:, :total, : call.head_dim], values[:, :total, : call.head_dim]
    return attend_rows(q, keys, values, scale, past, call.window or None, bias).reshape(len(q), -1)


def attend_prefill(call: Call) -> None:
    depth, count = -(-call.head_dim // 16) * 16, call.sequences
    starts = call.vector("starts", count + 1, np.int32)
    past, slots = call.vector("past", count, np.int32), call.vector("slots", count, np.int32)
    kv_heads, tiles, _ = call.launch.grid
    call.arguments["kv_heads"] = kv_heads
    call.require(call.number("D") == depth and call.q_pitch == call.heads * depth, "the head's size")
    rows = np.diff(starts) * (call.heads // kv_heads)
    call.require(tiles >= (-(-rows // call.number("BM"))).sum(), "tiles are missing")
    q = call.tensor("q", (int(starts[-1]), call.heads, depth), F16)
    out = call.rows("out", int(starts[-1]), call.out_pitch, call.heads * call.head_dim, F16, align=16)
    keys, values = caches(call, slots, depth)
    for b in range(count):
        own = slice(starts[b], starts[b + 1])
        scale = call.scale / math.log2(math.e)
        out[own] = over_cache(call, q[own, :, : call.head_dim], keys[slots[b]], values[slots[b]], int(past[b]), scale)


model(attend_prefill)


@model
def attend_prefill_hopper(call: Call) -> None:
    attend_prefill(call)


@model
def attend_general(call: Call) -> None:
    cached, source, _ = (call.number("KEYS") == kind for kind in range(3))
    tokens, heads, count = call.launch.grid[0], call.launch.grid[1], call.sequences
    starts = call.vector("starts", count + 1, np.int32)
    call.require(heads == call.heads and tokens == starts[-1], "a block for each head of each token")
    call.require(32 * call.number("PARTS") >= call.head_dim, "the instantiation is too small")
    bias = bias_of(call) if call.bias else None
    of_tokens = (2 * t * call.q_pitch for t in range(tokens))
    q = np.stack([call.rows("q", heads, call.q_head, call.head_dim, F16, 0, offset) for offset in of_tokens])
    out = call.rows("out", tokens, call.out_pitch, heads * call.head_dim, F16, align=0)
    for b in range(count):
        own, past = slice(starts[b], starts[b + 1]), 0
        total, base = own.stop - own.start, int(starts[b]) * call.token_stride
        if cached or source:
            slot = int(call.vector("slots", b + 1, np.int32)[b])
            past = int(call.vector("past", b + 1, np.int32)[b]) if cached else 0
            total = past + total if cached else int(call.vector("lengths", slot + 1, np.int32)[slot])
            base = slot * call.sequence_stride
        keys, values = (
            np.stack([
                call.rows(name, total, call.token_stride, call.head_dim, F16, 0, 2 * (base + h * call.head_stride))
                for h in range(call.kv_heads)
            ])
            for name in ("keys", "values")
        )  # fmt: skip
        rows = attend_rows(q[own], keys, values, call.scale, past, None, bias, causal=cached)
        out[own] = rows.reshape(own.stop - own.start, -1)
