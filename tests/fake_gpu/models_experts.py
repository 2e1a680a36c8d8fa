"""What the kernels of mixtures of experts do: routers, pairs of tokens and experts, and products of sorted pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bminf_lite.backend.expert_values import (
    WEIGHT_TYPES,
    ExpertActivation,
    GroupScore,
    MaskedScore,
    RouterSpec,
    Score,
)
from bminf_lite.backend.experts import activated
from bminf_lite.backend.experts import sort_by_expert as experts_in_order
from bminf_lite.backend.experts import weighted_sum as sum_of_experts
from bminf_lite.backend.functions import normalise, product_by_row
from bminf_lite.backend.quantization import quantize_rows
from bminf_lite.backend.rotation import rotated
from bminf_lite.backend.routing import route, sigmoid
from bminf_lite.backend.side_products import added
from bminf_lite.cuda.kernels.constants import (
    CLAMPED_SWIGLU,
    COPY_THREADS,
    EXPERT_FLOAT_THREADS,
    FETCH_THREADS,
    FEW_THREADS,
    GROUPED_PRODUCTS,
    GROUPED_THREADS,
    ROUTER_THREADS,
    ROUTER_TILE,
    ROUTER_TILE_THREADS,
    SORT_LIST,
    SORT_THREADS,
    SUM_THREADS,
    Activation,
    Epilogue,
    RowOp,
)
from bminf_lite.cuda.kernels.experts.weights import alternate_gate_and_up
from bminf_lite.memory.expert_cache import ExpertPool

from .launching import Call, model
from .models_rows import norm_of, rounded, up

F32, F16 = np.float32, np.float16
Added = Callable[[Call, np.ndarray, int], np.ndarray]
"""What adapters add to the products of each pair with these experts: one of them, or a gate and a value."""


# -- the router --------------------------------------------------------------------------------------------------------


def routed_rows(call: Call, rows: int) -> np.ndarray:
    """What the kernels of a router read of ``x``: a norm of its rows, or the rows themselves."""
    call.require(call.number("VECTORS") * ROUTER_THREADS * 8 >= call.k, "the threads do not cover a row")
    x, op = call.rows("x", rows, call.x_pitch, up(call.k, 16), F32)[:, : call.k], call.number("OP")
    if op == RowOp.IDENTITY:
        call.require(not (call.norm_weight or call.norm_bias), "a norm that is not computed")
        return x
    return normalise(x, norm_of(call, op, call.k, up(call.k, 16)))


def write_codes(call: Call, normed: np.ndarray) -> None:
    """The codes of rotated rows, with zeros up to a multiple of 16, and their scales."""
    rows, k = normed.shape
    call.require((call.rotation > 1) == bool(call.number("ROTATED")), "a rotation of its own instantiation")
    codes = call.rows("codes", rows, call.codes_pitch, up(k, 16), np.int8)
    codes[:, k:] = 0
    codes[:, :k], call.vector("scales", rows, F32)[...] = quantize_rows(rotated(normed, call.rotation))


def write_logits(call: Call, normed: np.ndarray) -> None:
    weight = call.rows("weight", call.experts, call.pitch, call.k, F16 if call.template["W"] == "__half" else F32)
    logits = product_by_row(normed.astype(F32), weight.astype(F32).T)
    logits = logits + call.vector("bias", call.experts, F32) if call.bias else logits
    call.tensor("logits", logits.shape, F32)[...] = logits


@model
def router_few_rows(call: Call) -> None:
    rows, warps = call.launch.grid[1], ROUTER_THREADS // 32
    blocks = call.launch.grid[0] - bool(call.codes) - bool(call.gate)
    call.require(blocks * warps >= call.experts and call.launch.block == ROUTER_THREADS, "blocks")
    normed = routed_rows(call, rows)
    write_logits(call, normed)
    if call.codes:
        write_codes(call, normed)
    if call.gate:
        write_gate(call, normed, "gate_weight", "gate")


@model
def router_norm(call: Call) -> None:
    rows = call.launch.grid[0]
    normed = routed_rows(call, rows)
    out = call.rows("normed", rows, call.normed_pitch, up(call.k, 16), F32)
    out[:, : call.k], out[:, call.k :] = normed, 0
    if call.codes:
        write_codes(call, normed)


@model
def router_many_rows(call: Call) -> None:
    rows, warps = call.arguments["rows"], call.number("BLOCK_WARPS")
    call.require(call.launch.block == 32 * warps, "threads")
    covered = call.launch.grid[0] * warps * call.number("EXPERTS") >= call.experts
    call.require(covered and call.launch.grid[1] * call.number("ROWS") >= rows, "blocks are missing")
    write_logits(call, call.rows("x", rows, call.x_pitch, call.k, F32))


@model
def router_tiles(call: Call) -> None:
    rows = call.arguments["rows"]
    across, down = call.launch.grid[:2]
    call.require(across * ROUTER_TILE >= call.experts and down * ROUTER_TILE >= rows, "blocks are missing")
    call.require(call.launch.block == ROUTER_TILE_THREADS and call.launch.shared >= 1 << 16, "threads or shared memory")
    write_logits(call, call.rows("x", rows, call.x_pitch, call.k, F32))


@model
def scalar_gate(call: Call) -> None:
    rows = call.launch.grid[0]
    normed = routed_rows(call, rows)
    write_gate(call, normed, "weight", "out")


def write_gate(call: Call, normed: np.ndarray, weight: str, out: str) -> None:
    vector = call.vector(weight, up(call.k, 16), F32, 16)[: call.k]
    call.vector(out, len(normed), F32)[...] = sigmoid(product_by_row(normed.astype(F32), vector[:, None]))[:, 0]


def chosen(call: Call, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The experts of each row of logits, and their weights."""
    spec = RouterSpec(
        call.num_experts,
        call.top_k,
        Score(call.score),
        bool(call.renormalise),
        call.epsilon,
        call.min_sum,
        call.scale,
        call.num_groups,
        call.top_groups,
        GroupScore(call.group_score),
        MaskedScore(call.masked),
        WEIGHT_TYPES[call.weight_type],
        closeness=call.closeness,
    )
    call.require((spec.score is Score.SPARSE_MIXER) == ("SPARSE_MIXER_ROUTER" in call.defines), "a macro of its own")
    call.require(call.number("EACH") * 32 >= call.num_experts, "the lanes do not have all experts")
    bias = call.vector("correction_bias", call.num_experts, F32) if call.correction_bias else None
    scale = call.vector("expert_scale", call.num_experts, F32) if call.expert_scale else None
    return route(call.tensor("logits", (rows, call.num_experts), F32), spec, bias, scale)


