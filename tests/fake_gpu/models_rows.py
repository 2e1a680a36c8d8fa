"""What the kernels over rows do: products of few rows, what stands between products, embeddings, random matrices."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from bminf_lite.backend.base import Backend
from bminf_lite.backend.cache_values import StateCache
from bminf_lite.backend.functions import ACTIVATIONS, normalise, silu, soft_capped, softplus
from bminf_lite.backend.functions import softmax as softmax_of
from bminf_lite.backend.functions import xielu as xielu_of
from bminf_lite.backend.operations.recurrences import convolved as convolution_of
from bminf_lite.backend.operations.rows import pooled
from bminf_lite.backend.quantization import quantize_rows
from bminf_lite.backend.random_matrix import RandomMatrix
from bminf_lite.backend.rotation import rotated
from bminf_lite.backend.routing import sigmoid
from bminf_lite.backend.side_products import added
from bminf_lite.backend.values import ForwardBatch, Norm, ShortConvolution, Xielu
from bminf_lite.cuda.kernels.constants import (
    GEMV_CHUNK,
    GEMV_THREADS,
    POOLING_COLUMNS,
    POOLING_LANES,
    Activation,
    Epilogue,
    GemvInput,
    Rotated,
    RowOp,
    Source,
    Target,
)
from bminf_lite.cuda.kernels.constants import SHORT_CONVOLUTION_TOKENS as TOKENS_AT_ONCE
from bminf_lite.cuda.kernels.gemm.layouts import Layout
from bminf_lite.cuda.kernels.rowwise.pooling import KINDS
from bminf_lite.cuda.kernels.rowwise.rows import bytes_of_a_warp, loops_over
from bminf_lite.cuda.runtime.cublaslt import Order

from .launching import Call, model
from .models_adapters import SideProduct

F32, F16 = np.float32, np.float16
NONE, FROM_HALF, FROM_FLOAT, FROM_INT32 = Source
GATE, ACTIVATE = RowOp.GATE_SILU, RowOp.ACTIVATE_SILU
TO_HALF, TO_FLOAT, ADD, GATED, ACTIVATED, TO_INT32, _ = Epilogue
THREADS, WARPS, CHUNK = GEMV_THREADS, GEMV_THREADS // 32, GEMV_CHUNK
ROTATED_KINDS = {
    GemvInput.ROTATED: GemvInput.HALF,
    GemvInput.ROTATED_RMS_NORM: GemvInput.RMS_NORM,
    GemvInput.ROTATED_LAYER_NORM: GemvInput.LAYER_NORM,
    GemvInput.ROTATED_RMS_NORM_OF_SUM: GemvInput.RMS_NORM_OF_SUM,
}
FUNCTIONS = [ACTIVATIONS[activation.name.lower()] for activation in Activation]


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(F16).astype(F32)


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def norm_of(call: Call, kind: int, k: int, reads: int) -> Norm:
    """The norm that a kernel applies: kind 1 is RMSNorm, 2 LayerNorm."""
    norm_weight = call.vector("norm_weight", reads, F32, 16)[:k]
    norm_bias = call.vector("norm_bias", reads, F32, 16)[:k] if call.norm_bias else None
    return Norm(norm_weight, call.eps, norm_bias, center=kind == 2)


def offsets(order: int, rows: int, columns: int, ld: int) -> np.ndarray:
    """The offsets of the elements of a matrix in a layout."""
    layout = Layout(Order(order), rows, columns, ld)
    return np.asarray(layout.offset(np.arange(rows)[:, None], np.arange(columns)))


# -- products of few rows ----------------------------------------------------------------------------------------------


def input_rows(call: Call, rows: int, pitch: int) -> np.ndarray:
    """The activations of ``gemv``, normalised, rotated or added, fp32 ``[rows, k]``."""
    kind, rotation = call.number("INPUT"), 1
    if kind in ROTATED_KINDS:
        kind, rotation = ROTATED_KINDS[kind], call.rotation
    call.require(
        call.number("VECTORS") * call.number("ROW_THREADS") * 8 >= call.pitch, "the threads do not cover a row"
    )
    x = call.rows("x", rows, pitch, call.pitch, F16 if kind == GemvInput.HALF else F32)[:, : call.k].astype(F32)
    if kind in (GemvInput.SUM, GemvInput.RMS_NORM_OF_SUM):
        call.require(call.sum != call.x, "the sum lies where the input does")
        addend = call.rows("addend", 1, 0, call.pitch, F32)[:, : call.k]
        weight = call.vector("addend_weight", call.pitch, F32, 16)[: call.k]
        x = x + normalise(addend, Norm(weight, call.addend_eps))
        total = call.rows("sum", 1, 0, call.pitch, F32)
        total[:, : call.k], total[:, call.k :] = x, 0
    is_normed = kind in (GemvInput.RMS_NORM, GemvInput.LAYER_NORM, GemvInput.RMS_NORM_OF_SUM)
    return rotated(normalise(x, norm_of(call, kind, call.k, call.pitch)) if is_normed else x, rotation)


def write_outputs(call: Call, y: np.ndarray, pitch: int, out: np.ndarray | None = None) -> None:
    """The epilogue of ``y``, written to ``out`` or to rows of ``pitch`` elements."""
    epilogue, outputs = call.number("EPILOGUE"), y.shape[1] // (2 if call.number("EPILOGUE") == GATED else 1)
    if out is None:
        out = call.rows("out", len(y), pitch, outputs, F32 if epilogue in (TO_FLOAT, ADD) else F16, align=0)
    if epilogue == ACTIVATED:
        y = FUNCTIONS[call.number("F")](rounded(y))
    if epilogue == GATED:
        y = FUNCTIONS[call.number("F")](rounded(y[:, :outputs])) * rounded(y[:, outputs:])
    out[...] = out + rounded(y) if epilogue == ADD else y


def write_scaled(call: Call, acc: np.ndarray, side: np.ndarray | None = None) -> None:
    """The sums themselves, or what the epilogue makes of them with scales, a side product and bias."""
    rows, n = acc.shape
    if call.number("EPILOGUE") == TO_INT32:
        call.rows("out", rows, call.out_pitch, n, np.int32, align=0)[...] = acc
        return
    y = call.vector("x_scale", rows, F32)[:, None] * (call.vector("w_scale", n, F32) * acc.astype(F32))
    y = y if side is None else added(y, side)
    write_outputs(call, y + call.vector("bias", n, F32) if call.bias else y, call.out_pitch)


@model
def gemv(call: Call) -> None:
    n, k, pitch, blocks = call.n, call.k, call.pitch, call.launch.grid[0]
    matrices = 2 if call.number("EPILOGUE") == GATED else 1
    outputs = n // matrices
    share = max(outputs * (b + 1) // blocks - outputs * b // blocks for b in range(blocks)) * matrices
    pipeline = WARPS * call.defines["PIPELINE_CHUNKS"] * CHUNK if call.machine.profile.capability >= (9, 0) else 0
    call.require(call.launch.block == THREADS, "threads")
    call.require(call.defines["PIPELINE_CHUNKS"] % call.number("U") == 0, "the pipeline does not hold whole units")
    needed = pipeline + up(pitch, CHUNK * call.number("U")) + 4 * share
    call.require(call.launch.shared >= needed, "too little shared memory")
    codes, scale = quantize_rows(input_rows(call, 1, 0))
    weight = call.rows("weight", n, pitch, pitch, np.int8)
    acc = (codes.astype(np.float64) @ weight[:, :k].T.astype(np.float64)).astype(F32)
    y = scale[:, None] * (call.vector("w_scale", n, F32) * acc)
    write_outputs(call, y + call.vector("bias", n, F32) if call.bias else y, 0)


def side_products(call: Call, rows: int) -> np.ndarray:
    """The side products of a kernel that runs beside that of their inputs."""
    ready = call.vector("ready", 1, np.int32)
    call.require(ready[0] == call.arguments["rows"], "the kernel of the side inputs has not counted itself")
    ready[0] = 0
    return SideProduct(call, rows).products()


@model
def skinny_gemm(call: Call) -> None:
    rows, n, pitch, epilogue = call.arguments["rows"], call.n, call.pitch, call.number("EPILOGUE")
    tiles, matrices = call.number("TILES"), 2 if epilogue == GATED else 1
    groups, blocks = up(n // matrices, 16) // 16, call.launch.grid[0]
    share = max(groups * (b + 1) // blocks - groups * b // blocks for b in range(blocks)) * matrices
    warps, slots, steps = (call.defines[f"PIPELINE_{name}"] for name in ("WARPS", "STAGES", "STEPS"))
    call.require(epilogue != GATED or n % 32 == 0, "half a group of a gate")
    call.require(call.launch.block == 32 * warps and rows <= 8 * tiles, "threads or tiles")
    needed = warps * slots * 16 * 64 * (steps + 1) + share * 16 * (8 * tiles + 2) * 4
    call.require(call.launch.shared >= needed, "too little shared memory")
    x, weight = call.rows("x", rows, pitch, pitch, np.int8), call.rows("weight", up(n, 16), pitch, pitch, np.int8)
    acc = x.astype(np.float64) @ weight[:n].T.astype(np.float64)
    write_scaled(call, acc)


@model
def skinny_gemm_hopper(call: Call, side: np.ndarray | None = None) -> None:
    rows, n, steps, stages = (call.arguments[name] for name in ("rows", "n", "steps", "stages"))
    epilogue, tiles = call.number("EPILOGUE"), call.number("TILES")
    matrices, cluster, x_box, box = 2 if epilogue == GATED else 1, 2, 8 * tiles * 128, 64 * 128
    x, w = call.mapped("x_map", 8 * tiles), call.mapped("w_map", 64 // matrices)
    call.require(x.shape[0] == rows <= 8 * tiles and w.shape[0] == n and n % matrices == 0, "rows")
    call.require(x.shape[1] == w.shape[1] <= steps * 2 * 128, "steps do not cover the columns")
    call.require(call.arguments["tiles"] * 64 >= up(n, matrices), "tiles are missing")
    call.require(call.launch.block == 320 and call.launch.cluster == cluster, "threads or blocks")
    kept = 2 * x_box * (up(steps, cluster) // cluster if call.resident else stages)
    needed = stages * (2 * box + 24) + kept + 2 * 64 * 8 * tiles * 4 + 32
    call.require(stages >= 4 and call.launch.shared >= needed, "too little shared memory")
    acc = x.astype(np.float64) @ w.T.astype(np.float64)
    write_scaled(call, acc, side)


@model
def skinny_gemm_hopper_adapted(call: Call) -> None:
    ends = (call.end0, call.end1, call.end2, call.outputs)
    call.require(all(end % 32 == 0 for end in ends), "a section ends inside what a thread has")
    skinny_gemm_hopper(call, side_products(call, call.arguments["rows"]))


@model
def gemm_hopper_adapted(call: Call) -> None:
    ends = (call.end0, call.end1, call.end2, call.outputs)
    call.require(all(end % 32 == 0 for end in ends), "a section ends inside of a batch")
    call.require(call.ready == 0, "this kernel waits for the kernel of the side inputs")
    gemm_hopper(call, SideProduct(call, call.arguments["rows"]).products())


@model
def gemm_hopper(call: Call, side: np.ndarray | None = None) -> None:
    rows, columns, channels = call.arguments["rows"], call.columns, call.channels
    epilogue, width, cluster, parts = (call.number(name) for name in ("EPILOGUE", "BLOCK_N", "CLUSTER", "SPLIT_K"))
    gated = epilogue == GATED
    call.require(call.height % 16 == 0 and call.height <= 128, "height")
    x, w, out = call.mapped("x_map", call.height), call.mapped("w_map", width // 2), call.mapped("out_map", 16)
    call.require(x.shape == (rows, w.shape[1]) and out.shape == (rows, columns), "shapes")
    call.require(w.shape[0] == channels == columns * (1 + gated) and columns % 2 == 0, "channels")
    call.require(call.stages * 128 >= x.shape[1], "stages do not cover the weight's columns")
    covered = call.row_tiles * cluster * call.height >= rows and call.column_tiles * (width // (1 + gated)) >= columns
    blocks, tiles = call.launch.grid[0], call.row_tiles * call.column_tiles
    call.require(covered and call.launch.cluster == cluster * parts and blocks % (cluster * parts) == 0, "no tiles")
    call.require(parts == 1 or (blocks == parts * tiles and call.stages >= parts), "each part has a stage of one tile")
    call.require((call.bias != 0) == bool(call.number("BIAS")), "a bias of its own instantiation")
    acc = (x.astype(np.float64) @ w.T.astype(np.float64)).astype(F32)
    y = call.vector("x_scale", rows, F32)[:, None] * (call.vector("w_scale", channels, F32, 8) * acc)
    y = y if side is None else added(y, side)
    y = y + call.vector("bias", channels, F32, 8) if call.bias else y
    y = y if epilogue == TO_FLOAT else rounded(y)
    if gated:
        y = FUNCTIONS[call.number("ACTIVATION")](y[:, :columns]) * y[:, columns:]
    elif epilogue == ACTIVATED:
        y = FUNCTIONS[call.number("ACTIVATION")](y)
    out[...] = out + y if epilogue == ADD else y


@model
def igemm_dp4a(call: Call) -> None:
    rows, columns, inner = call.arguments["rows"], call.columns, call.vectors * 16
    call.require(call.launch.grid[0] * 64 >= columns and call.launch.grid[1] * 64 >= rows, "blocks are missing")
    for i in range(call.launch.grid[2]):
        w = call.rows("w", columns, inner, inner, np.int8, offset=16 * i * call.w_stride)
        x = call.rows("x", rows, inner, inner, np.int8, offset=16 * i * call.x_stride)
        out = call.rows("out", rows, columns, columns, np.int32, offset=4 * i * call.out_stride)
        out[...] = x.astype(np.float64) @ w.T.astype(np.float64)


# -- between products --------------------------------------------------------------------------------------------------


def product_values(call: Call, rows: int, k: int, order: int, ld: int, vector: int = 8) -> np.ndarray:
    """int32 sums scaled, with bias, fp32 ``[rows, k]``; vectors are read whole."""
    whole, align = up(k, vector), 16 if vector > 1 else 4
    at = offsets(order, rows, whole, ld)
    acc = call.vector("data", int(at.max(initial=-1)) + 1, np.int32, align)[at][:, :k]
    x_scale, w_scale = call.vector("x_scale", rows, F32), call.vector("w_scale", whole, F32, align)[:k]
    y = x_scale[:, None] * (w_scale * acc.astype(F32))
    return y + call.vector("bias", whole, F32, align)[:k] if call.bias else y


@model
def transform(call: Call) -> None:
    rows, k = call.arguments["rows"], call.k
    source, prepare, target = (call.number(name) for name in ("SOURCE", "PREPARE", "TARGET"))
    threads, padded = call.number("THREADS"), up(k, 16)
    call.require(call.launch.block == max(threads, 128), "threads")
    loops = (source, target) == (FROM_HALF, Target.CODES) and loops_over(prepare) and call.number("ROTATED")
    call.require(loops or call.launch.grid[0] * (call.launch.block // threads) >= rows, "blocks are missing")
    call.require(call.number("VECTORS") * threads * 8 >= padded, "the threads do not cover a row")
    if call.number("ROTATED") == Rotated.IN_MEMORY:
        each = bytes_of_a_warp(prepare)
        call.require(call.launch.shared >= call.launch.block // 32 * each, "there is too little shared memory")
    gated = GATE <= prepare < ACTIVATE
    columns = 2 * k if gated else k
    reads = columns if gated and k % 8 else up(columns, 16)
    values = np.zeros((rows, columns), F32)
    if source == FROM_INT32:
        values = rounded(product_values(call, rows, columns, call.number("IN"), call.pitch))
    elif source != NONE:
        dtype = F16 if source == FROM_HALF else F32
        values = call.rows("data", rows, call.pitch, reads, dtype)[:, :columns].astype(F32)
    if prepare in (1, 2):
        residual = call.rows("residual", rows, call.residual_pitch, padded, F32)
        if target == Target.CODES_AND_FLOAT:
            residual = residual.copy()
        if source != NONE:
            residual[:, :k] += values
            residual[:, k:] = 0
        values = normalise(residual[:, :k], norm_of(call, prepare, k, padded))
    elif gated:
        values = rounded(FUNCTIONS[prepare - GATE](values[:, :k]) * values[:, k:])
    elif prepare >= ACTIVATE:
        values = rounded(FUNCTIONS[prepare - ACTIVATE](values))
    unrotated = values
    if call.number("ROTATED"):
        call.require(call.rotation <= 8 * min(threads, 32), "a block lies in more than a warp of neighbouring threads")
        values = rotated(values, call.rotation)
    if target == Target.CODES_AND_HALF:
        call.rows("data", rows, call.pitch, padded, F16)[...] = np.pad(unrotated, ((0, 0), (0, padded - k)))
        if call.x_scale:
            call.vector("x_scale", 1, np.int32)[0] += rows
        target = 0
    if target == Target.CODES_AND_FLOAT:
        call.rows("x_scale", rows, call.residual_pitch, padded, F32)[...] = np.pad(unrotated, ((0, 0), (0, padded - k)))
        target = 0
    write_rows(call, values, padded, target)


def write_rows(call: Call, values: np.ndarray, padded: int, target: int) -> None:
    """Writes rows as codes with scales, as fp16 or as fp32, padding included."""
    rows, k = values.shape
    full = np.zeros((rows, padded), F32)
    full[:, :k] = values
    if target:
        out = call.rows("out", rows, call.out_ld, padded, F16 if target == 1 else F32)
        out[...] = (out + full) * F32(call.rotation_scale) if target == Target.ADD_TO_FLOAT else full
        return
    codes, scale = quantize_rows(full)
    at = offsets(call.number("OUT"), rows, padded, call.out_ld)
    call.vector("out", int(at.max()) + 1, np.int8, 8)[at] = codes
    call.vector("scales", rows, F32)[...] = scale


def write_softmax(call: Call, rows: int) -> None:
    """What both softmax kernels write."""
    k, whole, dtype = call.k, call.number("WHOLE"), F16 if call.template["T"] == "__half" else F32
    call.require(not whole or k % 8 == 0, "rows are not whole vectors")

    def extra(name: str, pitch: int, dtype: type, align: int) -> np.ndarray:
        align = align if whole else 0
        return call.rows(name, rows, pitch, k, dtype, align) if pitch else call.vector(name, k, dtype, align)

    scores = call.rows("x", rows, call.pitch, k, dtype, 16 * whole).astype(F32) * F32(call.scale)
    scores = scores + extra("bias", call.bias_pitch, F32, 16) if call.bias else scores
    mask = extra("mask", call.mask_pitch, np.int8, 8) != 0 if call.mask else None
    call.rows("out", rows, call.out_pitch, k, dtype, 16 * whole)[...] = softmax_of(scores, mask)


@model
def softmax(call: Call) -> None:
    rows, threads, cluster = call.arguments["rows"], call.number("THREADS"), call.number("CLUSTER")
    call.require(call.number("VECTORS") * threads * cluster * 8 >= call.k, "the threads do not cover a row")
    call.require(call.launch.grid[0] // cluster * (call.launch.block // threads) >= rows, "blocks are missing")
    write_softmax(call, rows)


@model
def softmax_two_pass(call: Call) -> None:
    write_softmax(call, call.launch.grid[0])


@model
def norm_multi_pass(call: Call) -> None:
    rows, k, align = call.launch.grid[0], call.k, 16 if call.aligned else 0
    x = call.rows("x", rows, call.pitch, k, F32, align)
    norm = norm_of(call, 2 if call.number("CENTER") else 1, k, up(k, 8))
    call.rows("out", rows, call.out_pitch, k, F32, align)[...] = normalise(x, norm)


@model
def layer_norm_persistent(call: Call) -> None:
    rows, k = call.arguments["rows"], call.k
    call.require(16 * call.number("THREADS") >= k, "the threads do not cover a row")
    call.require(call.launch.grid[0] <= rows, "there are more blocks than rows")
    call.require(bool(call.norm_bias) == call.number("HAS_BIAS"), "a norm_bias is missing, or not expected")
    call.require(
        call.launch.shared >= 4 * up(k, 16) * (2 if call.norm_bias else 1), "there is too little shared memory"
    )
    x = call.rows("x", rows, call.pitch, up(k, 16), F32, 16)[:, :k]
    out = call.rows("out", rows, call.out_pitch, up(k, 16), F32 if call.template["T"] == "float" else F16, 16)
    out[:, :k] = normalise(x, norm_of(call, 2, k, up(k, 16)))


@model
def dequantize(call: Call) -> None:
    rows, n, add = call.arguments["rows"], call.n, call.number("ADD")
    whole = up(n, 8)
    call.require(call.threads >= rows * (whole // 8), "blocks are missing")
    at = offsets(call.number("IN"), rows, whole, call.ld)
    y = call.vector("data", int(at.max()) + 1, np.int32 if call.template["SUM"] == "int" else F32, 16)[at].astype(F32)
    y = call.vector("w_scale", whole, F32, 16) * y if call.w_scale else y
    y = call.vector("x_scale", rows, F32)[:, None] * y if call.x_scale else y
    y = y + call.vector("bias", whole, F32, 16) if call.bias else y
    out = call.rows("out", rows, call.out_pitch, whole, F32 if call.template["T"] == "float" else F16)
    out[...] = out + rounded(y) if add else y


@model
def soft_cap(call: Call) -> None:
    rows, n = call.arguments["rows"], call.n
    call.require(call.threads >= rows * n, "blocks are missing")
    x = call.rows("x", rows, call.pitch, n, F32, align=0)
    x[...] = soft_capped(x, call.cap)


@model
def gate_rows(call: Call) -> None:
    rows, n = call.arguments["rows"], call.n
    call.require(call.threads >= rows * n, "blocks are missing")
    each = call.head_dim if call.number("BY_HEAD") else 1
    x, gate = call.rows("x", rows, call.pitch, n, F16, 2), call.rows("gate", rows, call.gate_pitch, n // each, F16, 2)
    factors = (softplus if call.number("SOFTPLUS") else sigmoid)(gate.astype(F32))
    x[...] = x.astype(F32) * np.repeat(factors, each, axis=1)


@model
def xielu(call: Call) -> None:
    rows, n = call.arguments["rows"], call.n
    call.require(call.threads * 8 >= rows * up(n, 8), "blocks are missing")
    x = call.rows("x", rows, call.pitch, n, F16)
    x[...] = xielu_of(x.astype(F32), Xielu(call.positive, call.negative, call.beta, call.eps))


@model
def layer_inputs(call: Call) -> None:
    tokens, size = call.vector("tokens", call.launch.grid[0], np.int32), call.size
    rows, width = len(tokens), call.layers * size
    call.require(call.launch.grid[1] * call.launch.block >= call.layers * 32, "a warp for each part")
    table = call.rows("table", int(tokens.max()) + 1, call.table_pitch, width, F16, align=0)[tokens].astype(F32)
    x = call.rows("projected", rows, call.pitch, width, F32, align=0).reshape(rows, call.layers, size)
    normed = normalise(x, Norm(call.vector("weight", size, F32), call.eps)).reshape(rows, width)
    out = (normed + table * F32(call.table_scale)) * F32(call.scale)
    call.rows("out", rows, call.out_pitch, width, F16, align=0)[...] = out


@model
def multiply_columns(call: Call) -> None:
    rows, n = call.arguments["rows"], call.n
    call.require(call.threads >= rows * n, "blocks are missing")
    x = call.rows("x", rows, call.pitch, n, F16, align=0)
    inputs = call.rows("inputs", rows, call.inputs_pitch, n, F16, align=0)
    x[...] = x.astype(F32) * inputs.astype(F32)


@model
def pool(call: Call) -> None:
    """The definition's vectors of sequences."""
    count, columns = call.launch.grid[:2]
    call.require(columns * POOLING_COLUMNS >= call.n, "blocks are missing")
    call.require(call.launch.block == POOLING_COLUMNS * POOLING_LANES, "a warp for each lane of the sum")
    cu_seqlens = call.vector("cu_seqlens", count + 1, np.int32)
    skipped = call.vector("skipped", count, np.int32) if call.skipped else np.zeros(count, np.int32)
    x = call.rows("x", int(cu_seqlens[-1]), call.pitch, call.n, F32, align=0)
    out = call.rows("out", count, call.out_pitch, call.n, F32, align=0)
    kind = next(pooling for pooling, number in KINDS.items() if number == call.number("KIND"))
    for b in range(count):
        first = min(cu_seqlens[b] + skipped[b], cu_seqlens[b + 1])
        rows = x[first : cu_seqlens[b + 1]]
        out[b] = pooled(rows, kind, int(skipped[b])) if len(rows) else 0


