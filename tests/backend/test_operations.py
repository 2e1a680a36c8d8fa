"""Every operation of every backend against float64 models; what is prescribed step by step is compared with ``==``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import float64_operations as model
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from random_values import (
    FLOAT_TYPES,
    ROWS,
    SEEDS,
    WIDTHS,
    make_batch,
    norm_on,
    random_codes,
    random_int8,
    random_norm,
    random_rows,
)
from tolerances import assert_close

from bminf_lite.backend.base import Backend
from bminf_lite.backend.communicator import OneRank
from bminf_lite.backend.functions import ACTIVATIONS
from bminf_lite.backend.values import Xielu


def in_activation_type(backend: Backend, x: np.ndarray) -> np.ndarray:
    """``x`` as the backend's operations would pass it on."""
    return x.astype(backend.activation_dtype)


# -- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.int8])
def test_arrays_make_the_round_trip(backend, dtype):
    values = np.arange(-6, 6).astype(dtype).reshape(3, 4)
    array = backend.array(values)
    np.testing.assert_array_equal(backend.host(array), values)
    assert backend.host(array).dtype == dtype
    backend.assign(array, values[::-1])
    np.testing.assert_array_equal(backend.host(array), values[::-1])


def test_an_array_is_a_copy(backend):
    values = np.zeros(3, np.float32)
    array = backend.array(values)
    values += 1
    np.testing.assert_array_equal(backend.host(array), 0)


def test_what_is_fetched_is_kept_until_it_is_there(backend):
    """Later arrays do not take its memory, also if the first result is waited for last, or not at all."""
    pending = []
    for i in range(8):
        array = backend.array(np.full(1 << 20, i, np.int32))
        pending.append(backend.fetch(array))
        del array
        backend.fetch(backend.array(np.full(1 << 20, -1, np.int32)))
    for i in (*range(7, -1, -1), 0):
        np.testing.assert_array_equal(pending[i](), i)


@pytest.mark.parametrize("count", [0, 1, 257, 1 << 14, (1 << 14) + 1])  # more than 2^14 words not by a kernel
def test_what_is_written_may_change_afterwards(backend, count):
    arrays, host = [backend.array(np.zeros(count, np.int32)) for _ in range(20)], np.zeros(count, np.int32)
    for i, array in enumerate(arrays):
        host[:] = np.arange(count) + i
        backend.write(array, host)
    host[:] = -1
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(backend.host(array), np.arange(count) + i)


def test_repeated_work_sees_new_inputs(backend):
    rng = np.random.default_rng(0)
    x = backend.array(in_activation_type(backend, rng.standard_normal((2, 64))))
    weight = backend.weight([random_int8(rng, 48, 64, True)])
    work = backend.capture(lambda: backend.linear(x, weight, fp32=True))
    for _ in range(4):
        backend.assign(x, in_activation_type(backend, rng.standard_normal((2, 64))))
        once = backend.host(backend.linear(x, weight, fp32=True)).copy()
        np.testing.assert_array_equal(backend.host(work()), once)


# -- quantization and products ----------------------------------------------------------------------------------------


@given(SEEDS, ROWS, WIDTHS, st.sampled_from([np.float16, np.float32]))
def test_quantize(backend, seed, rows, width, dtype):
    x = random_rows(np.random.default_rng(seed), rows, width, dtype)
    codes, scale = (backend.host(v) for v in backend.quantize(backend.array(x)))
    expected_codes, expected_scale = model.quantize(x)
    assert codes.dtype == np.int8 and scale.dtype == np.float32
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scale, expected_scale)


def test_quantize_rounds_half_to_even(backend):
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], np.float32)
    codes, _ = backend.quantize(backend.array(in_activation_type(backend, x)))
    np.testing.assert_array_equal(backend.host(codes), [[127, 0, 2, 2, 0, -2, -2, 126]])


def test_quantize_every_fp16_row_maximum(backend):
    """No maximum gives a code past 127 (it would wrap around), a NaN, or a largest code below 127."""
    largest = np.arange(0x7C00, dtype=np.uint16).view(np.float16)  # zero, subnormals and all finite numbers
    fractions = np.array([1, -1, 0.5, -0.25, 0.999, 0.004, 0, -0.75], np.float16)
    x = largest[:, None] * fractions
    codes, scale = (backend.host(v) for v in backend.quantize(backend.array(in_activation_type(backend, x))))
    assert codes.min() == -127 and codes.max() == 127
    np.testing.assert_array_equal(codes[0], 0)
    np.testing.assert_array_equal(np.abs(codes[1:]).max(axis=1), 127)
    np.testing.assert_array_equal(scale, largest.astype(np.float32) / np.float32(127))


