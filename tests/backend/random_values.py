"""Random inputs for the operations' tests, made to hit what goes wrong: rows of zeros, very different sizes, -128."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from bminf_lite.backend.base import Backend
from bminf_lite.backend.cache_values import LayerCache
from bminf_lite.backend.quantization import Int8Weight
from bminf_lite.backend.sampling import (
    MAX_END_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    NULL_ROW,
    PROMPT_FLAG,
    ROW_WORDS,
    SamplerState,
    SamplerVariant,
    neutral_rows,
)
from bminf_lite.backend.values import ForwardBatch, Norm, sequential_tables

SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = st.sampled_from([1, 2, 3, 5, 7, 8, 16, 31, 32, 33, 61, 64, 96, 127, 130])
ROWS = st.sampled_from([1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65])
FLOAT_TYPES = [np.float16, np.float32, ml_dtypes.bfloat16]
"""What checkpoints store."""


def random_rows(rng: np.random.Generator, rows: int, width: int, dtype: type) -> np.ndarray:
    """Rows of very different size, and now and then a row of zeros."""
    sizes = 10.0 ** rng.uniform(-2, 1, (rows, 1)) * (rng.random((rows, 1)) > 0.1)
    return (rng.standard_normal((rows, width)) * sizes).astype(dtype)


def random_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """int8 over its whole range: other writers store -128 too."""
    return rng.integers(-128, 128, shape, dtype=np.int8)


def random_int8(
    rng: np.random.Generator, rows: int, width: int, dynamic: bool, scale_type: type = np.float16
) -> Int8Weight:
    """A weight of entries around 1."""
    scale = (rng.uniform(0.5, 1, rows) * 0.01).astype(scale_type)
    return Int8Weight(random_codes(rng, rows, width), scale, dynamic)


def random_norm(rng: np.random.Generator, width: int, center: bool) -> Norm:
    """A norm that holds NumPy arrays; see :func:`norm_on`."""
    gain, bias = rng.standard_normal((2, width)).astype(np.float32)
    return Norm(gain, 1e-5, bias if center else None, center)


def norm_on(backend: Backend, norm: Norm) -> Norm:
    """The same norm with arrays of a backend."""
    bias = None if norm.bias is None else backend.vector(norm.bias)
    return dataclasses.replace(norm, weight=backend.vector(norm.weight), bias=bias)


def random_sampler(rng: np.random.Generator, count: int, vocab: int, full: bool) -> SamplerState:
    """A step of ``count`` sequences: a few rows of a larger table in any order, and now and then the null row.

    Parameters are drawn for each row from values that include every limit. With ``full`` some rows have biases,
    penalties, masks and a least number of tokens, and report most likely tokens. NumPy arrays.
    """
    total = count + 3
    table = neutral_rows(total)

    def one_of(*values: float) -> np.ndarray:
        return rng.choice(np.array(values, np.float32), total)

    table["temperature"] = one_of(0, 0.05, 0.6, 1, 1, 1.7, 20)
    table["top_k"] = one_of(0, 0, 1, 2, 20, 50, 1000, vocab - 1, vocab, vocab + 1, 2**30)
    table["top_p"] = one_of(1e-12, 1e-6, 0.3, 0.8, 0.95, 1 - 2**-24, 1, 1)
    table["min_p"] = one_of(0, 0, 1e-9, 0.05, 0.5, 1)
    table["seed"] = rng.integers(0, 2**64, total, dtype=np.uint64)
    table["sequence"] = rng.integers(-(2**31), 2**31, total)
    table["step"] = rng.integers(0, 2**31 - 9, total)
    table[NULL_ROW] = neutral_rows(1)
    rows = rng.permutation(np.arange(1, total, dtype=np.int32))[:count]
    rows[rng.random(count) < 0.1] = NULL_ROW
    state = SamplerState(table.view(np.int32).reshape(total, ROW_WORDS), rows, SamplerVariant.DRAW)
    return add_adjustments(rng, state, vocab) if full else state


def add_adjustments(rng: np.random.Generator, state: SamplerState, vocab: int) -> SamplerState:
    """What the variant ``FULL`` has beyond the others."""
    table, total = state.columns, len(state.table)
    table["repetition_penalty"] = rng.choice(np.float32([1, 1.3, 0.7]), total)
    table["presence_penalty"] = rng.choice(np.float32([0, 0.5, -1]), total)
    table["frequency_penalty"] = rng.choice(np.float32([0, 0.25, -0.5]), total)
    table["num_logprobs"] = rng.choice([0, 0, 1, 3, MAX_LOGPROBS], total)
    bias = np.zeros((total, 2, MAX_LOGIT_BIAS), np.int32)
    ends = rng.integers(-1, vocab, (total, MAX_END_TOKENS))
    table["end_tokens"] = np.where(rng.random(ends.shape) < 0.5, ends, -1)
    table["min_tokens"] = table["step"] + rng.integers(-1, 3, total)
    for row in np.flatnonzero(rng.random(total) < 0.5):
        ids = rng.choice(vocab, rng.integers(1, min(vocab, MAX_LOGIT_BIAS) + 1), replace=False)
        table["num_bias"][row] = len(ids)
        bias[row, 0, : len(ids)] = np.sort(ids)
        bias[row, 1, : len(ids)] = rng.normal(0, 5, len(ids)).astype(np.float32).view(np.int32)
    table["count_row"] = np.where(rng.random(total) < 0.6, rng.permutation(total), -1)
    table["mask_row"] = np.where(rng.random(total) < 0.4, rng.integers(0, 3, total), -1)
    table[NULL_ROW] = neutral_rows(1)
    seen = rng.random((2, total, vocab)) < [[[0.05]], [[0.1]]]
    counts = (rng.integers(1, 9, (total, vocab)) * seen[0] + PROMPT_FLAG * seen[1]).astype(np.int32)
    shape = 3, -(-vocab // 32)
    masks = rng.integers(0, 2**32, shape, np.uint32) | rng.integers(0, 2**32, shape, np.uint32)
    masks[2] = 1 << rng.integers(0, 32)  # few tokens, or none
    return dataclasses.replace(state, variant=SamplerVariant.FULL, bias=bias, counts=counts, masks=masks)


def forbid_reading(backend: Backend, cache: LayerCache, block: int = 0) -> None:
    """Fill a cache from ``block`` on with what new memory may hold: NaN, or codes whose scales are NaN."""
    for x in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
        if x is not None:
            whole = (x if x.base is None or x.base.ndim != x.ndim else x.base)[block:]  # with what pads a head
            backend.assign(whole, np.full(whole.shape, -128 if whole.dtype == np.int8 else np.nan, whole.dtype))


def scattered_table(sequences: int, tokens: int, first: int = 1) -> np.ndarray:
    """A block table for ``sequences`` sequences: blocks from ``first`` on in no order."""
    table = sequential_tables(sequences, tokens)
    shuffled = np.random.default_rng(table.size).permutation(table.ravel()) + (first - 1)
    return shuffled.reshape(table.shape).astype(np.int32)


def make_batch(
    backend: Backend,
    counts: list[int],
    context_lens: list[int],
    table: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
    **source: Any,
) -> ForwardBatch:
    """A step of ``counts[b]`` new tokens for each sequence, whose blocks are in row ``b`` of ``table``."""
    tokens = np.zeros(sum(counts)) if tokens is None else tokens
    rows = np.split(tokens, np.cumsum(counts)[:-1])
    return ForwardBatch.packed(backend.array, rows, context_lens, () if table is None else (table,), **source)