@model
def add_positions(call: Call) -> None:
    tokens, whole = call.launch.grid[0], up(call.k, 8)
    cu_seqlens, context_lens = (
        call.vector("cu_seqlens", call.sequences + 1, np.int32),
        call.vector("context_lens", call.sequences, np.int32),
    )
    call.require(tokens >= cu_seqlens[-1], "a block for each token")
    tokens = int(cu_seqlens[-1])  # the others pad the step
    positions = np.arange(tokens) - np.repeat(cu_seqlens[:-1] - context_lens, np.diff(cu_seqlens))
    table = call.rows("table", int(positions.max(initial=-1)) + 1, call.pitch, whole, F16)
    call.rows("residual", tokens, call.residual_pitch, whole, F32)[...] += table[positions]


@model
def add_rows(call: Call) -> None:
    tokens, whole = call.launch.grid[0], up(call.k, 8)
    indices = call.vector("indices", tokens, np.int32) if call.indices else np.zeros(tokens, np.int32)
    table = call.rows("table", int(indices.max(initial=0)) + 1, call.pitch, whole, F16)
    call.rows("residual", tokens, call.residual_pitch, whole, F32)[...] += table[indices]


def convolved(call: Call, ring: np.ndarray) -> np.ndarray:
    """The definition's short convolution of a step, with its inputs left in ``ring``."""
    channels, count, blocks = call.channels, call.sequences, call.launch.grid
    width, has_taps, gated = call.number("N"), "taps" in call.arguments, call.number("GATED")
    lengths = [call.vector(name, n, np.int32) for name, n in (("cu_seqlens", count + 1), ("context_lens", count))]
    tokens = call.tokens if has_taps else int(lengths[0][-1])
    own = blocks[0] * (1 if call.number("STORES") else TOKENS_AT_ONCE) if has_taps else blocks[0]
    call.require(own >= (tokens if has_taps else count * call.ring_rows), "blocks are missing")
    call.require(blocks[1] * call.launch.block * width >= channels, "blocks are missing")
    slots = call.rows("slots", count, call.slots_pitch, 1, np.int32, align=4)
    rows = call.rows("rows", tokens, call.pitch, (3 if gated else 1) * channels, F16, 2 * width)
    shape = (call.num_taps, channels) if has_taps else (1, channels)
    taps = call.vector("taps", shape[0] * channels, F32, 4 * width).reshape(shape) if has_taps else np.zeros(shape, F32)
    bias = call.vector("bias", channels, F32, 4 * width) if has_taps and call.bias else None
    batch = ForwardBatch(np.zeros(tokens), *lengths, (slots,), count, 0, 0)
    if not gated:
        return silu(convolution_of(rows, ShortConvolution(taps, bias), ring, slots[:, 0], batch))
    return np.asarray(
        Backend(F16).short_convolution(rows, ShortConvolution(taps, bias), StateCache({"inputs": ring}), batch)
    )


