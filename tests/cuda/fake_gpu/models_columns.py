"""What the kernels for outlier columns do."""

from __future__ import annotations

from typing import Any

import numpy as np

from .launching import Call, model
from .models_rows import F16, F32, up


def kind(call: Call) -> Any:
    return F16 if call.template["T"] == "__half" else F32


@model
def split_columns(call: Call) -> None:
    rows, whole, columns = call.launch.grid[0], up(call.k, 8), call.columns
    x = call.rows("x", rows, call.pitch, whole, kind(call))
    index = call.vector("index", columns, np.int32)
    rest = call.rows("rest", rows, call.rest_pitch, whole, kind(call))
    rest[...] = x
    rest[:, index] = 0
    call.rows("kept", rows, columns, columns, F16, align=0)[...] = x[:, index]


@model
def add_columns(call: Call) -> None:
    rows, n, columns = call.launch.grid[0], call.n, call.columns
    call.require(call.launch.grid[1] * call.launch.block >= n, "blocks are missing")
    call.require(call.launch.shared >= 4 * columns, "too little shared memory")
    sums = call.rows("sums", rows, call.sums_pitch, n, F32, align=0)
    kept = call.rows("kept", rows, columns, columns, F16, align=0).astype(F32)
    y = sums + kept @ call.rows("weight", columns, call.pitch, n, F16, align=0).astype(F32)
    out = call.rows("out", rows, call.out_pitch, n, kind(call), align=0)
    out[...] = y + call.vector("bias", n, F32) if call.bias else y