@given(SEEDS, ROWS, WIDTHS, WIDTHS)
def test_igemm(backend, seed, rows, width, outputs):
    rng = np.random.default_rng(seed)
    x, w = random_codes(rng, rows, width), random_codes(rng, outputs, width)
    acc = backend.host(backend.igemm(backend.array(x), backend.array(w)))
    assert acc.dtype == np.int32
    np.testing.assert_array_equal(acc, model.int_product(x, w))


@pytest.mark.parametrize("width", [1023, 1024, 1025, 1040, 4099, 131_071])
def test_igemm_is_exact_where_sums_are_largest(backend, width):
    x = np.full((3, width), 127, np.int8)
    w = np.array([[127], [-128]], np.int8).repeat(width, axis=1)
    acc = backend.host(backend.igemm(backend.array(x), backend.array(w)))
    np.testing.assert_array_equal(acc, model.int_product(x, w))


@given(SEEDS, ROWS, WIDTHS, st.lists(st.sampled_from([1, 3, 8, 31, 64]), min_size=1, max_size=3), st.data())
def test_linear_w8a8_is_the_prescribed_arithmetic(backend, seed, rows, width, outputs, data):
    rng = np.random.default_rng(seed)
    scale_type = data.draw(st.sampled_from(FLOAT_TYPES))
    has_bias = data.draw(st.lists(st.booleans(), min_size=len(outputs), max_size=len(outputs)))
    parts = [random_int8(rng, n, width, True, scale_type) for n in outputs]
    biases = [rng.standard_normal(n).astype(np.float32) if b else None for n, b in zip(outputs, has_bias, strict=True)]
    x = random_rows(rng, rows, width, backend.activation_dtype.type)
    bias = np.concatenate([np.zeros(n) if b is None else b for n, b in zip(outputs, biases, strict=True)])
    codes, scale = np.concatenate([p.codes for p in parts]), np.concatenate([p.scale for p in parts])
    expected = model.w8a8_product(x, codes, scale, bias if any(has_bias) else None)
    weight = backend.weight(parts, biases)
    np.testing.assert_array_equal(backend.host(backend.linear(backend.array(x), weight, fp32=True)), expected)
    y = backend.host(backend.linear(backend.array(x), weight))
    assert y.dtype == backend.activation_dtype
    np.testing.assert_array_equal(y, expected.astype(backend.activation_dtype))


@given(SEEDS, ROWS, WIDTHS, WIDTHS, st.sampled_from(["w8a16", *FLOAT_TYPES]), st.booleans())
def test_linear_with_float_sums(backend, seed, rows, width, outputs, kind, with_bias):
    rng = np.random.default_rng(seed)
    if kind == "w8a16":
        part = random_int8(rng, outputs, width, False)
        w = part.dequantize().astype(np.float64)
    else:
        part = rng.standard_normal((outputs, width)).astype(kind)
        w = model.rounded(part, backend.activation_dtype)
    bias = rng.standard_normal(outputs).astype(np.float32) if with_bias else None
    x = random_rows(rng, rows, width, backend.activation_dtype.type).astype(np.float64)
    expected = x @ w.T + (0 if bias is None else bias)
    terms = np.abs(x) @ np.abs(w).T + (0 if bias is None else np.abs(bias))
    weight = backend.weight([part], [bias])
    y = backend.linear(backend.array(in_activation_type(backend, x)), weight, fp32=True)
    assert_close(backend.host(y), expected, "linear, float sum", np.float32, terms)
    y = backend.linear(backend.array(in_activation_type(backend, x)), weight)
    assert_close(backend.host(y), expected, "linear, float sum", backend.activation_dtype, terms)


def test_weights_of_different_kinds_do_not_stack(backend):
    rng = np.random.default_rng(0)
    parts = random_int8(rng, 2, 8, True), random_int8(rng, 2, 8, False), rng.standard_normal((2, 8)).astype(np.float32)
    for a, b in ((0, 1), (1, 2), (2, 0)):
        with pytest.raises(ValueError, match="quantized alike"):
            backend.weight([parts[a], parts[b]])


