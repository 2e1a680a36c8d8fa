"""What the sampling kernels do: the definition, row by row, in the kernel that finishes the row."""

from __future__ import annotations

import numpy as np

from bminf_lite.backend.sampling import SamplerState, penalise, sample
from bminf_lite.cuda.kernels.constants import SAMPLING_BUCKETS, SAMPLING_CHUNK, SAMPLING_THREADS
from bminf_lite.cuda.kernels.sampling.sampler import PART_BYTES, ROW_BYTES

from .launching import Call, model

F32 = np.float32
_DRAWING = 0x5A


def state_of(call: Call) -> SamplerState:
    rows, vocab = call.arguments["rows"], call.vocab
    names = "temperature", "top_p", "min_p", "repetition", "presence", "frequency"
    temperature, top_p, min_p, *penalties = (call.vector(name, rows, F32) for name in names)
    counts = call.vector("counts", rows * vocab, np.int32).reshape(rows, vocab) if call.counts else None
    integers = (call.vector(n, rows, np.int32) for n in ("sequence", "step"))
    top_k, seed = call.vector("top_k", rows, np.int32), call.vector("seed", rows, np.uint64)
    return SamplerState(temperature, top_k, top_p, min_p, *penalties, seed, *integers, counts)


def logits_of(call: Call) -> np.ndarray:
    call.require(call.launch.grid[0] == call.chunks and call.chunks * SAMPLING_CHUNK >= call.vocab, "chunks")
    call.require(call.launch.grid[1] == call.arguments["rows"] and call.launch.block == SAMPLING_THREADS, "blocks")
    return call.rows("logits", call.arguments["rows"], call.pitch, call.vocab, F32)


def scratch_rows(call: Call) -> np.ndarray:
    """The head of each row's scratch, uint8 ``[rows, ROW_BYTES]``; the parts behind are checked."""
    rows = call.arguments["rows"]
    call.vector("scratch", rows * (ROW_BYTES + call.chunks * PART_BYTES), np.uint8, 16)
    return call.vector("scratch", rows * ROW_BYTES, np.uint8, 16).reshape(rows, ROW_BYTES)


def finish(call: Call, logits: np.ndarray, state: SamplerState, rows: np.ndarray) -> None:
    """Choose tokens for some rows, and write all that follows from that."""
    if not rows.size:
        return
    own = state.map(lambda x: x[rows])
    tokens, logprobs = sample(np.array(logits[rows]), own)
    state.step[rows] = own.step
    if state.counts is not None:
        state.counts[rows] = own.counts
    result = call.vector("result", 2 * len(logits), np.int32).reshape(2, -1)
    result[0, rows], result[1, rows] = tokens, logprobs.view(np.int32)
    if call.tokens:
        call.vector("tokens", len(logits), np.int32)[rows] = np.maximum(tokens, 0)
    if call.context_lens:
        call.vector("context_lens", len(logits), np.int32)[rows] += 1


@model
def best_token(call: Call) -> None:
    logits, state, heads = logits_of(call), state_of(call), scratch_rows(call)
    call.require(not heads.any(), "the scratch is not zero")
    with np.errstate(all="ignore"):
        valid = np.isfinite(penalise(logits, state).max(axis=1))
    drawing = valid & (state.temperature > 0)
    heads[drawing, 0] = _DRAWING
    finish(call, logits, state, np.flatnonzero(~drawing))


@model
def histogram(call: Call) -> None:
    rows, buckets = call.arguments["rows"], SAMPLING_BUCKETS
    filtered = rows * (ROW_BYTES + call.chunks * PART_BYTES + buckets * 12 + call.vocab * 8)
    call.vector("scratch", filtered, np.uint8, 16)


@model
def cut_tail(call: Call) -> None:
    histogram(call)


@model
def draw_token(call: Call) -> None:
    heads = scratch_rows(call)
    rows = np.flatnonzero(heads[:, 0] == _DRAWING)
    heads[...] = 0
    finish(call, logits_of(call), state_of(call), rows)
