"""Short convolutions: against sums over whole texts, and with the same bits however a text is cut into steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.backend.base import Backend
from bminf_lite.backend.cache_values import StateArray, StateCache
from bminf_lite.backend.values import ForwardBatch, ShortConvolution
from bminf_lite.layers.cache import State

LENGTH = 30


class Layer:
    """A convolution on a backend with the cache of some sequences, whose texts are ``rows`` ``[length, 3 * channels]``.

    Sequence ``i`` has slot ``i + 1``.
    """

    def __init__(self, ops: Backend, channels: int, taps: int, sequences: int = 1, drafts: int = 0, bias: bool = True):
        rng = np.random.default_rng([channels, taps])
        self.ops, self.taps = ops, rng.standard_normal((taps, channels)).astype(np.float32)
        self.bias = rng.standard_normal(channels).astype(np.float32) if bias else None
        self.rows = rng.standard_normal((sequences, LENGTH, 3 * channels)).astype(ops.activation_dtype)
        vector = None if self.bias is None else ops.vector(self.bias)
        self.convolution = ShortConvolution(ops.array(self.taps), vector)
        layout = State((StateArray("inputs", (channels,), None, ring=taps),)).with_drafts(drafts)
        self.cache: StateCache = layout.make(ops, sequences + 1, None)
        for array in self.cache.arrays:  # what no sequence may read
            ops.assign(array, np.full(array.shape, np.nan, np.float16))

    def step(self, parts: Sequence[tuple[int, int, int]], padding: tuple[int, int] = (0, 0)) -> list[np.ndarray]:
        """The results of tokens ``[first, end)`` of sequences, each ``(sequence, first, end)``.

        Sequences that follow themselves are drafts. ``padding``: rows of slot 0 at position 0, with a token each, and
        tokens behind the last sequence.
        """
        rows, tokens = padding
        texts = [self.rows[sequence, first:end] for sequence, first, end in parts]
        counts = [end - first for _, first, end in parts] + [1] * rows
        slots = [sequence + 1 for sequence, _, _ in parts] + [0] * rows
        batch = ForwardBatch.packed(
            self.ops.array,
            [np.zeros(count) for count in counts],
            [first for _, first, _ in parts] + [0] * rows,
            [np.array(slots, np.int32)[:, None]],
        )
        batch = replace(batch, has_drafts=any(a[0] == b[0] for a, b in pairwise(parts)))
        added = np.full((rows + tokens, self.rows.shape[2]), np.nan, self.rows.dtype)
        x = self.ops.array(np.concatenate([*texts, added]))
        found = self.ops.host(self.ops.short_convolution(x, self.convolution, self.cache, batch))
        return np.split(found[: sum(counts) - rows], np.cumsum(counts[: len(parts)])[:-1])

    def expected(self, sequence: int) -> np.ndarray:
        """The results of a whole text, one token after another."""
        b, c, x = np.split(self.rows[sequence].astype(np.float32), 3, axis=1)
        inputs = (b * x).astype(self.rows.dtype).astype(np.float32)
        y = np.zeros_like(inputs)
        for t in range(len(y)):
            for j in range(min(t + 1, len(self.taps))):
                y[t] += self.taps[j] * inputs[t - j]
            y[t] += 0 if self.bias is None else self.bias
        return (c * y).astype(self.rows.dtype)


@pytest.mark.parametrize("channels", [5, 24, 2048])
@pytest.mark.parametrize("taps", [1, 3, 8])
@pytest.mark.parametrize("sizes", [[30], [1] * 30, [2, 1, 9, 1, 1, 16]], ids=str)
def test_a_text_in_steps(backend: Backend, channels: int, taps: int, sizes: list[int]) -> None:
    layer = Layer(backend, channels, taps, bias=channels != 24)
    ends = np.cumsum([0, *sizes]).tolist()
    found = [layer.step([(0, first, end)])[0] for first, end in pairwise(ends)]
    np.testing.assert_array_equal(np.concatenate(found), layer.expected(0))


def test_sequences_of_one_step(backend: Backend) -> None:
    """Decoding and reading ones, with padding; each has its own slot."""
    layer = Layer(backend, 40, 3, sequences=4)
    layer.step([(2, 0, 7), (1, 0, 2), (3, 0, 1)])
    parts = [(3, 1, 2), (1, 2, 3), (0, 0, 12), (2, 7, 9)]
    for found, (sequence, first, end) in zip(layer.step(parts, (0, 5)), parts, strict=True):
        np.testing.assert_array_equal(found, layer.expected(sequence)[first:end])
    parts = [(1, 3, 4), (0, 12, 13), (2, 9, 10)]
    for found, (sequence, first, end) in zip(layer.step(parts, (3, 2)), parts, strict=True):
        np.testing.assert_array_equal(found, layer.expected(sequence)[first:end])


@given(st.data())
def test_drafts_of_which_some_are_rejected(backend: Backend, data: Any) -> None:
    """Rows of drafts follow their sequence; what a rejected one has left is overwritten."""
    drafts = data.draw(st.integers(1, 4))
    layer = Layer(backend, 16, data.draw(st.integers(1, 4)), sequences=2, drafts=drafts)
    ends = [data.draw(st.integers(1, 6)) for _ in range(2)]
    layer.step([(i, 0, end) for i, end in enumerate(ends)])
    truth = [layer.expected(i) for i in range(2)]
    for _ in range(5):
        own = [data.draw(st.integers(0, drafts)) for _ in range(2)]
        kept = [data.draw(st.integers(0, n)) for n in own]
        texts = layer.rows.copy()
        for i, (end, count) in enumerate(zip(ends, kept, strict=True)):
            layer.rows[i, end + 1 + count :] *= -3  # of other tokens
        parts = [(i, end + d, end + d + 1) for i, end in enumerate(ends) for d in range(own[i] + 1)]
        found = layer.step(parts, (2, 1))
        layer.rows = texts
        for result, (i, first, _) in zip(found, parts, strict=True):
            if first <= ends[i] + kept[i]:
                np.testing.assert_array_equal(result[0], truth[i][first])
        ends = [end + 1 + count for end, count in zip(ends, kept, strict=True)]


@pytest.mark.gpu
def test_a_captured_step(cuda_backend: Backend) -> None:
    """A graph reads slots and positions when it runs."""
    layer, ops = Layer(cuda_backend, 24, 3, sequences=2), cuda_backend
    layer.step([(0, 0, 4), (1, 0, 9)])
    x = ops.array(layer.rows[:, 0])
    batch = ForwardBatch.packed(ops.array, np.zeros((2, 1)), [4, 9], [np.array([[1], [2]], np.int32)])
    work = ops.capture(lambda: ops.short_convolution(x, layer.convolution, layer.cache, batch))
    for i in range(3):
        ops.assign(x, np.stack([layer.rows[0, 4 + i], layer.rows[1, 9 + i]]))
        ops.assign(batch.context_lens, np.array([4 + i, 9 + i]))
        found = ops.host(work())
        np.testing.assert_array_equal(found, [layer.expected(0)[4 + i], layer.expected(1)[9 + i]])


def test_previous_rows(backend: Backend) -> None:
    """Rows in the activation type, of a prompt in pieces, of drafts, of single tokens; a first token has zeros."""
    channels, ops = 24, backend
    rows = np.random.default_rng(1).standard_normal((LENGTH, channels)).astype(np.float32)
    taps = np.stack([np.zeros(channels, np.float32), np.ones(channels, np.float32)])
    previous = ShortConvolution(ops.array(taps))
    cache = State((StateArray("inputs", (channels,), None, ring=2),), False).with_drafts(2).make(ops, 3, None)
    slot = np.array([[2]], np.int32)

    def step(first: int, values: np.ndarray, drafts: int = 0) -> np.ndarray:
        counts = [1] * (1 + drafts) if drafts else [len(values)]
        firsts = [first + i for i in range(len(counts))]
        tables = [np.repeat(slot, len(counts), axis=0)]
        batch = ForwardBatch.packed(ops.array, [np.zeros(n) for n in counts], firsts, tables)
        batch = replace(batch, has_drafts=drafts > 0)
        found = ops.host(ops.previous_rows(ops.array(values), previous, cache, batch))
        assert found.dtype == np.float32
        return np.array(found)

    expected = np.concatenate([np.zeros((1, channels), np.float32), rows[:-1].astype(ops.activation_dtype)])
    np.testing.assert_array_equal(step(0, rows[:7]), expected[:7])
    np.testing.assert_array_equal(step(7, rows[7:8]), expected[7:8])
    np.testing.assert_array_equal(step(8, np.concatenate([rows[8:10], -rows[10:11]]), 2), expected[8:11])
    np.testing.assert_array_equal(step(10, rows[10:30]), expected[10:30])  # the last draft was rejected
