"""Mamba 2: against the recurrence token by token, and with the same bits however a text is cut into steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_close

from bminf_lite.backend.base import Backend
from bminf_lite.backend.cache_values import StateCache
from bminf_lite.backend.chunked_state import CHUNK, state_arrays
from bminf_lite.backend.values import ForwardBatch, GatedNorm, Mamba2Spec, Norm, ShortConvolution
from bminf_lite.layers.cache import State

LENGTH, TAPS = 3 * CHUNK + 5, 4
LONG = 150
"""Tokens of a text whose chunks a kernel prepares."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer; ``norm`` is None, or the groups of its norm and whether it comes before the gate."""

    groups: int = 2
    heads: int = 4
    head_dim: int = 8
    state_dim: int = 16
    norm: tuple[int, bool] | None = None
    has_bias: bool = True
    step_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def features(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.features + 2 * self.groups * self.state_dim


class Layer:
    """A layer on a backend with the cache of some sequences, whose texts are ``inputs``.

    Sequence ``i`` has slot ``i + 1``.
    """

    def __init__(self, ops: Backend, sizes: Sizes, sequences: int = 1, drafts: int = 0, length: int = LENGTH):
        rng = np.random.default_rng([sizes.groups, sizes.heads, sizes.state_dim])
        self.ops, self.sizes = ops, sizes
        self.taps = rng.standard_normal((TAPS, sizes.channels)).astype(np.float32)
        self.conv_bias = rng.standard_normal(sizes.channels).astype(np.float32) if sizes.has_bias else None
        self.rates = -np.exp(rng.uniform(-3, 2, sizes.heads)).astype(np.float32)
        self.step_bias, self.skip = rng.standard_normal((2, sizes.heads)).astype(np.float32)
        self.norm_weight = rng.uniform(0.5, 1.5, sizes.features).astype(np.float32)
        width = sizes.features + sizes.channels + sizes.heads
        self.inputs = rng.standard_normal((sequences, length, width)).astype(ops.activation_dtype)
        norm = None if sizes.norm is None else GatedNorm(Norm(self.norm_weight, 1e-6), *sizes.norm)
        self.spec = ops.mamba2_spec(
            Mamba2Spec(
                sizes.groups,
                sizes.heads,
                sizes.head_dim,
                sizes.state_dim,
                ShortConvolution(self.taps, self.conv_bias),
                self.rates,
                self.step_bias,
                self.skip,
                sizes.step_limits,
                norm,
            )
        )
        order = sizes.groups, sizes.heads, sizes.state_dim, sizes.head_dim
        arrays = state_arrays(*order, sizes.channels, TAPS, corrects=False)
        self.cache: StateCache = State(arrays).with_drafts(drafts).make(ops, sequences + 1, None)
        for array in self.cache.arrays:  # what no sequence may read
            ops.assign(array, np.full(array.shape, 1 << 20 if array.dtype == np.int32 else np.nan))

    def step(self, parts: Sequence[tuple[int, int, int]], padding: tuple[int, int] = (0, 0)) -> list[np.ndarray]:
        """The results of tokens ``[first, end)`` of sequences, each ``(sequence, first, end)``.

        Sequences that follow themselves are drafts. ``padding``: rows of slot 0 at position 0, with a token each, and
        tokens behind the last sequence.
        """
        rows, tokens = padding
        counts = [end - first for _, first, end in parts] + [1] * rows
        slots = [sequence + 1 for sequence, _, _ in parts] + [0] * rows
        batch = ForwardBatch.packed(
            self.ops.array,
            [np.zeros(count) for count in counts],
            [first for _, first, _ in parts] + [0] * rows,
            [np.array(slots, np.int32)[:, None]],
        )
        batch = replace(batch, has_drafts=any(a[0] == b[0] for a, b in pairwise(parts)))
        x, texts = self.inputs, [self.inputs[s, a:b] for s, a, b in parts]
        given = self.ops.array(np.concatenate([*texts, np.full_like(x[0, : rows + tokens], 9)]))
        found = self.ops.host(self.ops.mamba2(given, self.spec, self.cache, batch))
        return np.split(found[: sum(counts) - rows], np.cumsum(counts[: len(parts)])[:-1])

    def whole(self, sequence: int) -> np.ndarray:
        """The results of a text that a layer with the same weights reads at once."""
        alone = Layer(self.ops, self.sizes, len(self.inputs))
        alone.inputs = self.inputs
        return alone.step([(sequence, 0, self.inputs.shape[1])])[0]


def silu(x: np.ndarray) -> np.ndarray:
    y: np.ndarray = x / (1 + np.exp(-x))
    return y


def recurrence(layer: Layer, sequence: int = 0) -> np.ndarray:
    """The results of a whole text in fp64, one token after another, by the equations of the paper."""
    sizes, taps = layer.sizes, layer.taps.astype(np.float64)
    inputs = layer.inputs[sequence].astype(np.float64)
    gate, xbc, steps = np.split(inputs, [sizes.features, sizes.features + sizes.channels], axis=1)
    padded = np.concatenate([np.zeros((TAPS - 1, sizes.channels)), xbc])
    mixed: np.ndarray = np.sum([taps[j] * padded[TAPS - 1 - j : len(padded) - j] for j in range(TAPS)], axis=0)
    mixed = silu(mixed if layer.conv_bias is None else mixed + layer.conv_bias)
    x, b, c = np.split(mixed, [sizes.features, sizes.features + sizes.groups * sizes.state_dim], axis=1)
    b, c = (
        np.repeat(y.reshape(len(y), sizes.groups, sizes.state_dim), sizes.heads // sizes.groups, axis=1) for y in (b, c)
    )
    x = x.reshape(len(x), sizes.heads, sizes.head_dim)
    dt = np.clip(np.log1p(np.exp(steps + layer.step_bias)), *sizes.step_limits)
    state, out = np.zeros((sizes.heads, sizes.state_dim, sizes.head_dim)), np.empty(x.shape)
    for t in range(len(x)):
        state *= np.exp(layer.rates * dt[t])[:, None, None]
        state += b[t, :, :, None] * (dt[t, :, None] * x[t])[:, None]
        out[t] = np.einsum("hn,hnp->hp", c[t], state) + layer.skip[:, None] * x[t]
    found = out.reshape(len(out), -1)
    if sizes.norm is None:
        return found * silu(gate)
    groups, norm_first = sizes.norm
    found = found if norm_first else found * silu(gate)
    parts = found.reshape(len(found), groups, -1)
    parts = parts / np.sqrt((parts * parts).mean(-1, keepdims=True) + 1e-6)
    found = parts.reshape(found.shape) * layer.norm_weight
    return found * silu(gate) if norm_first else found


SIZES = (
    Sizes(),
    Sizes(1, 3, 24, 8, norm=(1, False), has_bias=False),
    Sizes(3, 3, 12, 12, norm=(3, True)),
    Sizes(1, 2, 64, 128, norm=(2, False), step_limits=(0.2, 0.9)),
    Sizes(2, 4, 32, 256, norm=(2, True)),
    Sizes(1, 2, 72, 20, norm=(1, True)),  # a head has two blocks
)
each_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


@each_size
def test_it_is_the_recurrence(backend: Backend, sizes: Sizes) -> None:
    layer = Layer(backend, sizes)
    expected = recurrence(layer)
    assert_close(layer.step([(0, 0, LENGTH)])[0], expected, "Mamba 2", backend.activation_dtype, np.abs(expected).max())


@each_size
@pytest.mark.parametrize(
    "cuts", [[1] * LENGTH, [2, 1, 9, 1, 1, 16, 23], [CHUNK, 1, CHUNK, LENGTH - 2 * CHUNK - 1]], ids=len
)
def test_a_text_in_steps(backend: Backend, sizes: Sizes, cuts: list[int]) -> None:
    layer = Layer(backend, sizes)
    ends = np.cumsum([0, *cuts]).tolist()
    found = [layer.step([(0, first, end)])[0] for first, end in pairwise(ends)]
    np.testing.assert_array_equal(np.concatenate(found), layer.whole(0))


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(1, 6, 72, 136)], ids=str)
def test_a_long_text_in_steps(backend: Backend, sizes: Sizes) -> None:
    """Its chunks are prepared by another kernel where a step has enough of its tokens; a short text shares the step."""
    layer = Layer(backend, sizes, sequences=2, length=LONG)
    whole = [layer.whole(i) for i in range(2)]
    expected = recurrence(layer)
    assert_close(whole[0], expected, "Mamba 2", backend.activation_dtype, np.abs(expected).max())
    for cut in (1, CHUNK, 21):
        found = [layer.step([(1, 0, 3), (0, 0, cut)]), layer.step([(1, 3, 9), (0, cut, LONG)], (0, 5))]
        for i, end in enumerate((LONG, 9)):
            np.testing.assert_array_equal(np.concatenate([parts[1 - i] for parts in found]), whole[i][:end])


