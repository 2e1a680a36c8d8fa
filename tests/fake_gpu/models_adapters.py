"""Models of ``rowwise/adapters.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bminf_lite.backend.functions import product_by_row
from bminf_lite.backend.quantization import quantize_rows
from bminf_lite.backend.side_products import added

from .launching import Call, model

F32, HALF = np.float32, np.float16
TYPES = {"float": F32, "__half": HALF}


@dataclass
class Slot:
    """An adapter in a slot of a weight: ``down`` ``[sections, rank, k]``, ``up`` ``[outputs, rank]``, fp32."""

    scales: np.ndarray
    down: np.ndarray
    up: np.ndarray


class SideProduct:
    """The parameters of a side product, see ``common/adapters.cuh``."""

    def __init__(self, call: Call, rows: int):
        self.call = call
        self.slots = call.vector("slots", rows, np.int32)
        self.inputs = call.rows("inputs", rows, call.input_columns, call.input_columns, HALF, align=8)
        self.outputs, self.rank = call.outputs, call.rank_pitch
        call.require(call.rank_pitch % 16 == 0 and call.down_pitch % 32 == 0 and call.adapter_stride % 64 == 0, "sizes")
        call.require(call.input_columns == call.sections * call.rank_pitch, "columns of the inputs")
        ends = (call.end0, call.end1, call.end2)
        self.section = sum((np.arange(self.outputs) >= end).astype(int) for end in ends)
        call.require(self.section.max(initial=0) < call.sections, "an output belongs to no section")

    def slot(self, number: int) -> Slot | None:
        """None for an empty slot."""
        call, at = self.call, (number - 1) * self.call.adapter_stride
        rank = int(call.vector("adapters", 1, np.int32, offset=at)[0])
        if rank == 0:
            return None
        call.require(rank % 16 == 0 and rank <= self.rank, "a rank")
        sections, pitch = call.sections, call.down_pitch
        scales = call.vector("adapters", sections * rank, F32, offset=at + 128).reshape(sections, rank)
        at += 128 + scales.nbytes
        down = call.vector("adapters", sections * rank * pitch, HALF, 16, offset=at).reshape(sections, rank, pitch)
        up = call.vector("adapters", self.outputs * rank, HALF, 8, offset=at + down.nbytes).reshape(self.outputs, rank)
        return Slot(scales, down.astype(F32), up.astype(F32))

    def used(self) -> Iterator[tuple[np.ndarray, Slot]]:
        """The rows of each slot that is not empty."""
        for number in np.unique(self.slots[self.slots > 0]):
            if (slot := self.slot(number)) is not None:
                yield np.flatnonzero(self.slots == number), slot

    def products(self) -> np.ndarray:
        """What is added, fp32 ``[rows, outputs]``."""
        found = np.zeros((len(self.slots), self.outputs), F32)
        for own, slot in self.used():
            for section in range(self.call.sections):
                of, first = np.flatnonzero(self.section == section), section * self.rank
                part, sums = self.inputs[own, first : first + slot.up.shape[1]], np.zeros((len(own), len(of)), F32)
                for at in range(0, slot.up.shape[1], 16):  # as ptx.py computes a product of matrices
                    ranks = slice(at, at + 16)
                    sums = (sums + part[:, ranks].astype(np.float64) @ slot.up[of, ranks].T).astype(F32)
                found[np.ix_(own, of)] = sums
        return found


@model
def shrink_rows(call: Call) -> None:
    wide, high, deep = call.launch.grid
    cluster = call.number("CLUSTER")
    call.require(wide * 16 == call.input_columns * cluster and high * 64 >= call.arguments["rows"] and deep, "blocks")
    call.require(call.launch.block == 256 and (call.launch.cluster or 1) == cluster, "threads")
    write_inputs(call)


@model
def shrink_many_rows(call: Call) -> None:
    groups, cluster = (call.number(name) for name in ("GROUPS", "CLUSTER"))
    wide, high, deep = call.launch.grid
    blocks = wide * 16 * groups == call.input_columns * cluster and high * 64 >= call.arguments["rows"] and deep
    call.require(blocks, "blocks are missing")
    call.require(call.launch.block == 128 and (call.launch.cluster or 1) == cluster, "threads")
    part = 16 * groups * (-(-call.k // 256) | 1) * 64
    call.require(call.launch.shared >= 32 * 1024 + 64 * (16 * groups + 8) * 4 + part, "too little shared memory")
    write_inputs(call)


@model
def shrink_rows_and_quantize(call: Call) -> None:
    wide, high, deep = call.launch.grid
    rows, shrinking = call.arguments["rows"], call.shrinking
    call.require(wide * 16 == call.input_columns * call.number("CLUSTER") and high == 1 and shrinking, "blocks")
    call.require((deep - shrinking) * wide >= rows and call.k <= 16384, "blocks for all rows")
    call.require(call.launch.block == 256 and (call.launch.cluster or 1) == call.number("CLUSTER"), "threads")
    write_inputs(call)
    write_codes(call)


def write_codes(call: Call) -> None:
    rows, padded = call.arguments["rows"], -(-call.k // 16) * 16
    x = np.zeros((rows, padded), F32)
    x[:, : call.k] = call.rows("x", rows, call.x_pitch, call.k, HALF)
    codes, scales = quantize_rows(x)
    call.rows("codes", rows, call.codes_pitch, padded, np.int8, align=8)[...] = codes
    call.vector("scales", rows, F32)[...] = scales


def write_inputs(call: Call) -> None:
    rows, k, side = call.arguments["rows"], call.k, SideProduct(call, call.arguments["rows"])
    x = call.rows("x", rows, call.x_pitch, k, HALF).astype(F32)
    for own, slot in side.used():
        call.require(not slot.down[..., k:].any(), "the padding of down is not zero")
        for section, (scales, down) in enumerate(zip(slot.scales, slot.down, strict=True)):
            first = section * side.rank
            side.inputs[own, first : first + len(down)] = scales * product_by_row(x[own], down[:, :k].T)
    if call.ready:
        call.vector("ready", 1, np.int32)[0] += rows


@model
def expand_rows(call: Call) -> None:
    rows = call.arguments["rows"]
    side = SideProduct(call, rows)
    n = side.outputs
    call.require(call.launch.grid[0] * 128 >= n and call.launch.grid[1] * 8 >= rows, "blocks are missing")
    y = added(call.rows("sums", rows, call.sums_pitch, n, F32, align=0), side.products())
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