class Product:
    """A random activation ``x`` and weights of one kind: their product and its terms' magnitudes, in float64."""

    def __init__(self, backend: Backend, seed: int, rows: int, width: int, outputs: list[int], kind: str):
        self.rng = np.random.default_rng(seed)
        int8 = [random_int8(self.rng, n, width, kind == "w8a8") for n in outputs]
        self.parts = [p.dequantize().astype(np.float16) if kind == "float" else p for p in int8]
        self.x = random_rows(self.rng, rows, width, backend.activation_dtype.type) / backend.activation_dtype.type(8)
        w = np.concatenate([p.astype(np.float64) if kind == "float" else p.dequantize() for p in self.parts])
        self.value, self.terms = self.x @ w.T.astype(np.float64), np.abs(self.x) @ np.abs(w.T.astype(np.float64))
        if kind == "w8a8":
            codes, scale = (np.concatenate([getattr(p, field) for p in int8]) for field in ("codes", "scale"))
            self.value = model.w8a8_product(self.x, codes, scale, None)
            self.terms = np.abs(self.value)


PRODUCTS = given(
    SEEDS, ROWS, WIDTHS, WIDTHS, st.sampled_from(["w8a8", "w8a16", "float"]), st.sampled_from(sorted(ACTIVATIONS))
)


@PRODUCTS
def test_linear_add(backend, seed, rows, width, outputs, kind, function):
    product = Product(backend, seed, rows, width, [outputs], kind)
    residual = product.rng.standard_normal((rows, outputs)).astype(np.float32)
    y = backend.linear_add(backend.array(product.x), backend.weight(product.parts), backend.array(residual))
    y = backend.host(y)
    assert y.dtype == np.float32
    added, terms = y.astype(np.float64) - residual, product.terms + np.abs(residual)
    assert_close(added, product.value, "linear_add", backend.activation_dtype, terms)


@dataclass(frozen=True)
class TwinRank:
    """A rank whose other rank has the same product."""

    tp_rank: int = 0
    tp_size: int = 2

    def all_reduce_add(self, x: Any) -> Any:
        return x + x

    def abort(self) -> None:
        pass

    def check(self) -> None:
        pass

    def reset(self) -> None:
        pass


@PRODUCTS
def test_all_reduce_add(backend, seed, rows, width, outputs, kind, function):
    """With one rank it is ``linear_add``, for w8a8 bit for bit; with a twin, the product counts twice."""
    product = Product(backend, seed, rows, width, [outputs], kind)
    residual = product.rng.standard_normal((rows, outputs)).astype(np.float32)
    bias = product.rng.standard_normal(outputs).astype(np.float32)
    x, weight = backend.array(product.x), backend.weight(product.parts)
    found, sums = [], []
    for ranks in (OneRank(), TwinRank()):
        backend.communicator = ranks
        try:
            y = backend.all_reduce_add(
                backend.linear(x, weight, fp32=True), backend.vector(bias), backend.array(residual)
            )
            found.append(backend.host(y).copy())
            again = backend.linear_add_of_ranks(x, weight, backend.vector(bias), backend.array(residual))
            np.testing.assert_array_equal(backend.host(again), found[-1])
            sums.append(backend.host(backend.all_reduce_add(backend.linear(x, weight, fp32=True))).copy())
        finally:
            backend.communicator = OneRank()
    whole = backend.linear_add(x, backend.weight(product.parts, [bias]), backend.array(residual))
    if kind == "w8a8":
        np.testing.assert_array_equal(found[0], backend.host(whole))
    for y, total, count in zip(found, sums, (1, 2), strict=True):
        assert y.dtype == total.dtype == np.float32
        value, terms = count * product.value + bias, count * product.terms + np.abs(bias) + np.abs(residual)
        assert_close(y.astype(np.float64) - residual, value, "linear_add", backend.activation_dtype, terms)
        assert_close(total, count * product.value, "linear, float sum", np.float32, count * product.terms)


@PRODUCTS
def test_gated_linear(backend, seed, rows, width, outputs, kind, function):
    product = Product(backend, seed, rows, width, [outputs] * 2, kind)
    gate, up = np.split(model.rounded(product.value, backend.activation_dtype), 2, axis=1)
    gate_terms, up_terms = np.split(product.terms, 2, axis=1)
    y = backend.host(backend.gated_linear(backend.array(product.x), backend.weight(product.parts), function))
    assert y.dtype == backend.activation_dtype
    expected = model.activation(function, gate) * up
    assert_close(y, expected, "gated_linear", backend.activation_dtype, gate_terms * up_terms)