def test_a_text_that_is_cut_anywhere(backend: Backend) -> None:
    layer = Layer(backend, Sizes())
    whole = layer.whole(0)
    for cut in range(1, LENGTH):
        found = [layer.step([(0, 0, cut)])[0], layer.step([(0, cut, LENGTH)])[0]]
        np.testing.assert_array_equal(np.concatenate(found), whole)


def test_the_last_token_again(backend: Backend) -> None:
    """A prompt that is in the cache goes on from its last token, before and behind the end of a chunk."""
    layer = Layer(backend, Sizes())
    whole = layer.whole(0)
    for end in (2, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK):
        layer.step([(0, 0, end)])
        for first in (end - 1, end):
            np.testing.assert_array_equal(layer.step([(0, first, LENGTH)])[0], whole[first:])
            layer.step([(0, 0, end)])


def test_sequences_of_one_step(backend: Backend) -> None:
    """Decoding and reading ones, with padding; each has its own slot."""
    layer = Layer(backend, Sizes(), sequences=4)
    whole = [layer.whole(i) for i in range(4)]
    layer.step([(2, 0, 15), (1, 0, 16), (3, 0, 1)])
    parts = [(3, 1, 2), (1, 16, 17), (0, 0, 40), (2, 15, 33)]
    for found, (sequence, first, end) in zip(layer.step(parts, (0, 5)), parts, strict=True):
        np.testing.assert_array_equal(found, whole[sequence][first:end])
    parts = [(1, 17, 18), (0, 40, 41), (2, 33, 34)]
    for found, (sequence, first, end) in zip(layer.step(parts, (3, 2)), parts, strict=True):
        np.testing.assert_array_equal(found, whole[sequence][first:end])


