"""Models of ``experts/adapters.cu``, and of products to which adapters of experts add."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bminf_lite.backend.functions import product_by_row
from bminf_lite.cuda.kernels.constants import EXPERT_FLOAT_THREADS

from .launching import Call, model
from .models_adapters import F32, HALF, Slot
from .models_experts import (
    few_tokens_down,
    few_tokens_hidden,
    float_products,
    grouped_gemm,
    grouped_gemm_hopper,
    sorted_experts,
)


class PairSide:
    """The parameters of a side product of sorted pairs, see ``experts/pair_side.cuh``."""

    def __init__(self, call: Call, pairs: int):
        self.call = call
        self.slots = call.vector("pair_slots", pairs, np.int32)
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
    k, is_sorted, by_pair = call.k, call.number("SORTED"), call.number("BY_PAIR")
    across, down, _ = call.launch.grid
    if is_sorted:
        experts = sorted_experts(call, call.experts)
        order = call.vector("order", len(experts), np.int32)
        tiles = -(-np.bincount(experts, minlength=call.experts) // (8 * call.number("TILES")))
        call.require(down >= np.sum(tiles), "tiles are missing")
    else:
        experts, order = call.vector("order", down, np.int32), np.arange(down)
    pairs = len(experts)
    if call.token_slots:
        tokens = call.vector("token_slots", -(-pairs // call.top_k), np.int32)
        call.vector("pair_slots", pairs, np.int32)[...] = tokens[order // call.top_k]
    side = PairSide(call, pairs)
    covered = across * call.number("GROUPS") * 16 == call.sections * call.rank_pitch
    call.require(covered and call.launch.block == EXPERT_FLOAT_THREADS, "threads or blocks")
    rows = np.arange(pairs) if by_pair else order // call.top_k
    x = call.rows("x", int(rows.max()) + 1, call.x_pitch, k, HALF)[rows].astype(F32)
    if call.factors:
        x = (x * call.vector("factors", pairs, F32)[order][:, None]).astype(HALF).astype(F32)
    for own, slot in side.used(experts):
        call.require(not slot.down[..., k:].any(), "the padding of down is not zero")
        for section, (scales, down_rows) in enumerate(zip(slot.scales, slot.down, strict=True)):
            side.inputs[own, section, : len(down_rows)] = scales * product_by_row(x[own], down_rows[:, :k].T)


def side_products(call: Call, experts: np.ndarray, n: int) -> np.ndarray:
    """What adapters add to the ``n`` products of each pair, fp32 ``[pairs, n]``, as the rows of the weight lie."""
    side, halves = PairSide(call, len(experts)), call.sections
    call.require(call.width <= n // halves, "widths")
    added_to = np.zeros((len(experts), halves, n // halves), F32)
    for own, slot in side.used(experts):
        for section, values in enumerate(slot.up):
            part = side.inputs[own, section, : values.shape[1]].astype(F32)
            added_to[own, section, : call.width] = product_by_row(part, values.T)
    if halves == 2:
        added_to = added_to.reshape(len(experts), 2, -1, 8).swapaxes(1, 2)
    return added_to.reshape(len(experts), n)


@model
def grouped_gemm_adapted(call: Call) -> None:
    grouped_gemm(call, side_products)


@model
def grouped_gemm_hopper_adapted(call: Call) -> None:
    grouped_gemm_hopper(call, side_products)


@model
def float_products_adapted(call: Call) -> None:
    float_products(call, side_products)


@model
def few_tokens_hidden_adapted(call: Call) -> None:
    few_tokens_hidden(call, side_products)


@model
def few_tokens_down_adapted(call: Call) -> None:
    few_tokens_down(call, side_products)