@PRODUCTS
def test_activated_linear(backend, seed, rows, width, outputs, kind, function):
    product = Product(backend, seed, rows, width, [outputs], kind)
    bias = product.rng.standard_normal(outputs).astype(np.float32)
    x, weight = backend.array(product.x), backend.weight(product.parts, [bias])
    y = backend.host(backend.activated_linear(x, weight, function))
    assert y.dtype == backend.activation_dtype
    linear = backend.host(backend.linear(x, weight)).astype(np.float64)
    assert_close(y, model.activation(function, linear), "gated_linear", backend.activation_dtype, np.abs(linear))


# -- around the products ----------------------------------------------------------------------------------------------


@given(SEEDS, ROWS, WIDTHS, st.sampled_from(FLOAT_TYPES), st.sampled_from((1.0, 12.0, 73.5)))
def test_embed(backend, seed, rows, width, dtype, scale):
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((29, width)).astype(dtype)
    tokens = rng.integers(0, 29, rows).astype(np.int32)
    y = backend.host(backend.embed(backend.array(tokens), backend.table(table), scale))
    assert y.dtype == np.float32
    stored = model.rounded(table[tokens], backend.activation_dtype)
    np.testing.assert_array_equal(y, stored.astype(np.float32) * np.float32(scale))


@given(SEEDS, ROWS, WIDTHS, st.booleans())
def test_norm(backend, seed, rows, width, center):
    rng = np.random.default_rng(seed)
    x = random_rows(rng, rows, width, np.float32)
    norm = random_norm(rng, width, center)
    y = backend.host(backend.norm(backend.array(x), norm_on(backend, norm)))
    assert_close(y, model.norm(x, norm), "norm", backend.activation_dtype, model.norm_terms(x, norm))


@pytest.mark.parametrize("width", [8, 43, 1003, 1600, 4096])
@pytest.mark.parametrize("far", ["mean", "one element"])
def test_layer_norm_of_rows_far_from_zero(backend, width, far):
    """A mean of 1,000 deviations, and one element that far out: inputs are exact, so fp32 bounds the error.

    A mean in fp32 is wrong by a few units in the last place, which are 1,000 times as large beside the deviation.
    """
    rng = np.random.default_rng(width)
    x = rng.standard_normal((5, width)).astype(np.float32)
    x[:, slice(None) if far == "mean" else slice(3, 4)] += np.float32(1000)
    norm = random_norm(rng, width, True)
    y, expected = backend.host(backend.norm(backend.array(x), norm_on(backend, norm))), model.norm(x, norm)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=4 * 1000 * 2.0**-24 * np.abs(norm.weight).max())


@given(SEEDS, ROWS, WIDTHS, st.booleans())
def test_norm_add(backend, seed, rows, width, center):
    """The norm of what a layer gives, added to the stream; a norm of the stream before that keeps its value."""
    rng = np.random.default_rng(seed)
    x, residual = (random_rows(rng, rows, width, np.float32) for _ in range(2))
    norm, other = random_norm(rng, width, center), norm_on(backend, random_norm(rng, width, False))
    stream = backend.array(residual)
    before = backend.host(backend.norm(backend.array(residual), other)).copy()
    early = backend.norm(stream, other)
    y = backend.host(backend.norm_add(backend.array(x), norm_on(backend, norm), stream))
    terms = model.norm_terms(x, norm) + np.abs(residual)
    assert_close(y, residual + model.norm(x, norm), "norm", backend.activation_dtype, terms)
    np.testing.assert_array_equal(backend.host(early), before)


@given(SEEDS, ROWS, st.lists(WIDTHS, min_size=3, max_size=3), st.sampled_from((1, 8)))
def test_norm_qk(backend, seed, rows, widths, multiple):
    rng = np.random.default_rng(seed)
    q, k, v = (multiple * width for width in widths)
    qkv = random_rows(rng, rows, q + k + v, np.float32)
    q_norm, k_norm = random_norm(rng, q, False), random_norm(rng, k, False)
    y = backend.host(backend.norm_qk(backend.array(qkv), norm_on(backend, q_norm), norm_on(backend, k_norm)))
    assert y.dtype == backend.activation_dtype
    parts = (0, q, q_norm), (q, q + k, k_norm)
    for begin, end, norm in parts:
        alone = backend.host(backend.norm(backend.array(qkv[:, begin:end]), norm_on(backend, norm)))
        np.testing.assert_array_equal(y[:, begin:end], in_activation_type(backend, alone))
    np.testing.assert_array_equal(y[:, q + k :], in_activation_type(backend, qkv[:, q + k :]))