def ring_of(call: Call) -> np.ndarray:
    """The slots up to the last that a step has, ``[slots, rows, channels]``."""
    used = int(call.rows("slots", call.sequences, call.slots_pitch, 1, np.int32, align=4).max(initial=0)) + 1
    shape, size = (used, call.ring_rows, call.channels), call.ring_rows * call.channels
    flat = call.rows("ring", used, call.slot_pitch, size, F16, 2 * call.number("N"))
    return np.lib.stride_tricks.as_strided(flat, shape, (flat.strides[0], 2 * call.channels, 2))


@model
def short_convolution(call: Call) -> None:
    ring = ring_of(call)
    y = convolved(call, ring if call.number("STORES") else ring.copy())
    dtype = F16 if call.number("GATED") else F32
    align = min(16, dtype().itemsize * call.number("N"))
    call.rows("out", len(y), call.out_pitch, call.channels, dtype, align)[...] = y


@model
def store_inputs(call: Call) -> None:
    convolved(call, ring_of(call))


@model
def embed(call: Call) -> None:
    rows, k = call.launch.grid[0], call.k
    tokens = call.vector("tokens", rows, np.int32)
    call.require(tokens.min() >= 0, "negative tokens")
    table = call.rows("table", int(tokens.max()) + 1, call.pitch, up(k, 8), F16)
    call.rows("out", rows, call.out_pitch, up(k, 8), F32)[...] = table[tokens] * np.float32(call.scale)


