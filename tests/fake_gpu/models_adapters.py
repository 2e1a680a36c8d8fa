"""Models of ``rowwise/adapters.cu``."""

from __future__ import annotations

import numpy as np

from bminf_lite.backend.functions import product_by_row
from bminf_lite.backend.side_products import added

from .launching import Call, model

F32, HALF = np.float32, np.float16
TYPES = {"float": F32, "__half": HALF}


def slots_of(call: Call, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The slot of each row, and the ranks of all slots that occur."""
    slots = call.vector("slots", rows, np.int32)
    return slots, call.vector("ranks", max(int(slots.max(initial=0)), 1), np.int32)


@model
def shrink_rows(call: Call) -> None:
    rows, k, columns, pitch = call.arguments["rows"], call.k, call.columns, call.pitch
    tile = 8 * call.number("TILES")
    wide, high, deep = call.launch.grid
    call.require(wide * 16 == columns and high * tile >= rows and deep >= min(rows, tile), "blocks are missing")
    call.require(call.launch.block == 256 and call.rank_pitch % 16 == 0 and pitch % 32 == 0, "sizes")
    slots, ranks = slots_of(call, rows)
    x = call.rows("x", rows, call.x_pitch, k, HALF).astype(F32)
    down = call.rows("down", len(ranks) * columns, pitch, pitch, HALF).astype(F32).reshape(len(ranks), columns, pitch)
    scales = call.rows("scales", len(ranks), columns, columns, F32, align=0)
    out = call.rows("inputs", rows, columns, columns, HALF)
    for slot in np.unique(slots[slots > 0]):
        own = np.flatnonzero(slots == slot)
        used = np.arange(columns) // 16 * 16 % call.rank_pitch < ranks[slot - 1]
        call.require(not down[slot - 1][:, k:].any(), "the padding of down is not zero")
        found = scales[slot - 1] * product_by_row(x[own], down[slot - 1][:, :k].T)
        out[np.ix_(own, used)] = found.astype(HALF)[:, used]


@model
def expand_rows(call: Call) -> None:
    rows, n, columns, rank = call.arguments["rows"], call.n, call.columns, call.rank_pitch
    call.require(call.launch.grid[0] * 128 >= n and call.launch.grid[1] * 8 >= rows, "blocks are missing")
    slots, ranks = slots_of(call, rows)
    inputs = call.rows("inputs", rows, columns, columns, HALF)
    up = call.rows("up", len(ranks) * rank, call.up_pitch, n, HALF, align=0).astype(F32).reshape(len(ranks), rank, n)
    products = np.zeros((rows, n), F32)
    section = sum((np.arange(n) >= end).astype(int) for end in (call.end0, call.end1, call.end2))
    for slot in np.unique(slots[slots > 0]):
        own, used = np.flatnonzero(slots == slot), -(-int(ranks[slot - 1]) // 8) * 8
        for place in range(columns // rank):
            of = np.flatnonzero(section == place)
            part = inputs[own, place * rank : place * rank + used].astype(F32)
            products[np.ix_(own, of)] = product_by_row(part, up[slot - 1, :used][:, of])
    y = added(call.rows("sums", rows, call.sums_pitch, n, F32, align=0), products)
    y = y + call.vector("bias", n, F32) if call.bias else y
    call.rows("out", rows, call.out_pitch, n, TYPES[call.template["T"]], align=0)[...] = y


@model
def saved_products(call: Call) -> None:
    rows, n, k, pitch = call.arguments["rows"], call.n, call.k, call.pitch
    call.require(call.launch.grid[0] * 8 >= n and call.launch.grid[1] * 8 >= rows, "blocks are missing")
    slots = call.vector("slots", rows, np.int32)
    count = max(int(slots.max(initial=0)), 1)
    present = call.vector("present", count, np.int32)
    x = call.rows("x", rows, call.x_pitch, k, HALF).astype(F32)
    matrices = call.rows("matrices", count * n, pitch, k, HALF).astype(F32).reshape(count, n, k)
    y = call.rows("y", rows, call.y_pitch, n, F32, align=0)
    for row in np.flatnonzero(slots > 0):
        if present[slots[row] - 1]:
            y[row] = product_by_row(x[row : row + 1], matrices[slots[row] - 1].T)[0]


@model
def saved_embed(call: Call) -> None:
    rows, features = call.launch.grid[0], call.features
    slots, tokens = (call.vector(name, rows, np.int32) for name in ("slots", "tokens"))
    count = max(int(slots.max(initial=0)), 1)
    present = call.vector("present", count, np.int32)
    tables = call.rows("tables", count * call.vocab, call.pitch, features, HALF, align=0)
    residual = call.rows("residual", rows, call.residual_pitch, features, F32, align=0)
    for row in np.flatnonzero(slots > 0):
        if present[slots[row] - 1]:
            place = (slots[row] - 1) * call.vocab + tokens[row]
            residual[row] = tables[place].astype(F32) * F32(call.scale)