@given(SEEDS, WIDTHS, st.booleans(), st.booleans(), st.sampled_from(("int8", "w8a16", "float")), st.integers(1, 2))
def test_a_pending_norm_is_added_by_the_product_that_reads_it(backend, seed, width, center, normed, kind, rows):
    """Bit for bit as if it had been added before, for the product and for those that read the stream after it."""
    rng = np.random.default_rng(seed)
    x, residual = (random_rows(rng, rows, width, np.float32) for _ in range(2))
    post, pre, last = (norm_on(backend, random_norm(rng, width, center)) for _ in range(3))
    part = random_int8(rng, 40, width, kind == "int8")
    weight = backend.weight([part if kind != "float" else part.dequantize().astype(np.float16)])

    def results(early: bool) -> list[np.ndarray]:
        stream = backend.norm_add(backend.array(x), post, backend.array(residual))
        if early:
            backend.host(stream)
        first = backend.linear(backend.norm(stream, pre) if normed else stream, weight)
        stream = backend.norm_add(backend.array(x), last, stream)
        second = backend.linear(backend.norm(stream, pre), weight)
        return [backend.host(y).copy() for y in (first, second, stream)]

    for late, early in zip(results(False), results(True), strict=True):
        np.testing.assert_array_equal(late, early)


@given(SEEDS, ROWS, WIDTHS, WIDTHS)
def test_norm_then_quantize_and_multiply(backend, seed, rows, width, outputs):
    """What a layer does: a norm's last bit may move a code that is next to a tie, by one."""
    rng = np.random.default_rng(seed)
    residual = random_rows(rng, rows, width, np.float32)
    norm, part = random_norm(rng, width, False), random_int8(rng, outputs, width, True)
    x, weight = backend.norm(backend.array(residual), norm_on(backend, norm)), backend.weight([part])
    codes, scale = (backend.host(v) for v in backend.quantize(x))
    normed = model.norm(residual, norm).astype(np.float32)
    expected_codes, expected_scale = model.quantize(normed)
    assert np.abs(codes.astype(int) - expected_codes).max() <= 1
    assert_close(scale, expected_scale, "norm", backend.activation_dtype, expected_scale)
    x = backend.norm(backend.array(residual), norm_on(backend, norm))
    expected = model.w8a8_product(normed, part.codes, part.scale, None)
    one_code = expected_scale[:, None] * np.abs(part.dequantize()).max(axis=1)
    assert_close(backend.host(backend.linear(x, weight, fp32=True)), expected, "norm, then w8a8", np.float32, one_code)


@given(SEEDS, ROWS, WIDTHS)
def test_norms_are_of_the_stream_before_it_changes(backend, seed, rows, width):
    """Attention and feed-forward side by side: both norms are taken first, and the second is used after an addition."""
    rng = np.random.default_rng(seed)
    residual, part = random_rows(rng, rows, width, np.float32), random_int8(rng, width, width, True)
    norms = [norm_on(backend, random_norm(rng, width, True)) for _ in range(2)]
    alone = [backend.host(backend.norm(backend.array(residual), norm)).copy() for norm in norms]
    stream = backend.array(residual)
    x, y = (backend.norm(stream, norm) for norm in norms)
    np.testing.assert_array_equal(backend.host(x), alone[0])
    backend.host(backend.linear_add(x, backend.weight([part]), stream))
    np.testing.assert_array_equal(backend.host(y), alone[1])


@given(SEEDS, st.lists(st.integers(1, 9), min_size=1, max_size=5))
@example(0, [1])
@example(0, [1, 1, 1])
def test_last_tokens(backend, seed, counts):
    x = np.random.default_rng(seed).standard_normal((sum(counts), 12)).astype(np.float32)
    batch = make_batch(backend, counts, [0] * len(counts))
    y = backend.host(backend.last_tokens(backend.array(x), batch))
    np.testing.assert_array_equal(y, x[np.cumsum(counts) - 1])


