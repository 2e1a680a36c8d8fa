"""What the sampling kernels do: the definition, row by row, in the kernel that finishes the row."""

from __future__ import annotations

import numpy as np

from bminf_lite.backend.guesses import guess as guessed
from bminf_lite.backend.sampling import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    NULL_ROW,
    ROW_WORDS,
    SamplerState,
    SamplerVariant,
    adjust,
    commit,
    report,
    sample,
    score,
)
from bminf_lite.cuda.kernels.constants import SAMPLING_BUCKETS, SAMPLING_CHUNK, SAMPLING_ROW_BYTES, SAMPLING_THREADS
from bminf_lite.cuda.kernels.sampling.sampler import BLOCK_CHUNKS, PART_BYTES, ROWS_AT_ONCE

from .launching import Call, model

F32 = np.float32
_DRAWING, JUNK = 0x5A, 0xA5
CHUNK_BYTES = 8 * SAMPLING_CHUNK
"""The bytes of a chunk of the list of tokens."""


def state_of(call: Call) -> SamplerState:
    """The state as far as the step's rows reach; how large its arrays are is not among the arguments."""
    vocab, full, rows = call.vocab, bool(call.number("ADJUSTED")), call.vector("rows", batch_of(call), np.int32)
    call.require(bool((rows >= 0).all()), "a row is negative")
    used = rows[rows != NULL_ROW]
    offsets, drafts = (
        call.vector(n, batch_of(call), np.int32) if call.offsets else None for n in ("offsets", "drafts")
    )
    firsts = used if offsets is None else rows[(rows != NULL_ROW) & (offsets == 0)]
    call.require(len(set(firsts.tolist())) == len(firsts), "two sequences share a row")
    size = int(rows.max()) + 1
    table = call.rows("table", size, ROW_WORDS, ROW_WORDS, np.int32, 128)
    variant = SamplerVariant.FULL if full else SamplerVariant.DRAW
    state = SamplerState(table, rows, variant, offsets=offsets, drafts=drafts)
    own = state.columns[rows]
    changed = (own["num_bias"] > 0) | (own["count_row"] >= 0) | (own["mask_row"] >= 0) | (own["num_logprobs"] > 0)
    call.require(full or not (changed | (own["step"] < own["min_tokens"])).any(), "a row needs the variant FULL")
    if (own["num_bias"] > 0).any():
        state.bias = call.tensor("bias", (size, 2, MAX_LOGIT_BIAS), np.int32)
    if (count_rows := int(own["count_row"].max()) + 1) > 0:
        state.counts = call.vector("counts", count_rows * vocab, np.int32).reshape(-1, vocab)
    if (mask_rows := int(own["mask_row"].max()) + 1) > 0:
        mask_rows, words = mask_rows + (0 if offsets is None else int(offsets.max())), -(-vocab // 32)
        state.masks = call.vector("masks", mask_rows * words, np.uint32).reshape(-1, words)
    return state


def batch_of(call: Call) -> int:
    return call.launch.grid[1]


def logits_of(call: Call, block_chunks: int = 1) -> np.ndarray:
    """The logits of a kernel whose blocks have ``block_chunks`` chunks."""
    call.require(call.launch.grid[0] == -(-call.chunks // block_chunks), "blocks")
    call.require(call.chunks * SAMPLING_CHUNK >= call.vocab, "chunks")
    call.require(call.launch.block == SAMPLING_THREADS, "threads")
    return call.rows("logits", batch_of(call), call.pitch, call.vocab, F32)


def scratch_of(call: Call, drawing: bool) -> tuple[np.ndarray, ...]:
    """The scratch, uint8 ``[batch, bytes]``: the sequences' heads, the parts of chunks, and what only draws need.

    The latter is the histogram, which must be zero between kernels, and the list of tokens.
    """
    places = np.cumsum([SAMPLING_ROW_BYTES, call.chunks * PART_BYTES, SAMPLING_BUCKETS * 12, call.chunks * CHUNK_BYTES])
    whole = call.rows("scratch", batch_of(call), call.scratch_pitch, places[3 if drawing else 1], np.uint8)
    return tuple(np.split(whole, places[: 3 if drawing else 1], axis=1))


def result_rows(call: Call, rows: int) -> np.ndarray:
    """The result, int32 ``[rows, batch]``."""
    return call.rows("result", rows, call.result_pitch, batch_of(call), np.int32, align=0)


def finish(call: Call, logits: np.ndarray, state: SamplerState, sequences: np.ndarray) -> None:
    """Choose tokens for some rows, and write all that follows from that; with drafts, their commit follows later."""
    if not sequences.size:
        return
    result = result_rows(call, 2)
    if state.offsets is None:
        own = SamplerState(state.table, state.rows[sequences], state.variant, state.bias, state.counts, state.masks)
        choice = sample(np.array(logits[sequences]), own)
        result[0, sequences], result[1, sequences] = choice.tokens, choice.logprobs.view(np.int32)
        return
    choice = sample(np.array(logits), state.map(np.copy))
    result[0, sequences], result[1, sequences] = choice.tokens[sequences], choice.logprobs.view(np.int32)[sequences]


@model
def best_token(call: Call) -> None:
    logits, state, (heads, parts) = logits_of(call, BLOCK_CHUNKS), state_of(call), scratch_of(call, drawing=False)
    call.require(not heads.any(), "the scratch is not zero")
    with np.errstate(all="ignore"):
        valid = np.isfinite(adjust(logits, state).max(axis=1))
    drawing = valid & (state.columns["temperature"][state.rows] > 0) & (state.rows != NULL_ROW)
    heads[drawing, 0] = _DRAWING
    parts[...] = JUNK
    finish(call, logits, state, np.flatnonzero(~drawing))


@model
def histogram(call: Call) -> None:
    call.require(batch_of(call) <= ROWS_AT_ONCE, "too many rows at once")
    _, _, histograms, _ = scratch_of(call, drawing=True)
    call.require(not histograms.any(), "the histogram is not zero")


@model
def cut_tail(call: Call) -> None:
    *_, lists = scratch_of(call, drawing=True)
    lists[...] = JUNK


@model
def draw_token(call: Call) -> None:
    heads, *_ = scratch_of(call, drawing=True)
    sequences = np.flatnonzero(heads[:, 0] == _DRAWING)
    heads[...] = 0
    finish(call, logits_of(call), state_of(call), sequences)


@model
def top_logprobs(call: Call) -> None:
    cut_tail(call)
    rows = call.vector("rows", batch_of(call), np.int32)
    table = call.rows("table", int(rows.max()) + 1, ROW_WORDS, ROW_WORDS, np.int32, 128)
    state = SamplerState(table, rows, SamplerVariant.FULL)
    result = result_rows(call, 2 + 2 * MAX_LOGPROBS)
    choice = report(np.array(logits_of(call)), result[0].copy(), state.columns["num_logprobs"][rows])
    result[2:] = choice.packed()[2:]


@model
def token_logprobs(call: Call) -> None:
    logits, (heads, parts) = np.array(logits_of(call, BLOCK_CHUNKS)), scratch_of(call, drawing=False)
    call.require(not heads.any(), "the scratch is not zero")
    parts[...] = JUNK
    tokens = call.vector("tokens", batch_of(call), np.int32)
    result_rows(call, 3)[...] = score(logits, tokens).packed()


@model
def guess(call: Call) -> None:
    logits, (heads, parts) = np.array(logits_of(call, BLOCK_CHUNKS)), scratch_of(call, drawing=False)
    call.require(not heads.any(), "the scratch is not zero")
    parts[...] = JUNK
    rows, offsets = (call.vector(name, batch_of(call), np.int32) for name in ("rows", "offsets"))
    table = call.rows("table", int(rows.max()) + 1, ROW_WORDS, ROW_WORDS, np.int32, 128)
    with np.errstate(all="ignore"):
        tokens = guessed(logits, SamplerState(table, rows, SamplerVariant.GREEDY, offsets=offsets))
    if call.tokens:
        tokens = call.vector("tokens", call.vocab, np.int32)[tokens]
    call.vector("result", batch_of(call), np.int32)[...] = tokens


@model
def insert_guesses(call: Call) -> None:
    call.require(call.threads >= call.count, "blocks are missing")
    tokens, drafts = (call.vector(name, call.count, np.int32) for name in ("tokens", "drafts"))
    places = np.flatnonzero(drafts < 0)
    if len(places):
        guesses = call.vector("guesses", int(-drafts.min()), np.int32)
        tokens[places] = drafts[places] = guesses[-1 - drafts[places]]
    call.vector("copy", call.count, np.int32)[...] = drafts


@model
def insert_positions(call: Call) -> None:
    call.require(call.threads >= call.count and call.count % call.batch == 0, "blocks are missing")
    positions, rows = call.vector("positions", call.count, np.int32), call.vector("rows", call.batch, np.int32)
    table = call.rows("table", int(rows.max()) + 1, ROW_WORDS, ROW_WORDS, np.int32, 128)
    steps = SamplerState(table, rows, SamplerVariant.FULL).columns["step"][np.resize(rows, call.count)]
    positions[...] = np.where(positions < 0, -1 - positions + steps, positions)


@model
def insert_last_tokens(call: Call) -> None:
    call.require(call.threads >= call.count, "blocks are missing")
    tokens, rows = (call.vector(name, call.count, np.int32) for name in ("tokens", "rows"))
    table = call.rows("table", int(rows.max()) + 1, ROW_WORDS, ROW_WORDS, np.int32, 128)
    newest = SamplerState(table, rows, SamplerVariant.FULL).columns["last_token"][rows]
    tokens[...] = np.where(tokens < 0, newest, tokens)


@model
def write_step(call: Call) -> None:
    call.require(call.threads >= call.count, "blocks are missing")
    source, target = (call.vector(name, call.count, np.int32) for name in ("from", "to"))
    rows = source[call.rows_offset : call.rows_offset + call.num_tokens]
    table = call.rows("table", int(rows.max(initial=0)) + 1, ROW_WORDS, ROW_WORDS, np.int32, 128)
    newest = SamplerState(table, rows, SamplerVariant.FULL).columns["last_token"][rows]
    target[...] = source
    target[: call.num_tokens] = np.where(source[: call.num_tokens] < 0, newest, source[: call.num_tokens])


@model
def commit_drafts(call: Call) -> None:
    call.require(call.threads >= call.batch, "blocks are missing")
    choice, rows, offsets, drafts = (
        call.vector(name, call.batch, np.int32) for name in ("choice", "rows", "offsets", "drafts")
    )
    table = call.rows("table", int(rows.max()) + 1, ROW_WORDS, ROW_WORDS, np.int32, 128)
    state = SamplerState(table, rows, SamplerVariant.FULL, offsets=offsets, drafts=drafts)
    if (count_rows := int(state.columns["count_row"][rows].max()) + 1) > 0:
        state.counts = call.vector("counts", count_rows * call.vocab, np.int32).reshape(-1, call.vocab)
    commit(choice, state)
