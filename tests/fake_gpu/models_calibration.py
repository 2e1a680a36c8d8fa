"""What the kernels of a calibration and of GPTQ do."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from bminf_lite.backend.gptq import round_block
from bminf_lite.backend.quantization import CODE_MAX, exact_scales, fits_fp16
from bminf_lite.backend.rotation import rotated
from bminf_lite.backend.side_products import added
from bminf_lite.cuda.kernels.constants import GPTQ_BLOCK, GPTQ_ROOT_BLOCK

from .launching import Call, model

F32 = np.float32
TYPES = {"__half": np.float16, "bf16": ml_dtypes.bfloat16, "float": F32}


def matrix(call: Call, rows: int, name: str = "w") -> np.ndarray:
    """A dense matrix of the template's type, fp32 ``[rows, k]``, times the factors if there are any."""
    values = call.rows(name, rows, call.k, call.k, TYPES[call.template["T"]], align=0).astype(F32)
    has_factors = "factors" in call.arguments and call.factors
    return values * call.vector("factors", call.k, F32) if has_factors else values


def rows_of(call: Call) -> int:
    """The rows of a matrix whose rows have a block each."""
    return int(call.launch.grid[0])


@model
def rotate_rows(call: Call) -> None:
    rows = rows_of(call)
    call.rows("out", rows, call.k, call.k, F32, align=0)[...] = rotated(matrix(call, rows), call.rotation)


@model
def row_absmax(call: Call) -> None:
    top = np.abs(matrix(call, rows_of(call))).max(axis=1)
    call.vector("top", len(top), F32)[...] = top
    if not fits_fp16(exact_scales(top)):
        call.vector("fp32_scales", 1, np.int32)[...] = 1


@model
def row_codes(call: Call) -> None:
    rows = rows_of(call)
    scale = exact_scales(call.vector("top", rows, F32))
    if not call.vector("fp32_scales", 1, np.int32)[0]:
        scale = scale.astype(np.float16).astype(F32)
    call.vector("scales", rows, F32)[...] = scale
    codes = np.clip(np.rint(matrix(call, rows) / scale[:, None]), -CODE_MAX, CODE_MAX)
    call.rows("codes", rows, call.pitch, call.k, np.int8, align=0)[...] = codes


@model
def column_absmax(call: Call) -> None:
    x = call.rows("x", call.arguments["rows"], call.pitch, call.k, TYPES[call.template["T"]], align=0).astype(F32)
    if call.divisors:
        divisors = call.vector("divisors", call.arguments["rows"], F32)[:, None]
        x = x / np.where(divisors > 0, divisors, F32(1))
    top = call.vector("top", call.k, F32)
    top[...] = np.maximum(top, np.abs(x).max(axis=0))


@model
def take_columns(call: Call) -> None:
    columns = call.launch.grid[1]
    index = call.vector("index", columns, np.int32)
    values = matrix(call, call.n)[:, index].T
    call.rows("out", columns, call.pitch, call.n, np.float16, align=0)[...] = values


@model
def to_half(call: Call) -> None:
    rows = rows_of(call)
    call.rows("out", rows, call.pitch, call.k, np.float16, align=0)[...] = matrix(call, rows)


@model
def take_rows(call: Call) -> None:
    count = rows_of(call)
    index = call.vector("index", count, np.int32)
    x = call.rows("x", int(index.max()) + 1, call.pitch, call.k, TYPES[call.template["T"]], align=0)
    call.rows("out", count, call.out_pitch, call.k, F32, align=0)[...] = x[index]


@model
def divide_rows(call: Call) -> None:
    x = call.rows("x", rows_of(call), call.pitch, call.k, F32, align=0)
    factors = call.vector("factors", call.k, F32) if call.factors else F32(1)
    call.rows("out", len(x), call.out_pitch, call.k, np.float16, align=0)[...] = x / factors


@model
def row_squares(call: Call) -> None:
    rows = rows_of(call)
    got = call.rows("got", rows, call.got_pitch, call.n, F32, align=0)
    expected = call.rows("expected", rows, call.pitch, call.n, F32, align=0)
    squares = call.rows("squares", 2, rows, rows, np.float64, align=0)
    squares[...] = [np.square(x, dtype=np.float64).sum(axis=1) for x in (got - expected, expected)]


@model
def gather_square(call: Call) -> None:
    k = call.k
    index = call.vector("index", k, np.int32)
    found = call.rows("a", k, k, k, F32, align=0)[np.ix_(index, index)]
    out = call.rows("out", k, k, k, F32, align=0)
    out[...] = found + call.damping * np.eye(k, dtype=F32)


@model
def cholesky_block(call: Call) -> None:
    n = call.n
    call.require(n <= GPTQ_ROOT_BLOCK, "the block is too large")
    a = call.rows("a", n, call.pitch, n, F32, align=0)
    lower = np.tril(a).astype(np.float64)
    root = np.linalg.cholesky(lower + np.tril(lower, -1).T)
    call.require(bool((np.diagonal(root) ** 2 >= 0.99 * call.smallest).all()), "a pivot is below the damping")
    a[...] = root
    call.rows("inverse", n, n, n, F32, align=0)[...] = np.tril(np.linalg.inv(root))


@model
def gptq_ratios(call: Call) -> None:
    rows, k = rows_of(call), call.k
    order, scale = call.vector("order", k, np.int32), call.vector("scale", rows, F32)
    call.rows("rest", rows, k, k, F32, align=0)[...] = matrix(call, rows)[:, order] / scale[:, None]


@model
def gptq_round(call: Call) -> None:
    n, k, start, count = call.n, call.k, call.start, call.count
    warps = call.launch.block // 32
    call.require(count <= GPTQ_BLOCK and start + count <= k and rows_of(call) * warps >= n, "sizes")
    columns = slice(start, start + count)
    rest = call.rows("rest", n, k, k, F32, align=0)[:, columns].copy()
    root = call.rows("root", k, k, k, F32, align=0)[columns, columns]
    order = call.vector("order", k, np.int32)[columns]
    codes, errors = round_block(rest, root)
    call.rows("codes", n, call.pitch, k, np.int8, align=0)[:, order] = codes
    call.rows("errors", n, count, count, F32, align=0)[...] = errors


@model
def split_columns(call: Call) -> None:
    rows, dtype = rows_of(call), TYPES[call.template["T"]]
    x, index = call.rows("x", rows, call.pitch, call.k, dtype), call.vector("index", call.columns, np.int32)
    call.rows("kept", rows, call.columns, call.columns, np.float16, align=0)[...] = x[:, index]
    rest = call.rows("rest", rows, call.rest_pitch, call.k, dtype)
    rest[...] = x
    rest[:, index] = 0


@model
def add_side_product(call: Call) -> None:
    rows, n, columns = rows_of(call), call.n, call.columns
    call.require(call.launch.shared >= 4 * columns, "too little shared memory")
    call.require(call.launch.grid[1] * call.launch.block >= n, "blocks are missing")
    inputs = call.rows("inputs", rows, call.inputs_pitch, columns, np.float16, align=0).astype(F32)
    weight = call.rows("weight", columns, call.pitch, n, np.float16, align=0).astype(F32)
    y = added(call.rows("sums", rows, call.sums_pitch, n, F32, align=0), inputs @ weight)
    y = y + call.vector("bias", n, F32) if call.bias else y
    call.rows("out", rows, call.out_pitch, n, TYPES[call.template["T"]], align=0)[...] = y
