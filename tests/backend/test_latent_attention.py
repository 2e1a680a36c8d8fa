"""Attention to latent rows: against the expanded form, and with the same bits however a text is cut into steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bminf_lite.backend.base import Backend
from bminf_lite.backend.cache_values import LatentCache
from bminf_lite.backend.quantization import Int8Weight, quantize_weight
from bminf_lite.backend.rotation import rotated
from bminf_lite.backend.values import LATENT_SEGMENT, ForwardBatch, LatentSpec, Norm, PositionScale, Rope
from bminf_lite.errors import DeviceError
from bminf_lite.layers.cache import Latent

LENGTH = 150
"""Tokens of a text: more than a tile of keys, and than two blocks."""
SMALL = (3, 6, 4, 5, 16)
DEEPSEEK = (16, 128, 64, 128, 512)
"""Heads, and sizes of keys, of rotated keys, of values and of latents: of a test, and of DeepSeek-V2-Lite."""


class Layer:
    """Latent attention on ``ops`` with the cache of some sequences, whose texts are ``q`` and ``kv``."""

    def __init__(
        self, ops: Backend, sizes: tuple[int, ...] = SMALL, sequences: int = 1, int8: bool = False,
        position_scale: PositionScale | None = None, length: int = LENGTH,
    ):  # fmt: skip
        heads, nope, rotary, value, rank = sizes
        rng = np.random.default_rng(sizes)
        weight, frequencies = rng.uniform(0.5, 1.5, rank), 1 / 100 ** (np.arange(rotary // 2) / (rotary // 2))
        rope = Rope(ops.vector(frequencies), 1.1)
        self.ops = ops
        self.spec = LatentSpec(
            heads, nope, rotary, value, rank, (nope + rotary) ** -0.5, Norm(ops.vector(weight), 1e-6), rope,
            position_scale,
        )  # fmt: skip
        self.weight, self.frequencies = weight, frequencies
        self.matrix = (rng.standard_normal((heads * (nope + value), rank)) / rank**0.5).astype(np.float16)
        self.expand = ops.latent_weight(self.matrix, self.spec)
        self.q = rng.standard_normal((sequences, length, self.spec.query_features)).astype(ops.activation_dtype)
        self.kv = rng.standard_normal((sequences, length, rank + rotary)).astype(np.float32)
        blocks = -(-length // 64)
        self.cache: LatentCache = Latent(rank, rotary, int8).make(ops, 1 + sequences * blocks, None)
        self.tables = rng.permutation(np.arange(1, 1 + sequences * blocks)).reshape(sequences, blocks)
        for array in self.cache.arrays:  # what no sequence may read
            ops.assign(array[1:], np.full(array[1:].shape, 99 if array.dtype == np.int8 else np.nan, array.dtype))

    def fill(self) -> None:
        """Put anything into the rows of all tokens."""
        rng = np.random.default_rng(0)
        for array in self.cache.arrays:
            drawn = rng.integers(-127, 128, array.shape) if array.dtype == np.int8 else rng.uniform(-1, 1, array.shape)
            self.ops.assign(array[:], drawn.astype(array.dtype))

    def step(self, parts: Sequence[tuple[int, int, int]], padding: int = 0, bound: int = 0) -> list[np.ndarray]:
        """The results of tokens ``[first, end)`` of sequences, each ``(sequence, first, end)``.

        Sequences that follow themselves are drafts. There are ``padding`` tokens behind the last sequence. The host
        knows of sequences that they have at most ``bound`` tokens, or more, as in a captured step.
        """
        batch = ForwardBatch.packed(
            self.ops.array,
            [np.zeros(end - first) for _, first, end in parts],
            [first for _, first, _ in parts],
            [self.tables[[sequence for sequence, _, _ in parts]]],
        )
        batch = replace(
            batch, has_drafts=any(a[0] == b[0] for a, b in pairwise(parts)),
            max_context_len=max(batch.max_context_len, bound),
        )  # fmt: skip
        batch.tokens = self.ops.array(np.zeros(len(batch.tokens) + padding, np.int32))

        def packed(texts: np.ndarray) -> np.ndarray:
            rows = [texts[sequence, first:end] for sequence, first, end in parts]
            return np.concatenate([*rows, np.full((padding, texts.shape[2]), np.nan, texts.dtype)])

        q, kv = (self.ops.array(packed(texts)) for texts in (self.q, self.kv))
        found = self.ops.host(self.ops.latent_attention(q, kv, self.spec, self.expand, self.cache, batch))
        ends = np.cumsum([end - first for _, first, end in parts])
        return np.split(found[: ends[-1]], ends[:-1])

    def expanded(self, sequence: int) -> np.ndarray:
        """The results of a whole text in fp64, with a key and a value for each head: what the papers define."""
        spec, kv = self.spec, self.kv[sequence].astype(np.float64)
        q = self.q[sequence].astype(np.float64).reshape(len(kv), spec.heads, -1)
        latent = kv[:, : spec.rank]
        latent = latent / np.sqrt((latent**2).mean(axis=1, keepdims=True) + 1e-6) * self.weight
        matrix = self.matrix.astype(np.float64).reshape(spec.heads, spec.nope_dim + spec.value_dim, spec.rank)
        both = np.einsum("hdr,tr->thd", matrix, latent)
        shared = self.rotated(kv[:, None, spec.rank :]).repeat(spec.heads, axis=1)
        keys = np.concatenate([both[..., : spec.nope_dim], shared], axis=-1)
        queries = np.concatenate([q[..., : spec.nope_dim], self.rotated(q[..., spec.nope_dim :])], axis=-1)
        if spec.position_scale is not None:
            growth = np.log(1 + np.arange(len(q)) // spec.position_scale.original)
            queries *= (1 + spec.position_scale.beta * growth)[:, None, None]
        scores = np.einsum("qhd,khd->hqk", queries, keys) * spec.scale
        scores[:, ~np.tri(len(q), dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, both[..., spec.nope_dim :]).reshape(len(q), -1)

    def rotated(self, x: np.ndarray) -> np.ndarray:
        angles = np.arange(len(x))[:, None, None] * self.frequencies
        a, b = np.split(x, 2, axis=-1)
        c, s = np.cos(angles), np.sin(angles)
        return 1.1 * np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """The root of the mean squared difference, relative to the expected values'."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_rows_may_be_columns_of_wider_rows(backend: Backend, tokens: int) -> None:
    """As those of the product that makes compressed queries too; the norm of these reads columns as well."""
    sizes, before = (4, 32, 32, 32, 256), 96
    layers = [Layer(backend, sizes, length=tokens) for _ in range(2)]
    layer, rng = layers[0], np.random.default_rng(1)
    batch = ForwardBatch.packed(backend.array, [np.zeros(tokens)], [0], [layer.tables])
    q, kv = layer.q[0], layer.kv[0]
    compressed = rng.standard_normal((tokens, before)).astype(np.float32)
    wide = backend.array(np.concatenate([compressed, kv], axis=1))
    found = [
        backend.host(backend.latent_attention(backend.array(q), rows, layer.spec, own.expand, own.cache, batch))
        for own, rows in zip(layers, (backend.array(kv), wide[:, before:]), strict=True)
    ]
    np.testing.assert_array_equal(*found)
    norm = Norm(backend.vector(rng.uniform(0.5, 1.5, before)), 1e-6)
    weight = backend.weight([quantize_weight(rng.standard_normal((64, before)).astype(np.float32))])
    products = [
        backend.host(backend.linear(backend.norm(rows, norm), weight))
        for rows in (backend.array(compressed), wide[:, :before])
    ]
    np.testing.assert_array_equal(*products)


