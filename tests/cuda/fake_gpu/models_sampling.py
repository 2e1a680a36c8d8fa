"""What the sampling kernels do: the definition, row by row, in the kernel that finishes the row."""

from __future__ import annotations

import numpy as np

from bminf_lite.backend.sampling import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    NULL_ROW,
    ROW_WORDS,
    SamplerState,
    SamplerVariant,
    adjust,
    report,
    sample,
)
from bminf_lite.cuda.kernels.constants import SAMPLING_BUCKETS, SAMPLING_CHUNK, SAMPLING_THREADS
from bminf_lite.cuda.kernels.sampling.sampler import PART_BYTES, ROW_BYTES, ROWS_AT_ONCE

from .launching import Call, model

F32 = np.float32
_DRAWING = 0x5A


def state_of(call: Call) -> SamplerState:
    """The state as far as the step's rows reach; how large its arrays are is not among the arguments."""
    batch, vocab, full = call.batch, call.vocab, bool(call.number("ADJUSTED"))
    rows = call.vector("rows", batch, np.int32)
    call.require((rows >= 0).all(), "a row is negative")
    used = rows[rows != NULL_ROW]
    call.require(len(set(used.tolist())) == len(used), "two sequences share a row")
    size = int(rows.max()) + 1
    table = call.rows("table", size, ROW_WORDS, ROW_WORDS, np.int32, 128)
    state = SamplerState(table, rows, SamplerVariant.FULL if full else SamplerVariant.DRAW)
    own = state.columns[rows]
    changed = (own["num_bias"] > 0) | (own["count_row"] >= 0) | (own["mask_row"] >= 0) | (own["num_logprobs"] > 0)
    call.require(full or not (changed | (own["step"] < own["min_tokens"])).any(), "a row needs the variant FULL")
    if (own["num_bias"] > 0).any():
        state.bias = call.tensor("bias", (size, 2, MAX_LOGIT_BIAS), np.int32)
    if (count_rows := int(own["count_row"].max()) + 1) > 0:
        state.counts = call.vector("counts", count_rows * vocab, np.int32).reshape(-1, vocab)
    if (mask_rows := int(own["mask_row"].max()) + 1) > 0:
        words = -(-vocab // 32)
        state.masks = call.vector("masks", mask_rows * words, np.uint32).reshape(-1, words)
    return state


def logits_of(call: Call) -> np.ndarray:
    call.require(call.launch.grid[0] == call.chunks and call.chunks * SAMPLING_CHUNK >= call.vocab, "chunks")
    call.require(call.launch.grid[1] == call.batch and call.launch.block == SAMPLING_THREADS, "blocks")
    return call.rows("logits", call.batch, call.pitch, call.vocab, F32)


def scratch_rows(call: Call) -> np.ndarray:
    """The head of each row's scratch, uint8 ``[batch, ROW_BYTES]``; the parts behind are checked."""
    call.vector("scratch", call.batch * (ROW_BYTES + call.chunks * PART_BYTES), np.uint8, 16)
    return call.vector("scratch", call.batch * ROW_BYTES, np.uint8, 16).reshape(-1, ROW_BYTES)


def result_rows(call: Call, rows: int) -> np.ndarray:
    """The result, int32 ``[rows, batch]``."""
    return call.rows("result", rows, call.result_pitch, call.batch, np.int32, align=0)


def finish(call: Call, logits: np.ndarray, state: SamplerState, sequences: np.ndarray) -> None:
    """Choose tokens for some sequences, and write all that follows from that."""
    if not sequences.size:
        return
    choice = sample(np.array(logits[sequences]), SamplerState(
        state.table, state.rows[sequences], state.variant, state.bias, state.counts, state.masks
    ))  # fmt: skip
    result = result_rows(call, 2)
    result[0, sequences], result[1, sequences] = choice.tokens, choice.logprobs.view(np.int32)
    used = sequences[state.rows[sequences] != NULL_ROW]
    if call.tokens:
        call.vector("tokens", call.batch, np.int32)[used] = np.maximum(result[0, used], 0)
    if call.context_lens:
        call.vector("context_lens", call.batch, np.int32)[used] += 1


@model
def best_token(call: Call) -> None:
    logits, state, heads = logits_of(call), state_of(call), scratch_rows(call)
    call.require(not heads.any(), "the scratch is not zero")
    with np.errstate(all="ignore"):
        valid = np.isfinite(adjust(logits, state).max(axis=1))
    drawing = valid & (state.columns["temperature"][state.rows] > 0) & (state.rows != NULL_ROW)
    heads[drawing, 0] = _DRAWING
    finish(call, logits, state, np.flatnonzero(~drawing))


@model
def histogram(call: Call) -> None:
    batch, buckets = call.batch, SAMPLING_BUCKETS
    call.require(batch <= ROWS_AT_ONCE, "too many rows at once")
    needed = batch * (ROW_BYTES + call.chunks * PART_BYTES + buckets * 12 + call.chunks * SAMPLING_CHUNK * 8)
    call.vector("scratch", needed, np.uint8, 16)


@model
def cut_tail(call: Call) -> None:
    histogram(call)


@model
def draw_token(call: Call) -> None:
    heads = scratch_rows(call)
    sequences = np.flatnonzero(heads[:, 0] == _DRAWING)
    heads[...] = 0
    finish(call, logits_of(call), state_of(call), sequences)


@model
def top_logprobs(call: Call) -> None:
    histogram(call)
    rows = call.vector("rows", call.batch, np.int32)
    table = call.rows("table", int(rows.max()) + 1, ROW_WORDS, ROW_WORDS, np.int32, 128)
    state = SamplerState(table, rows, SamplerVariant.FULL)
    result = result_rows(call, 2 + 2 * MAX_LOGPROBS)
    choice = report(np.array(logits_of(call)), result[0].copy(), state.columns["num_logprobs"][rows])
    result[2:] = choice.packed()[2:]