@model
def norm_qk(call: Call) -> None:
    parts, rows, _ = call.launch.grid
    q, k, v = call.q, call.k, call.v
    covered = call.number("VECTORS") * 8 * call.launch.block
    call.require(parts == 3 and call.launch.block == 512 and max(q, k, v) <= covered, "the threads do not cover a row")
    x = call.rows("data", rows, call.pitch, q + k + v, F32)
    out = call.rows("out", rows, call.out_pitch, q + k + v, F16)
    q_norm = Norm(call.vector("q_weight", q, F32, 16), call.q_eps)
    k_norm = Norm(call.vector("k_weight", k, F32, 16), call.k_eps)
    out[:, :q], out[:, q : q + k] = normalise(x[:, :q], q_norm), normalise(x[:, q : q + k], k_norm)
    out[:, q + k :] = x[:, q + k :]


@model
def gather_rows(call: Call) -> None:
    count, k = call.launch.grid[0], call.k
    rows = call.vector("rows", count, np.int32) - call.before
    x = call.rows("x", int(rows.max()) + 1, call.pitch, up(k, 8), F32)
    call.rows("out", count, call.out_pitch, up(k, 8), F32)[...] = x[rows]


@model
def fill_random(call: Call) -> None:
    shape = call.arguments["rows"], call.columns
    dtype = np.int8 if call.template["T"] == "bminf::int8" else F16
    call.require(call.threads >= shape[0] * -(-shape[1] // 8), "blocks are missing")
    call.rows("out", shape[0], call.pitch, shape[1], dtype, align=0)[...] = np.asarray(
        RandomMatrix(shape, dtype, call.seed, call.row_words, call.unit)
    )


FLOATS = {"__half": np.dtype(F16), "float": np.dtype(F32), "bf16": np.dtype(ml_dtypes.bfloat16)}


@model
def to_half(call: Call) -> None:
    rows = call.launch.grid[0]
    values = call.rows("w", rows, call.k, call.k, FLOATS[call.template["T"]], align=0)
    call.rows("out", rows, call.pitch, call.k, F16, align=0)[...] = values


@model
def write_words(call: Call) -> None:
    call.require(call.threads >= call.count, "blocks are missing")
    source, target = (call.vector(name, call.count, np.int32, 4) for name in ("from", "to"))
    target[...] = source
