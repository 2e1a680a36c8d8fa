"""What the kernels of a calibration's trials do."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from bminf_lite.backend.quantization import exact_scales, fits_fp16

from .launching import Call, model
from .models_rows import F16, F32

KINDS = {"__half": np.dtype(F16), "float": np.dtype(F32), "bf16": np.dtype(ml_dtypes.bfloat16)}
THREADS, STRIP = 256, 64


def matrix(call: Call, rows: int) -> np.ndarray:
    """A dense matrix times its factors, fp32."""
    call.require(call.launch.block == THREADS, "threads")
    values = call.rows("w", rows, call.k, call.k, KINDS[call.template["T"]], align=0).astype(F32)
    return values * call.vector("factors", call.k, F32) if call.arguments.get("factors") else values


@model
def row_absmax(call: Call) -> None:
    rows = call.launch.grid[0]
    top = np.abs(matrix(call, rows)).max(axis=1)
    call.vector("top", rows, F32)[...] = top
    if not fits_fp16(exact_scales(top)):
        call.vector("fp32_scales", 1, np.int32)[...] = 1


@model
def row_codes(call: Call) -> None:
    rows = call.launch.grid[0]
    scale = exact_scales(call.vector("top", rows, F32))
    if not call.vector("fp32_scales", 1, np.int32)[0]:
        scale = scale.astype(F16).astype(F32)
    call.vector("scales", rows, F32)[...] = scale
    codes = np.clip(np.rint(matrix(call, rows) / scale[:, None]), -127, 127)
    call.rows("codes", rows, call.pitch, call.k, np.int8, align=0)[...] = codes


@model
def column_absmax(call: Call) -> None:
    rows, k = call.arguments["rows"], call.k
    call.require(call.threads >= k and call.launch.grid[1] * STRIP >= rows, "blocks are missing")
    x = call.rows("x", rows, call.pitch, k, KINDS[call.template["T"]], align=0).astype(F32)
    if call.divisors:
        divisors = call.vector("divisors", rows, F32)
        x = x / np.where(divisors > 0, divisors, F32(1))[:, None]
    top = call.vector("top", k, F32)
    top[...] = np.maximum(top, np.abs(x).max(axis=0))


@model
def take_columns(call: Call) -> None:
    n, columns = call.n, call.launch.grid[1]
    call.require(call.threads >= n, "blocks are missing")
    index = call.vector("index", columns, np.int32)
    call.rows("out", columns, call.pitch, n, F16, align=0)[...] = matrix(call, n)[:, index].T


@model
def to_half(call: Call) -> None:
    rows = call.launch.grid[0]
    call.rows("out", rows, call.pitch, call.k, F16, align=0)[...] = matrix(call, rows)


@model
def take_rows(call: Call) -> None:
    count, k = call.launch.grid[0], call.k
    index = call.vector("index", count, np.int32)
    x = call.rows("x", int(index.max()) + 1, call.pitch, k, KINDS[call.template["T"]], align=0)
    call.rows("out", count, call.out_pitch, k, F32, align=0)[...] = x[index]


@model
def divide_rows(call: Call) -> None:
    rows, k = call.launch.grid[0], call.k
    x = call.rows("x", rows, call.pitch, k, F32, align=0)
    x = x / call.vector("factors", k, F32) if call.factors else x
    call.rows("out", rows, call.out_pitch, k, F16, align=0)[...] = x


@model
def row_squares(call: Call) -> None:
    rows, n = call.arguments["rows"], call.n
    expected = call.rows("expected", rows, call.pitch, n, F32, align=0)
    difference = call.rows("got", rows, call.got_pitch, n, F32, align=0) - expected
    squares = call.rows("squares", 2, rows, rows, np.float64, align=0)
    for place, x in zip(squares, (difference, expected), strict=True):
        place[...] = np.einsum("ij,ij->i", x, x, dtype=np.float64)
