"""Gated DeltaNet: against the recurrence token by token, and with the same bits however a text is cut into steps."""

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
from bminf_lite.backend.values import DeltaNetSpec, ForwardBatch, Norm, ShortConvolution
from bminf_lite.layers.cache import State

LENGTH, TAPS = 3 * CHUNK + 5, 4
LONG = 150
"""Tokens of a text whose chunks a kernel prepares."""


@dataclass(frozen=True)
class Heads:
    """The sizes of a layer."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 8
    max_rate: float = 1.0
    per_channel: bool = False

    @property
    def decays(self) -> int:
        return self.value_heads * (self.key_dim if self.per_channel else 1)

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class Layer:
    """A layer on a backend with the cache of some sequences, whose texts are ``qkvz`` and ``gates``.

    Sequence ``i`` has slot ``i + 1``.
    """

    def __init__(self, ops: Backend, heads: Heads, sequences: int = 1, drafts: int = 0, length: int = LENGTH):
        rng = np.random.default_rng([heads.key_heads, heads.value_heads, heads.key_dim])
        self.ops, self.heads = ops, heads
        self.taps = rng.standard_normal((TAPS, heads.channels)).astype(np.float32)
        self.rates = -np.exp(rng.uniform(-3, 2, heads.value_heads)).astype(np.float32)
        self.bias = rng.standard_normal(heads.decays).astype(np.float32)
        self.norm_weight = rng.uniform(0.5, 1.5, heads.value_dim).astype(np.float32)
        width = heads.channels + heads.value_heads * heads.value_dim
        self.qkvz = rng.standard_normal((sequences, length, width)).astype(ops.activation_dtype)
        self.gates = rng.standard_normal((sequences, length, heads.value_heads + heads.decays)).astype(np.float32)
        sizes = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim
        self.spec = DeltaNetSpec(
            *sizes, ShortConvolution(ops.array(self.taps)), ops.vector(self.rates), ops.vector(self.bias),
            Norm(ops.vector(self.norm_weight), 1e-6), heads.max_rate, heads.per_channel,
        )  # fmt: skip
        layout = State(state_arrays(*sizes, heads.channels, TAPS, heads.per_channel)).with_drafts(drafts)
        self.cache: StateCache = layout.make(ops, sequences + 1, None)
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
        qkvz, gates = (
            self.ops.array(np.concatenate([*(x[s, a:b] for s, a, b in parts), np.full_like(x[0, : rows + tokens], 9)]))
            for x in (self.qkvz, self.gates)
        )
        found = self.ops.host(self.mixed(qkvz, gates, batch))
        return np.split(found[: sum(counts) - rows], np.cumsum(counts[: len(parts)])[:-1])

    def mixed(self, qkvz: Any, gates: Any, batch: ForwardBatch) -> Any:
        if not self.heads.per_channel:
            return self.ops.gated_delta_net(qkvz, gates, self.spec, self.cache, batch)
        channels, heads = self.heads.channels, self.heads.value_heads
        host = [self.ops.host(x) for x in (qkvz, gates)]
        parts = host[0][:, :channels], host[1][:, :heads], host[1][:, heads:], host[0][:, channels:]
        arrays = [self.ops.array(np.ascontiguousarray(part)) for part in parts]
        return self.ops.kimi_delta(*arrays, self.spec, self.cache, batch)

    def whole(self, sequence: int) -> np.ndarray:
        """The results of a text that a layer with the same weights reads at once."""
        alone = Layer(self.ops, self.heads, len(self.qkvz))
        alone.qkvz, alone.gates = self.qkvz, self.gates
        return alone.step([(sequence, 0, self.qkvz.shape[1])])[0]


def recurrence(layer: Layer, sequence: int = 0) -> np.ndarray:
    """The results of a whole text in fp64, one token after another, by the equations of the paper."""
    heads, taps = layer.heads, layer.taps.astype(np.float64)
    qkvz, gates = (x[sequence].astype(np.float64) for x in (layer.qkvz, layer.gates))
    inputs, z = qkvz[:, : heads.channels], qkvz[:, heads.channels :]
    padded = np.concatenate([np.zeros((TAPS - 1, heads.channels)), inputs])
    mixed: np.ndarray = np.sum([taps[j] * padded[TAPS - 1 - j : len(padded) - j] for j in range(TAPS)], axis=0)
    mixed = mixed / (1 + np.exp(-mixed))
    keys = heads.key_heads * heads.key_dim
    group = heads.value_heads // heads.key_heads
    q, k = (
        np.repeat(x.reshape(-1, heads.key_heads, heads.key_dim), group, axis=1)
        for x in (mixed[:, :keys], mixed[:, keys : 2 * keys])
    )
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    v = mixed[:, 2 * keys :].reshape(-1, heads.value_heads, heads.value_dim)
    beta, a = heads.max_rate / (1 + np.exp(-gates[:, : heads.value_heads])), gates[:, heads.value_heads :]
    a = (a + layer.bias).reshape(len(a), heads.value_heads, -1)
    decay = np.exp(layer.rates[:, None] * np.log1p(np.exp(a)))  # of each channel, or of all
    state, out = np.zeros((heads.value_heads, heads.key_dim, heads.value_dim)), np.empty(v.shape)
    for t in range(len(v)):
        state *= decay[t, :, :, None]
        delta = beta[t, :, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
        state += k[t, :, :, None] * delta[:, None]
        out[t] = np.einsum("hk,hkv->hv", q[t], state) / np.sqrt(heads.key_dim)
    out *= layer.norm_weight / np.sqrt((out * out).mean(-1, keepdims=True) + 1e-6)
    found: np.ndarray = out.reshape(len(out), -1) * ((1 if heads.per_channel else z) / (1 + np.exp(-z)))
    return found


each_size = pytest.mark.parametrize(
    "heads",
    [Heads(), Heads(1, 3, 8, 24, 2.0), Heads(3, 3, 12, 12), Heads(1, 2, 128, 128), Heads(3, 3, 20, 24, 1.0, True)],
    ids=str,
)


@each_size
def test_it_is_the_recurrence(backend: Backend, heads: Heads) -> None:
    layer = Layer(backend, heads)
    expected = recurrence(layer)
    assert_close(
        layer.step([(0, 0, LENGTH)])[0], expected, "gated DeltaNet", backend.activation_dtype, np.abs(expected).max()
    )


@each_size
@pytest.mark.parametrize(
    "sizes", [[1] * LENGTH, [2, 1, 9, 1, 1, 16, 23], [CHUNK, 1, CHUNK, LENGTH - 2 * CHUNK - 1]], ids=len
)
def test_a_text_in_steps(backend: Backend, heads: Heads, sizes: list[int]) -> None:
    layer = Layer(backend, heads)
    ends = np.cumsum([0, *sizes]).tolist()
    found = [layer.step([(0, first, end)])[0] for first, end in pairwise(ends)]
    np.testing.assert_array_equal(np.concatenate(found), layer.whole(0))


@pytest.mark.parametrize("heads", [Heads(), Heads(1, 6, 24, 72), Heads(2, 2, 128, 72, 1.0, True)], ids=str)
def test_a_long_text_in_steps(backend: Backend, heads: Heads) -> None:
    """Its chunks are prepared by another kernel where a step has enough of its tokens; a short text shares the step."""
    layer = Layer(backend, heads, sequences=2, length=LONG)
    whole = [layer.whole(i) for i in range(2)]
    expected = recurrence(layer)
    assert_close(whole[0], expected, "gated DeltaNet", backend.activation_dtype, np.abs(expected).max())
    for cut in (1, CHUNK, 21):
        found = [layer.step([(1, 0, 3), (0, 0, cut)]), layer.step([(1, 3, 9), (0, cut, LONG)], (0, 5))]
        for i, end in enumerate((LONG, 9)):
            np.testing.assert_array_equal(np.concatenate([parts[1 - i] for parts in found]), whole[i][:end])


CHANNELS = Heads(2, 2, 12, 8, 1.0, True)
each_decay = pytest.mark.parametrize("heads", [Heads(), CHANNELS], ids=["a decay", "decays of channels"])


@each_decay
def test_a_text_that_is_cut_anywhere(backend: Backend, heads: Heads) -> None:
    layer = Layer(backend, heads)
    whole = layer.whole(0)
    for cut in range(1, LENGTH):
        found = [layer.step([(0, 0, cut)])[0], layer.step([(0, cut, LENGTH)])[0]]
        np.testing.assert_array_equal(np.concatenate(found), whole)


@each_decay
def test_the_last_token_again(backend: Backend, heads: Heads) -> None:
    """A prompt that is in the cache goes on from its last token, before and behind the end of a chunk."""
    layer = Layer(backend, heads)
    whole = layer.whole(0)
    for end in (2, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK):
        layer.step([(0, 0, end)])
        for first in (end - 1, end):
            np.testing.assert_array_equal(layer.step([(0, first, LENGTH)])[0], whole[first:])
            layer.step([(0, 0, end)])


def test_sequences_of_one_step(backend: Backend) -> None:
    """Decoding and reading ones, with padding; each has its own slot."""
    layer = Layer(backend, Heads(), sequences=4)
    whole = [layer.whole(i) for i in range(4)]
    layer.step([(2, 0, 15), (1, 0, 16), (3, 0, 1)])
    parts = [(3, 1, 2), (1, 16, 17), (0, 0, 40), (2, 15, 33)]
    for found, (sequence, first, end) in zip(layer.step(parts, (0, 5)), parts, strict=True):
        np.testing.assert_array_equal(found, whole[sequence][first:end])
    parts = [(1, 17, 18), (0, 40, 41), (2, 33, 34)]
    for found, (sequence, first, end) in zip(layer.step(parts, (3, 2)), parts, strict=True):
        np.testing.assert_array_equal(found, whole[sequence][first:end])


@each_decay
@given(data=st.data())
def test_drafts_of_which_some_are_rejected(backend: Backend, heads: Heads, data: Any) -> None:
    """Rows of drafts follow their sequence, also across the end of a chunk; rejected ones leave nothing."""
    drafts = data.draw(st.integers(1, 5))
    layer = Layer(backend, replace(heads, key_dim=8), sequences=2, drafts=drafts)
    truth = [layer.whole(i) for i in range(2)]
    ends = [data.draw(st.integers(1, 20)) for _ in range(2)]
    layer.step([(i, 0, end) for i, end in enumerate(ends)])
    for _ in range(4):
        own = [data.draw(st.integers(0, drafts)) for _ in range(2)]
        kept = [data.draw(st.integers(0, n)) for n in own]
        texts = layer.qkvz.copy()
        for i, (end, count) in enumerate(zip(ends, kept, strict=True)):
            layer.qkvz[i, end + 1 + count :] *= -3  # of other tokens
        parts = [(i, end + d, end + d + 1) for i, end in enumerate(ends) for d in range(own[i] + 1)]
        found = layer.step(parts, (2, 1))
        layer.qkvz = texts
        for result, (i, first, _) in zip(found, parts, strict=True):
            if first <= ends[i] + kept[i]:
                np.testing.assert_array_equal(result[0], truth[i][first])
        ends = [end + 1 + count for end, count in zip(ends, kept, strict=True)]