@given(SEEDS, st.lists(st.tuples(st.integers(1, 9), st.integers(0, 11)), min_size=1, max_size=4), WIDTHS)
def test_add_positions(backend, seed, sequences, width):
    rng = np.random.default_rng(seed)
    counts, context_lens = [n for n, _ in sequences], [p for _, p in sequences]
    table = rng.standard_normal((20, width)).astype(backend.activation_dtype)
    residual = rng.standard_normal((sum(counts), width)).astype(np.float32)
    batch = make_batch(backend, counts, context_lens)
    y = backend.host(backend.add_positions(backend.array(residual), backend.table(table), batch))
    positions = np.concatenate([p + np.arange(n) for n, p in sequences])
    np.testing.assert_array_equal(y, residual + table[positions].astype(np.float32))


@given(SEEDS, st.lists(st.integers(1, 9), min_size=1, max_size=4), WIDTHS, st.booleans())
def test_add_token_types(backend, seed, counts, width, has_types):
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((3, width)).astype(backend.activation_dtype)
    residual = rng.standard_normal((sum(counts), width)).astype(np.float32)
    types = rng.integers(0, 3, sum(counts)).astype(np.int32)
    batch = make_batch(backend, counts, [0] * len(counts))
    batch = replace(batch, token_types=backend.upload(types) if has_types else None)
    y = backend.host(backend.add_token_types(backend.array(residual), backend.table(table), batch))
    np.testing.assert_array_equal(y, residual + table[types if has_types else 0].astype(np.float32))


@given(SEEDS, st.integers(1, 5), WIDTHS)
def test_soft_cap(backend, seed, rows, width):
    x = (np.random.default_rng(seed).standard_normal((rows, width)) * 50).astype(np.float32)
    y = backend.host(backend.soft_cap(backend.array(x), 30.0))
    assert_close(y, 30 * np.tanh(x.astype(np.float64) / 30), "soft-cap", backend.activation_dtype)


@given(SEEDS, st.integers(1, 5), WIDTHS)
def test_xielu(backend, seed, rows, width):
    x = in_activation_type(backend, np.random.default_rng(seed).standard_normal((rows, width)) * 4)
    x[0, 0] = 0
    wide = x.astype(np.float64)
    y = backend.host(backend.xielu(backend.array(x), Xielu(0.7, 1.9, 0.5, -1e-6)))
    expected = np.where(wide > 0, 0.7 * wide**2, 1.9 * (np.expm1(np.minimum(wide, -1e-6)) - wide)) + 0.5 * wide
    assert y.dtype == backend.activation_dtype
    assert_close(y, expected, "xielu", backend.activation_dtype, 0.7 * wide**2 + 4 * np.abs(wide) + 1e-5)


def test_a_norm_can_be_the_residual_stream(backend):
    """Where norms come after layers, what they give is read by a layer and added to by it."""
    rng = np.random.default_rng(3)
    norm = random_norm(rng, 24, True)
    x = rng.standard_normal((5, 24)).astype(np.float32)
    weight = rng.standard_normal((24, 24)).astype(np.float16)
    stream = backend.norm(backend.array(x), norm_on(backend, norm))
    y = backend.linear_add(stream, backend.weight([weight]), stream)
    normed = model.norm(x, norm)
    expected = normed + normed @ weight.T.astype(np.float64)
    terms = np.abs(normed) @ np.abs(weight.T.astype(np.float64)) + np.abs(normed)
    assert_close(backend.host(y), expected, "gated_linear", backend.activation_dtype, terms)


@pytest.mark.parametrize("rows", [1, 5])
def test_all_layers_of_a_decoder_read_one_norm(backend, rows):
    """Several products of one norm are those of norms taken for each of them."""
    rng = np.random.default_rng(4)
    norm = norm_on(backend, random_norm(rng, 48, False))
    x = rng.standard_normal((rows, 48)).astype(np.float32)
    weights = [backend.weight([random_int8(rng, outputs, 48, True)]) for outputs in (32, 64, 48, 48)]
    read = backend.norm(backend.array(x), norm)
    products = [backend.host(backend.linear(read, weight)) for weight in weights]
    for weight, product in zip(weights, products, strict=True):
        alone = backend.linear(backend.norm(backend.array(x), norm), weight)
        np.testing.assert_array_equal(product, backend.host(alone))