@pytest.mark.parametrize("position_scale", [None, PositionScale(0.3, 40)], ids=str)
@pytest.mark.parametrize("int8", [False, True])
def test_it_is_the_expanded_form(backend: Backend, int8: bool, position_scale: PositionScale | None) -> None:
    """fp32 rounds sums of hundreds of terms; fp16 rounds rows, queries, weights and means to 2^-11 each; int8 rounds
    rows to a half of 1/127 of their largest element, which is 2 to 3 times their root mean square."""
    layer = Layer(backend, position_scale=position_scale, int8=int8)
    mark = 0.015 if int8 else 1e-5 if backend.activation_dtype == np.float32 else 2e-3
    assert error(layer.step([(0, 0, LENGTH)])[0], layer.expanded(0)) < mark


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_it_is_the_expanded_form_at_a_real_size(backend: Backend, int8: bool) -> None:
    layer = Layer(backend, DEEPSEEK, int8=int8)
    mark = 0.015 if int8 else 1e-5 if backend.activation_dtype == np.float32 else 2e-3
    assert error(layer.step([(0, 0, LENGTH)])[0], layer.expanded(0)) < mark


@pytest.mark.parametrize("int8", [False, True])
def test_a_prompt_cut_at_every_position(backend: Backend, int8: bool) -> None:
    """Pieces of one token, and then of two from each position on: tokens have the bits that they have in one step."""
    whole = Layer(backend, int8=int8).step([(0, 0, LENGTH)])[0]
    layer = Layer(backend, int8=int8)
    decoded = [layer.step([(0, token, token + 1)])[0] for token in range(LENGTH)]
    np.testing.assert_array_equal(np.concatenate(decoded), whole)
    for cut in range(LENGTH - 2):
        np.testing.assert_array_equal(layer.step([(0, cut, cut + 2)])[0], whole[cut : cut + 2])


