"""Products with float activations. Sums are fp64 and rounded once, so they hardly depend on the shape."""

from __future__ import annotations

import numpy as np

from bminf_lite.backend.functions import normalise
from bminf_lite.cuda.kernels.constants import FLOAT_GEMM_CHANNELS, FLOAT_GEMM_CHUNK, SKINNY_FLOAT_BOXES, GemvInput

from .launching import Call, model
from .models_rows import F16, F32, GATED, norm_of, rounded, up, write_outputs

TYPES = {"bminf::int8": np.int8, "__half": F16, "float": F32}


def product(call: Call, x: np.ndarray, w: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """``x @ w.T`` with its scales and its bias, fp32. ``scale``: those of groups ``[groups, n]``, or of channels."""
    n, group = len(w), call.number("GROUP")
    x, w = x.astype(np.float64), w.astype(np.float64)
    if group:
        assert scale is not None
        y = np.zeros((len(x), n), F32)
        for i, of_group in enumerate(scale.astype(F32)):
            columns = slice(i * group, (i + 1) * group)
            y = (of_group * (x[:, columns] @ w[:, columns].T).astype(F32).astype(np.float64) + y).astype(F32)
    else:
        y = (x @ w.T).astype(F32)
        call.require((scale is None) == (call.template["W"] == "__half"), "scales belong to int8")
        y = y if scale is None else scale * y
    return y + call.vector("bias", n, F32) if call.bias else y


def mapped_weight(call: Call, columns: int, channels: int) -> np.ndarray:
    """The weight ``[n, k]``; of a gated layer its map has gate and up by eight rows."""
    if call.number("EPILOGUE") != GATED:
        return call.mapped("w_map", channels)
    parts = call.mapped("w_map", channels // 16, 2, 8)
    k = parts.shape[-1]
    return np.concatenate([parts[:, i].reshape(-1, k)[: call.n // 2] for i in range(2)])


def mapped_scale(call: Call, channels: int, groups: int) -> np.ndarray | None:
    if call.number("GROUP"):
        return call.mapped("scale_map", groups)
    return call.vector("w_scale", call.n, F32) if call.template["W"] == "bminf::int8" else None


@model
def skinny_float_gemm_hopper(call: Call) -> None:
    rows, n, k, stages, steps = (call.arguments[name] for name in ("rows", "n", "k", "stages", "steps"))
    sync, most, itemsize = call.number("SYNC"), call.number("ROWS"), np.dtype(TYPES[call.template["W"]]).itemsize
    columns, matrices = SKINNY_FLOAT_BOXES * 128 // itemsize, 2 if call.number("EPILOGUE") == GATED else 1
    call.require(rows <= most and (not sync or most == 16 or rows <= 8), "rows")
    call.require(call.channels % 16 == 0 and call.channels <= (128 if sync else 64), "channels")
    call.require(call.tiles * call.channels >= n and steps * columns >= k, "tiles or steps are missing")
    kind, blocks = call.number("INPUT"), steps * columns // 64
    if kind == GemvInput.HALF:
        x = call.mapped("x_map", call.in_copy, rows)
        x = x.transpose(1, 0, 2).reshape(rows, -1)
        call.require(x.shape[1] == k, "columns of the input")
    else:
        call.require(rows == 1 and call.resident and call.number("VECTORS") * 256 * 8 >= blocks * 64, "a norm of a row")
        source = call.rows("x", 1, 0, up(k, 8), F32)[:, :k]
        x = rounded(normalise(source, norm_of(call, kind, k, up(k, 8))))
    warps = 8 if kind != GemvInput.HALF else call.channels // 16 if sync else 4
    call.require(call.launch.block == 32 * (warps + 2), "threads")
    kept = blocks * rows * 128 if call.resident else stages * columns * rows * 2
    needed = 1024 + stages * SKINNY_FLOAT_BOXES * call.channels * 128 + kept
    call.require(stages >= max(2, call.window) and call.launch.shared >= needed, "too little shared memory")
    group = call.number("GROUP")
    w = mapped_weight(call, columns, call.channels)
    scale = mapped_scale(call, call.channels // matrices, columns // group if group else 0)
    write_outputs(call, product(call, x, w, scale), call.out_pitch)


@model
def float_gemm_hopper(call: Call) -> None:
    rows, n, height, cluster = call.arguments["rows"], call.n, call.number("N"), call.number("CLUSTER")
    epilogue, group = call.number("EPILOGUE"), call.number("GROUP")
    gated, channels = epilogue == GATED, FLOAT_GEMM_CHANNELS
    x = call.mapped("x_map", height // cluster)
    w = mapped_weight(call, 64, channels)
    scale = mapped_scale(call, channels // (1 + gated), max(1, 64 // group) if group else 0)
    out = call.mapped("out_map", FLOAT_GEMM_CHUNK)
    call.require(x.shape == (rows, w.shape[1]) and w.shape[0] == n and out.shape == (rows, n // (1 + gated)), "shapes")
    call.require(call.steps * 64 >= call.k_all == x.shape[1], "steps do not cover the columns")
    covered = call.row_tiles * height >= rows and call.channel_tiles * cluster * channels >= n
    call.require(covered and call.launch.grid[0] % cluster == 0 and call.launch.cluster in (cluster, None), "tiles")
    itemsize = np.dtype(TYPES[call.template["W"]]).itemsize
    needed = call.stages * (height * 128 + channels * 64 * itemsize + 16) + 4 * 32 * 64
    call.require(call.stages >= 2 and call.launch.shared >= needed, "too little shared memory")
    write_outputs(call, product(call, x, w, scale), 0, out)


@model
def float_gemm(call: Call) -> None:
    rows, n, k, group = call.arguments["rows"], call.n, call.k, call.number("GROUP")
    warps_m, warps_n, m, tiles, blocks = (call.number(name) for name in ("WARPS_M", "WARPS_N", "MT", "NT", "BLOCKS"))
    itemsize = np.dtype(TYPES[call.template["W"]]).itemsize
    height, channels = warps_n * tiles * 8, warps_m * m * 16
    grid = call.launch.grid
    call.require(grid[0] * height >= rows and grid[1] * channels >= n, "tiles are missing")
    call.require(call.launch.block == 32 * warps_m * warps_n, "threads")
    needed = call.number("STAGES") * blocks * 64 * (channels * itemsize + height * 2)
    call.require(call.launch.shared >= needed, "too little shared memory")
    x = call.rows("x", rows, call.x_pitch, k, F16)
    w = call.rows("w", n, call.pitch, call.pitch, TYPES[call.template["W"]])[:, :k]
    scale = None
    if group:
        scale = call.rows("w_scale", -(-k // group), call.scale_pitch, n, TYPES[call.template["S"]])
    elif itemsize == 1:
        scale = call.vector("w_scale", n, F32)
    write_outputs(call, product(call, x, w, scale), call.out_pitch)