@given(st.data())
def test_drafts_of_which_some_are_rejected(backend: Backend, data: Any) -> None:
    """Rows of drafts follow their sequence, also across the end of a chunk; rejected ones leave nothing."""
    drafts = data.draw(st.integers(1, 5))
    layer = Layer(backend, Sizes(1, 2, 8, 8), sequences=2, drafts=drafts)
    truth = [layer.whole(i) for i in range(2)]
    ends = [data.draw(st.integers(1, 20)) for _ in range(2)]
    layer.step([(i, 0, end) for i, end in enumerate(ends)])
    for _ in range(4):
        own = [data.draw(st.integers(0, drafts)) for _ in range(2)]
        kept = [data.draw(st.integers(0, n)) for n in own]
        texts = layer.inputs.copy()
        for i, (end, count) in enumerate(zip(ends, kept, strict=True)):
            layer.inputs[i, end + 1 + count :] *= -3  # of other tokens
        parts = [(i, end + d, end + d + 1) for i, end in enumerate(ends) for d in range(own[i] + 1)]
        found = layer.step(parts, (2, 1))
        layer.inputs = texts
        for result, (i, first, _) in zip(found, parts, strict=True):
            if first <= ends[i] + kept[i]:
                np.testing.assert_array_equal(result[0], truth[i][first])
        ends = [end + 1 + count for end, count in zip(ends, kept, strict=True)]
