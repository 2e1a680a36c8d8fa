"""Models of ``experts/adapters.cu``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bminf_lite.backend.functions import product_by_row
from bminf_lite.cuda.kernels.constants import EXPERT_FLOAT_THREADS, Epilogue

from .launching import Call, model
from .models_adapters import F32, HALF, Slot
from .models_experts import epilogue, product, sorted_experts, weights_of
from .models_rows import up


class PairSide:
    """The parameters of a side product of sorted pairs, see ``experts/adapters.cu``."""

    def __init__(self, call: Call, pairs: int):
        self.call = call
        self.order = call.vector("order", pairs, np.int32)
        self.tokens = self.order // call.top_k
        self.slots = call.vector("lora_ids", int(self.tokens.max()) + 1, np.int32)[self.tokens]
        columns = call.sections * call.rank_pitch
        self.inputs = call.rows("inputs", pairs, columns, columns, HALF).reshape(pairs, call.sections, call.rank_pitch)
        call.require(call.rank_pitch % 16 == 0 and call.down_pitch % 32 == 0 and call.adapter_stride % 64 == 0, "sizes")

    def slot(self, number: int, expert: int) -> Slot | None:
        """The adapter of an expert; None in an empty slot."""
        call, at = self.call, (int(number) - 1) * self.call.adapter_stride
        rank = int(call.vector("adapters", 1, np.int32, offset=at)[0])
        if rank == 0:
            return None
        call.require(rank % 16 == 0 and rank <= call.rank_pitch, "a rank")
        sections, pitch, width = call.sections, call.down_pitch, call.width
        at += 128 + int(expert) * sections * rank * (4 + 2 * (pitch + width))
        scales = call.vector("adapters", sections * rank, F32, offset=at).reshape(sections, rank)
        at += scales.nbytes
        down = call.vector("adapters", sections * rank * pitch, HALF, 16, offset=at).reshape(sections, rank, pitch)
        up = call.vector("adapters", sections * width * rank, HALF, 16, offset=at + down.nbytes)
        return Slot(scales, down.astype(F32), up.reshape(sections, width, rank).astype(F32))

    def used(self, experts: np.ndarray) -> Iterator[tuple[np.ndarray, Slot]]:
        """The pairs of each adapter that is used, of pairs with these experts."""
        for number, expert in np.unique(np.stack([self.slots, experts], axis=1), axis=0):
            if number > 0 and (slot := self.slot(number, expert)) is not None:
                yield np.flatnonzero((self.slots == number) & (experts == expert)), slot


@model
def shrink_pairs(call: Call) -> None:
    pairs, k = call.launch.grid[0], call.k
    side = PairSide(call, pairs)
    covered = call.launch.grid[1] * EXPERT_FLOAT_THREADS // 32 >= call.sections * call.rank_pitch
    call.require(covered and call.launch.block == EXPERT_FLOAT_THREADS, "threads or blocks")
    experts = call.vector("topk_ids", pairs, np.int32)[side.order]
    rows = np.arange(pairs) if call.number("BY_PAIR") else side.tokens
    x = call.rows("x", int(rows.max()) + 1, call.x_pitch, k, HALF)[rows].astype(F32)
    if call.factors:
        x = (x * call.vector("factors", pairs, F32)[side.order][:, None]).astype(HALF).astype(F32)
    for own, slot in side.used(experts):
        call.require(not slot.down[..., k:].any(), "the padding of down is not zero")
        for section, (scales, down) in enumerate(zip(slot.scales, slot.down, strict=True)):
            side.inputs[own, section, : len(down)] = scales * product_by_row(x[own], down[:, :k].T)


@model
def expand_pairs(call: Call) -> None:
    experts, k = sorted_experts(call, call.experts), call.k
    side, codes = PairSide(call, len(experts)), call.template["X"] == "bminf::int8"
    call.require(call.launch.block == EXPERT_FLOAT_THREADS, "threads")
    of_codes = call.template["W"] == "bminf::int8"
    call.require((call.w_scale != 0) == of_codes and (call.x_scale != 0) == codes, "scales belong to int8")
    rows = np.arange(len(experts)) if call.number("BY_PAIR") else side.tokens
    x = call.rows("x", int(rows.max()) + 1, call.x_pitch, k if codes else up(k, 8), np.int8 if codes else HALF)[:, :k]
    weight = weights_of(call, call.experts, call.n, np.int8 if of_codes else HALF, experts)[..., :k]
    factors = call.vector("x_scale", len(experts), F32) if codes else None
    kind = call.number("EPILOGUE")
    halves = 2 if kind == Epilogue.GATED else 1
    call.require(halves == call.sections and call.width <= call.n // halves, "sections")
    added_to = np.zeros((len(experts), halves, call.n // halves), F32)
    adapted = np.zeros(len(experts), bool)
    for own, slot in side.used(experts):
        adapted[own] = True
        for section, values in enumerate(slot.up):
            part = side.inputs[own, section, : values.shape[1]].astype(F32)
            added_to[own, section, : call.width] = product_by_row(part, values.T)
    if halves == 2:  # as the rows of the weight alternate
        added_to = added_to.reshape(len(experts), 2, -1, 8).swapaxes(1, 2)
    added_to = added_to.reshape(len(experts), call.n)
    y = product(call, x[rows], experts, weight, factors, added_to)
    found = epilogue(call, y, kind == Epilogue.GATED, kind == Epilogue.ACTIVATED)
    call.rows("out", len(y), call.out_pitch, found.shape[1], HALF)[adapted] = found[adapted]