@model
def choose_experts(call: Call) -> None:
    rows = call.arguments["rows"]
    ids, weights = chosen(call, rows)
    call.tensor("topk_ids", ids.shape, np.int32)[...] = ids
    call.tensor("topk_weights", ids.shape, F32)[...] = weights


# -- pairs -------------------------------------------------------------------------------------------------------------


@model
def sort_by_expert(call: Call) -> None:
    experts, pairs, own = call.experts, call.pairs, call.each * call.top_k
    call.require(call.launch.block == SORT_THREADS >= experts and own <= SORT_LIST, "threads")
    call.require(call.launch.grid[0] == -(-pairs // own), "blocks are missing")
    ids = call.vector("topk_ids", pairs, np.int32)
    order, offsets = experts_in_order(ids[:, None], experts)
    call.vector("offsets", experts + 1, np.int32)[...] = offsets
    if call.claimed:
        call.vector("claimed", GROUPED_PRODUCTS, np.int32)[...] = 0
    call.vector("sorted_pairs", pairs, np.int32)[...] = order
    call.vector("places", pairs, np.int32)[order] = np.arange(pairs, dtype=np.int32)
    tokens, width = pairs // call.top_k, call.words * 16
    if call.slots:
        call.vector("sorted_slots", pairs, np.int32)[...] = call.vector("slots", tokens, np.int32)[order // call.top_k]
    if not call.x:
        return
    rows = call.rows("x", tokens, width, width, np.int8)
    call.rows("sorted", pairs, width, width, np.int8)[...] = rows[order // call.top_k]
    scales = call.vector("scales", tokens, F32)[order // call.top_k]
    factors = call.vector("factors", pairs, F32)[order] if call.factors else F32(1)
    call.vector("sorted_scales", pairs, F32)[...] = scales * factors


def write_sums(
    call: Call, results: np.ndarray, weights: np.ndarray, columns: int, addend: np.ndarray | None = None
) -> None:
    """The sum of the experts of each token, ``results`` fp32 ``[T, top_k, columns]``, and what is added to it."""
    total, rows = sum_of_experts(results, weights), len(weights)
    if call.addend:
        addend = call.rows("addend", rows, call.addend_pitch, columns, F32, 0)
    if addend is not None:
        gate = call.vector("gate", rows, F32)[:, None] if call.gate else F32(1)
        total = total + gate * addend
    out = call.rows("out", rows, call.out_pitch, columns, F32, 0)
    out[...] = out + total if call.number("ADD") else total


@model
def weighted_sum(call: Call) -> None:
    rows, top_k, columns = call.launch.grid[1], call.top_k, call.columns
    call.require(call.launch.grid[0] * SUM_THREADS * 4 >= columns, "blocks are missing")
    places = call.vector("places", rows * top_k, np.int32)
    results = call.rows("results", rows * top_k, call.pitch, columns, F16)[places].astype(F32)
    weights = call.vector("weights", rows * top_k, F32) if call.weights else np.ones(rows * top_k, F32)
    write_sums(call, results.reshape(rows, top_k, columns), weights.reshape(rows, top_k), columns)


# -- a cache -----------------------------------------------------------------------------------------------------------


@model
def find_missing(call: Call) -> None:
    call.require(call.launch.grid == (1, 1, 1) and call.launch.block == FETCH_THREADS, "one block finds them")
    owners, end = call.vector("owners", call.num_slots, np.int32), call.first + call.experts
    pool = ExpertPool(call.num_slots, [call.experts])
    pool.starts, pool.owners, known = np.array([call.first, end]), owners, max(end, int(owners.max()) + 1)
    pool.slots, pool.counts = (call.vector(name, known, np.int32) for name in ("slots", "counts"))
    pool.clocks, found = call.vector("clock", 1, np.int32), call.vector("found", 2, np.uint64)
    missing, slots = pool.fetch(0, call.tensor("topk_ids", (call.tokens, call.top_k), np.int32))
    found += np.array([pool.hits, pool.misses], np.uint64)
    copies = call.vector("copies", 1 + 2 * len(missing), np.int32)
    copies[0], copies[1::2], copies[2::2] = len(missing), missing, slots


@model
def copy_experts(call: Call) -> None:
    call.require(call.launch.block == COPY_THREADS, "threads")
    count = int(call.vector("copies", 1, np.int32)[0])
    for expert, slot in call.vector("copies", 1 + 2 * count, np.int32)[1:].reshape(-1, 2).tolist():
        for name, words in (("hidden", call.hidden_words), ("down", call.down_words)):
            source = call.vector(name, 16 * words, np.uint8, 16, expert * 16 * words)
            call.vector(f"{name}_slots", 16 * words, np.uint8, 16, slot * 16 * words)[...] = source


# -- products ----------------------------------------------------------------------------------------------------------


def product(
    call: Call,
    x: np.ndarray,
    experts: np.ndarray,
    w: np.ndarray,
    factors: np.ndarray | None,
    side: np.ndarray | None = None,
) -> np.ndarray:
    """``x[p] @ w[experts[p]].T`` with scales and bias, fp32 ``[P, n]``, in the order of the weight's rows.

    With ``factors``, the scales of quantized rows, the sums are exact; without, each row has a product of its own. A
    ``side`` product fp32 ``[P, n]`` is added before the bias.
    """
    count, n = w.shape[:2]
    y = np.empty((len(x), n), F32)
    for expert in np.unique(experts):
        rows = experts == expert
        if factors is None:
            y[rows] = product_by_row(x[rows].astype(F32), w[expert].astype(F32).T)
        else:
            y[rows] = (x[rows].astype(np.float64) @ w[expert].T.astype(np.float64)).astype(F32)
    if call.w_scale:
        y = call.vector("w_scale", count * n, F32).reshape(count, n)[experts] * y
    y = y if factors is None else factors[:, None] * y
    y = y if side is None else added(y, side)
    return y + call.vector("bias", count * n, F32).reshape(count, n)[experts] if call.bias else y


def epilogue(call: Call, y: np.ndarray, gated: bool, is_activated: bool) -> np.ndarray:
    """fp16 results; the rows of gate and up alternate in groups of eight."""
    if gated:
        sides = y.reshape(len(y), -1, 2, 8)
        y = np.concatenate([sides[:, :, side].reshape(len(y), -1) for side in range(2)], axis=1)
    if gated or is_activated:
        function = call.number("F")
        if function == CLAMPED_SWIGLU:
            activation = ExpertActivation(limit=call.limit, alpha=call.alpha)
        else:
            activation = ExpertActivation(Activation(function).name.lower(), gated)
        y = activated(rounded(y), activation)
    return y.astype(F16)


def slots_of(call: Call, experts: int, used: np.ndarray) -> np.ndarray:
    """Where the weights of each expert lie, if those of ``used`` experts are somewhere; 0 for the others."""
    if not call.slots:
        return np.arange(experts)
    slots = call.vector("slots", experts, np.int32)
    call.require((slots[used] >= 0).all(), "an expert that was chosen has no slot")
    return np.maximum(slots, 0)


def weights_of(call: Call, experts: int, n: int, dtype: type, used: np.ndarray) -> np.ndarray:
    """The weights of each expert, of which ``used`` ones are read."""
    slots = slots_of(call, experts, used)
    count = max(slots[used].max(initial=0) + 1, 0 if call.slots else experts)
    return call.rows("weight", count * n, call.pitch, call.pitch, dtype).reshape(count, n, -1)[
        np.minimum(slots, count - 1)
    ]


def sorted_experts(call: Call, experts: int) -> np.ndarray:
    """The expert of each sorted pair."""
    offsets = call.vector("offsets", experts + 1, np.int32)
    call.require(offsets[0] == 0 and (np.diff(offsets) >= 0).all(), "the offsets do not ascend")
    return np.repeat(np.arange(experts), np.diff(offsets))


def write_products(call: Call, y: np.ndarray) -> None:
    kind = call.number("EPILOGUE")
    found = epilogue(call, y, kind == Epilogue.GATED, kind == Epilogue.ACTIVATED)
    call.rows("out", len(y), call.out_pitch, found.shape[1], F16)[...] = found


@model
def grouped_gemm(call: Call, adapted: Added | None = None) -> None:
    experts, k = sorted_experts(call, call.experts), call.k
    call.require(call.launch.block == GROUPED_THREADS and call.n % 8 == 0 and k % 16 == 0, "threads or sizes")
    x = call.rows("x", len(experts), call.pitch, k, np.int8)
    weight = weights_of(call, call.experts, call.n, np.int8, experts)[..., :k]
    factors = call.vector("x_scale", len(experts), F32)
    write_products(call, product(call, x, experts, weight, factors, adapted and adapted(call, experts, call.n)))


@model
def grouped_gemm_hopper(call: Call, adapted: Added | None = None) -> None:
    experts = sorted_experts(call, call.experts)
    x, other, w = call.mapped("x8_map", 8), call.mapped("x_map", 32), call.mapped("w_map", 128)
    call.require(x.shape == other.shape and len(x) == len(experts) and call.steps * 128 >= x.shape[1], "rows or steps")
    claimed = call.vector("claimed", 1, np.int32)
    call.require(claimed[0] == 0, "the counter of tiles is not zero")
    claimed[0] = 1
    weight = w.reshape(-1, call.n, w.shape[1])[slots_of(call, call.experts, experts)]
    factors = call.vector("x_scale", len(experts), F32)
    write_products(call, product(call, x, experts, weight, factors, adapted and adapted(call, experts, call.n)))


@model
def float_products(call: Call, adapted: Added | None = None) -> None:
    experts, k = sorted_experts(call, call.experts), call.k
    call.require(call.launch.block == EXPERT_FLOAT_THREADS, "threads")
    is_int8 = call.template["W"] == "bminf::int8"
    call.require((call.w_scale != 0) == is_int8, "scales belong to int8")
    rows = np.arange(len(experts))
    if call.order:
        rows = call.vector("order", len(experts), np.int32) // call.top_k
    x = call.rows("x", int(rows.max()) + 1, call.x_pitch, up(k, 8), F16)[:, :k]
    weight = weights_of(call, call.experts, call.n, np.int8 if is_int8 else F16, experts)
    call.require(not weight[..., k:].any(), "the padding of the weight is not zeros")
    write_products(
        call, product(call, x[rows], experts, weight[..., :k], None, adapted and adapted(call, experts, call.n))
    )


def few_tokens_shared(call: Call, rows: int, own: int, each: int) -> None:
    """Check the shared memory: pipelines or the choice, ``rows`` rows of codes, ``each`` bytes for each of ``own``."""
    unit = call.number("UNIT")
    needed = call.scratch_bytes + rows * up(call.pitch, unit) + each * own
    call.require(call.launch.block == FEW_THREADS and call.launch.shared >= needed, "threads or shared memory")


@model
def few_tokens_hidden(call: Call, adapted: Added | None = None) -> None:
    tokens, top_k, gated, k = call.tokens, call.top_k, bool(call.number("GATED")), call.k
    parts = call.shared_parts
    call.require(bool(parts) == bool(call.shared_weight), "parts of a shared expert")
    pairs = tokens * (top_k + parts)
    n, blocks = call.features * (1 + gated), call.launch.grid[0]
    group = 8 if gated else 1
    few_tokens_shared(
        call, tokens, -(-pairs * call.features // group // blocks) * group * (1 + gated), 8 if adapted else 4
    )
    ids, weights = chosen(call, tokens)
    codes = call.rows("codes", tokens, call.pitch, k, np.int8)
    own = call.vector("x_scale", tokens, F32)
    scales = np.repeat(own, top_k)
    scales = scales * weights.ravel() if call.scales_input else scales
    weight = weights_of(call, call.num_experts, n, np.int8, ids)[..., :k]
    added_to = adapted and adapted(call, ids.ravel(), n)
    y = product(call, np.repeat(codes, top_k, axis=0), ids.ravel(), weight, scales, added_to)
    if call.shared_weight:
        beside = shared_product(call, codes, own, parts * n, call.pitch)
        beside = alternate_gate_and_up(beside[:, :, None])[:, :, 0] if gated else beside
        beside = beside.reshape(tokens, parts, n)
        y = np.concatenate([y.reshape(tokens, top_k, n), beside], axis=1).reshape(pairs, n)
    found = epilogue(call, y, gated, not gated)
    call.rows("hidden", pairs, call.hidden_pitch, call.features, F16)[...] = found


def shared_product(call: Call, codes: np.ndarray, scales: np.ndarray, n: int, pitch: int) -> np.ndarray:
    """The product of each token's row with a matrix of the shared expert, fp32 ``[T, n]``."""
    call.require(not call.bias, "an expert beside a shared one has a bias")
    weight = call.rows("shared_weight", n, pitch, codes.shape[1], np.int8).astype(np.float64)
    sums = (codes.astype(np.float64) @ weight.T).astype(F32)
    return scales[:, None] * (call.vector("shared_scale", n, F32) * sums)


@model
def few_tokens_down(call: Call, adapted: Added | None = None) -> None:
    tokens, top_k, columns, k = call.tokens, call.top_k, call.columns, call.k
    parts = call.shared_parts
    each = top_k + parts
    pairs = tokens * each
    call.require(parts < 2 or (pairs <= FEW_THREADS // 32 and k % call.rotation == 0), "parts with one scale")
    few_tokens_shared(call, pairs, pairs * -(-columns // call.launch.grid[0]), 16 if adapted else 12)
    call.require((call.rotation > 1) == bool(call.number("ROTATED")), "a rotation of its own instantiation")
    ids, weights = chosen(call, tokens)
    call.tensor("topk_ids", ids.shape, np.int32)[...] = ids
    call.tensor("topk_weights", ids.shape, F32)[...] = weights
    hidden = call.rows("hidden", pairs, call.hidden_pitch, k, F16)
    by_token = hidden.reshape(tokens, each, k)
    routed, own = quantize_rows(rotated(by_token[:, :top_k].reshape(tokens * top_k, k), call.rotation))
    weight = weights_of(call, call.num_experts, columns, np.int8, ids)[..., :k]
    added_to = adapted and adapted(call, ids.ravel(), columns)
    results = rounded(product(call, routed, ids.ravel(), weight, own, added_to)).reshape(tokens, top_k, columns)
    beside = None
    if call.shared_weight:
        codes, scales = quantize_rows(rotated(by_token[:, top_k:].reshape(tokens, parts * k), call.rotation))
        beside = shared_product(call, codes, scales, columns, call.shared_pitch)
    write_sums(call, results, np.ones_like(weights) if call.scales_input else weights, columns, beside)