@pytest.mark.parametrize("int8", [False, True])
@settings(max_examples=10)
@given(data=st.data())
def test_sequences_of_a_step_do_not_see_each_other(backend: Backend, int8: bool, data: st.DataObject) -> None:
    """Decoding, reading and drafting ones, in any order, with padding behind them."""
    layer = Layer(backend, sequences=3, int8=int8)
    whole = [layer.step([(sequence, 0, LENGTH)])[0] for sequence in range(3)]
    parts = []
    for sequence in data.draw(st.permutations(range(3))):
        first = data.draw(st.integers(0, LENGTH - 8))
        if data.draw(st.booleans()):
            parts += [(sequence, token, token + 1) for token in range(first, first + data.draw(st.integers(1, 4)))]
        else:
            parts.append((sequence, first, data.draw(st.integers(first + 1, LENGTH))))
    found = layer.step(parts, data.draw(st.integers(0, 5)))
    for (sequence, first, end), result in zip(parts, found, strict=True):
        np.testing.assert_array_equal(result, whole[sequence][first:end])


@pytest.mark.parametrize("int8", [False, True])
def test_segments_are_merged_in_one_order(backend: Backend, int8: bool) -> None:
    """A text of three segments, read in pieces whose ends lie around theirs, in steps that may grow beyond them."""
    length = 2 * LATENT_SEGMENT + 40
    layer = Layer(backend, int8=int8, length=length)
    whole = layer.step([(0, 0, length)])[0]
    mark = 0.015 if int8 else 1e-5 if backend.activation_dtype == np.float32 else 2e-3
    assert error(whole, layer.expanded(0)) < mark
    layer, ends = Layer(backend, int8=int8, length=length), (0, 255, 256, 257, 511, 513, length)
    for bound, (first, end) in enumerate(pairwise(ends)):
        found = layer.step([(0, first, end)], bound=bound * LATENT_SEGMENT)
        np.testing.assert_array_equal(found[0], whole[first:end])


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
def test_blocks_share_segments_in_any_way(cuda_backend: Any, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block for three segments, two, or one for each give the same bits to a prompt and to one token."""
    kernel, length = cuda_backend.kernels.latent_attention, 2 * LATENT_SEGMENT + 40
    chosen, found = kernel.grid, []
    for blocks in (1, 2, 3):
        records = 1 if blocks == 1 else 3
        monkeypatch.setattr(kernel, "grid", lambda *a, n=blocks, r=records: replace(chosen(*a), blocks=n, records=r))
        layer = Layer(cuda_backend, int8=int8, length=length)
        found.append(np.concatenate(layer.step([(0, 0, length - 1)]) + layer.step([(0, length - 1, length)])))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rank", [256, 512])
def test_clusters_for_few_rows_give_the_same_bits(
    cuda_backend: Any, rank: int, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, two and three segments, a whole one, sequences of a step, drafts, and padding behind them."""
    kernel, length = cuda_backend.kernels.latent_attention, 2 * LATENT_SEGMENT + 20
    ends = (1, 200, LATENT_SEGMENT, LATENT_SEGMENT + 1, 300, 2 * LATENT_SEGMENT + 1, length)
    found = []
    for few in (0, 1000):
        monkeypatch.setattr(type(kernel), "max_few", few)
        results: list[np.ndarray] = []
        layer = Layer(cuda_backend, (5, 16, 64, 16, rank), 2, int8=int8, length=length)
        layer.fill()
        for parts in (
            *([(0, end - 1, end)] for end in ends), [(1, 290, 300), (0, 99, 100)],
            [(0, token, token + 1) for token in range(length - 4, length)] + [(1, 255, 256)],
            [(1, 299, 300), (0, 99, 100)],
        ):  # fmt: skip
            with cuda_backend.kernels.in_step():  # rows of earlier steps are read at once
                results += layer.step(parts, padding=2, bound=300)
        found.append(np.concatenate(results))
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
def test_products_merge_the_records_of_few_tokens(
    cuda_backend: Any, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of a sequence whose pairs are two tiles, and sequences behind it: with the bits of merges before."""
    kernel, length, found = cuda_backend.kernels.latent_attention, LATENT_SEGMENT + 40, []
    monkeypatch.setattr(type(kernel), "max_few", 1000)
    for merges in (False, True):
        if not merges:
            monkeypatch.setattr(type(kernel), "merges", lambda *_: False)
        layer, results = Layer(cuda_backend, (20, 16, 64, 48, 256), 2, int8=int8, length=length), []
        layer.fill()
        for parts in ([(0, length - 2, length), (1, 99, 100)], [(1, 270, 271), (0, 255, 257)], [(0, 255, 256)]):
            results += layer.step(parts, padding=1, bound=length)
        found.append(np.concatenate(results))
        monkeypatch.undo()
        monkeypatch.setattr(type(kernel), "max_few", 1000)
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("rank", [256, 512])
def test_wgmma_gives_the_same_bits(cuda_backend: Any, rank: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of which some are partly empty, with one block, a cluster of two, or three; and sequences of a step."""
    kernel, length = cuda_backend.kernels.latent_attention, 2 * LATENT_SEGMENT + 100
    if not kernel.has_wgmma:
        pytest.skip("needs wgmma")
    ends, found, chosen = (1, 64, LATENT_SEGMENT, LATENT_SEGMENT + 1, length), [], kernel.grid
    monkeypatch.setattr(type(kernel), "max_few", 0)
    for has_wgmma in (False, True):
        monkeypatch.setattr(type(kernel), "has_wgmma", has_wgmma)
        if has_wgmma:
            records = 1 if blocks == 1 else 3

            def divided(*arguments: Any, records: int = records) -> Any:
                found = replace(chosen(*arguments), blocks=blocks, records=records)
                return replace(found, residents=2 * found.tiles) if blocks == 2 else found  # a cluster for each tile

            monkeypatch.setattr(kernel, "grid", divided)
        layer, results = Layer(cuda_backend, (5, 16, 64, 16, rank), 2, length=length), []
        layer.fill()
        for parts in (
            *([(0, end - 1, end)] for end in ends), [(1, 290, 300), (0, 99, 100)], [(0, 250, 280)],
            [(1, length - 20, length)],
        ):  # fmt: skip
            results += layer.step(parts, padding=2, bound=3 * LATENT_SEGMENT)
        found.append(np.concatenate(results))
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("by_input", [False, True])
def test_products_of_heads_have_the_same_bits_for_many_tokens(cuda_backend: Any, by_input: bool) -> None:
    """One block of tokens and a part of another, with factors and without; ``k`` has more chunks than a pipeline."""
    heads, tokens, kernels, array = 2, 140, cuda_backend.kernels, cuda_backend.array
    for k, n in ((320, 128), (64, 256)):
        rng = np.random.default_rng(k)
        width, rows_of_head, first = (n, k + 24, 8) if by_input else (k, n + 24, 16)
        x = array(rng.standard_normal((tokens, heads, k + 8)).astype(np.float16))
        w = array((rng.standard_normal((heads * rows_of_head, width)) / 16).astype(np.float16))
        factors = array(rng.uniform(1, 2, tokens).astype(np.float32))
        for many in (None, factors):
            found = []
            for piece in (tokens, 20):
                out = array(np.zeros((tokens, heads, n + 16), np.float16))
                for at in range(0, tokens, piece):
                    own = slice(at, at + piece)
                    kernels.head_products.launch(
                        kernels.step, x[own], heads * (k + 8), k + 8, w, first, rows_of_head, heads, k, n, by_input,
                        out[own], heads * (n + 16), n + 16, len(x[own]), None if many is None else many[own],
                    )  # fmt: skip
                found.append(cuda_backend.host(out))
            np.testing.assert_array_equal(found[0], found[1])
            assert found[0][:, :, :n].any(axis=(1, 2)).all() and not found[0][:, :, n:].any()


@pytest.mark.gpu
def test_sizes_that_no_kernel_takes(cuda_backend: Any) -> None:
    cases = {
        (2, 4, 4, 4, 12): "latents of 12", (2, 4, 4, 4, 520): "latents of 520", (2, 4, 3, 4, 16): "rotated keys of 3",
        (2, 4, 72, 4, 512): "rotated keys of 72",
    }  # fmt: skip
    for sizes, what in cases.items():
        with pytest.raises(DeviceError, match=what):
            Layer(cuda_backend, sizes)


def test_rows_are_stored_once_for_all_heads(backend: Backend) -> None:
    """Half of them in int8: 576 codes and two scales, in place of 1,152 bytes."""
    layout = Latent(512, 64)
    assert (layout.bytes_per_token(), layout.with_int8(True).bytes_per_token()) == (1152, 580)
    assert layout.bytes_per_sequence() == 0 and layout.with_drafts(3) == layout
    for int8 in (False, True):
        cache = layout.with_int8(int8).make(backend, 2, None)
        itemsize = backend.activation_dtype.itemsize
        assert sum(x.nbytes for x in cache.arrays) == 128 * layout.with_int8(int8).bytes_per_token(itemsize)


@pytest.mark.parametrize("rotation", [1, 16])
def test_an_int8_matrix_becomes_float(rotation: int) -> None:
    """Also where its inputs would be rotated: latents are not."""
    layer = Layer(Backend())
    stored = quantize_weight(rotated(layer.matrix, rotation), dynamic=True)
    found = layer.ops.latent_weight(Int8Weight(stored.codes, stored.scale, rotation=rotation), layer.spec)
    for name in ("keys", "values"):
        expected = getattr(layer.expand, name)
        np.testing.assert_allclose(getattr(found, name), expected, atol=np.abs(expected).max() / 100)
