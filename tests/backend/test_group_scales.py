"""Scales of groups of columns: of a weight, of its input, or of both; against float64 models, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import float64_operations as model
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_values import ROWS, SEEDS, random_codes, random_rows
from tolerances import assert_close

from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import (
    Int8Weight,
    OutlierColumns,
    int8_parts,
    quantize_rows,
    quantize_weight,
    weight_columns,
)
from bminf_lite.layers.loading import RowTransform


@pytest.fixture(scope="module", params=[np.float32, np.float16])
def backend(request: pytest.FixtureRequest) -> Backend:
    """The reference with either activation type."""
    return Backend(request.param)


SHAPES = st.sampled_from([(1, 1), (1, 3), (8, 2), (16, 5), (31, 2), (32, 1), (32, 3), (33, 3), (64, 4), (128, 9)])
"""Columns of a group, and groups."""
SCALED = st.sampled_from(["weight", "input", "both"])
OUTPUTS = st.lists(st.sampled_from([1, 3, 31, 64]), min_size=1, max_size=2)


def random_part(
    rng: np.random.Generator, outputs: int, size: int, groups: int, scaled: str, dynamic: bool = True
) -> Int8Weight:
    """A weight whose scales differ widely from group to group."""
    shape = (outputs,) if scaled == "input" else (outputs, groups)
    scale = (10 ** rng.uniform(-3, 0, shape) * 0.01).astype(np.float32)
    codes = random_codes(rng, outputs, size * groups)
    return Int8Weight(codes, scale, dynamic, input_group_size=0 if scaled == "weight" else size)


def expected(x: np.ndarray, parts: list[Int8Weight], size: int) -> np.ndarray:
    """The prescribed fp32 steps of a product with quantized activations, group by group."""
    total: np.ndarray | None = None
    input_size = parts[0].input_group_size
    for g, first in enumerate(range(0, x.shape[1], size)):
        columns = slice(first, first + size)
        codes, x_scale = model.quantize(x[:, columns] if input_size else x)
        codes = codes if input_size else codes[:, columns]
        w = np.concatenate([p.codes[:, columns] for p in parts])
        w_scale = np.concatenate([p.scale if p.scale.ndim == 1 else p.scale[:, g] for p in parts])
        acc = model.int_product(codes, w).astype(np.float32)
        term = x_scale[:, None] * (w_scale.astype(np.float32)[None, :] * acc)
        total = term if total is None else total + term
    assert total is not None
    return total


@given(SEEDS, ROWS, SHAPES, SCALED, OUTPUTS, st.booleans())
def test_w8a8_is_the_prescribed_arithmetic(
    backend: Backend, seed: int, rows: int, shape: tuple[int, int], scaled: str, outputs: list[int], with_bias: bool
) -> None:
    rng, (size, groups) = np.random.default_rng(seed), shape
    parts = [random_part(rng, n, size, groups, scaled) for n in outputs]
    bias = [rng.standard_normal(n).astype(np.float32) if with_bias else None for n in outputs]
    x = random_rows(rng, rows, size * groups, backend.activation_dtype.type)
    y = expected(x, parts, size)
    if with_bias:
        y = y + np.concatenate([b for b in bias if b is not None])
    weight = backend.weight(parts, bias)
    got = backend.host(backend.linear(backend.array(x), weight, fp32=True))
    np.testing.assert_array_equal(got, y)
    got = backend.host(backend.linear(backend.array(x), weight))
    np.testing.assert_array_equal(got, y.astype(backend.activation_dtype))


@given(SEEDS, st.sampled_from([1, 3, 17, 65]), SHAPES, SCALED)
def test_epilogues(backend: Backend, seed: int, rows: int, shape: tuple[int, int], scaled: str) -> None:
    """Added to the residual stream, gated or activated is what the stored product becomes."""
    rng, (size, groups) = np.random.default_rng(seed), shape
    weight = backend.weight([random_part(rng, 34, size, groups, scaled)])
    x = random_rows(rng, rows, size * groups, backend.activation_dtype.type)
    linear = backend.host(backend.linear(backend.array(x), weight)).astype(np.float32)
    residual = rng.standard_normal(linear.shape).astype(np.float32)
    added = backend.host(backend.linear_add(backend.array(x), weight, backend.array(residual)))
    np.testing.assert_array_equal(added, residual + linear)
    gate, up = np.split(linear, 2, axis=1)
    gated = backend.host(backend.gated_linear(backend.array(x), weight, "relu"))
    np.testing.assert_array_equal(gated, (np.maximum(gate, 0) * up).astype(backend.activation_dtype))
    activated = backend.host(backend.activated_linear(backend.array(x), weight, "relu"))
    np.testing.assert_array_equal(activated, np.maximum(linear, 0).astype(backend.activation_dtype))


@given(SEEDS, ROWS, SHAPES, st.sampled_from([1, 31, 64]))
def test_w8a16(backend: Backend, seed: int, rows: int, shape: tuple[int, int], outputs: int) -> None:
    rng, (size, groups) = np.random.default_rng(seed), shape
    part = random_part(rng, outputs, size, groups, "weight", dynamic=False)
    x = random_rows(rng, rows, size * groups, backend.activation_dtype.type)
    w = part.dequantize().astype(np.float64)
    terms = np.abs(x.astype(np.float64)) @ np.abs(w).T
    got = backend.host(backend.linear(backend.array(x), backend.weight([part]), fp32=True))
    assert_close(got, x.astype(np.float64) @ w.T, "linear, float sum", np.float32, terms)


@pytest.mark.gpu
@given(
    SEEDS, st.sampled_from([1, 2, 4, 5, 33]), st.sampled_from([(32, 5), (64, 9), (128, 8), (256, 3), (1024, 2)]),
    st.lists(st.sampled_from([2, 34, 64]), min_size=1, max_size=2), st.booleans(), st.sampled_from([1, 16]),
)  # fmt: skip
def test_w8a16_on_a_gpu(
    cuda_backend: Backend, seed: int, rows: int, shape: tuple[int, int], outputs: list[int], half: bool, rotation: int
) -> None:
    """Scales in either type; those of wider groups are repeated."""
    rng, (size, groups) = np.random.default_rng(seed), shape
    parts = [random_part(rng, n, size, groups, "weight", dynamic=False) for n in outputs]
    parts = [
        replace(part, scale=part.scale.astype(np.float16 if half else np.float32), rotation=rotation) for part in parts
    ]
    x = random_rows(rng, rows, size * groups, np.float16)
    bias = [rng.standard_normal(n).astype(np.float32) for n in outputs]
    reference = Backend(np.float16)
    expected = reference.linear(reference.array(x), reference.weight(parts, bias), fp32=True)
    weight = np.concatenate([part.dequantize() for part in parts]).astype(np.float64)
    terms = np.abs(model_rotated(x, rotation)).astype(np.float64) @ np.abs(weight).T
    got = cuda_backend.host(cuda_backend.linear(cuda_backend.array(x), cuda_backend.weight(parts, bias), fp32=True))
    # a rotated input may be rounded to fp16, by 2^-11 of each term
    np.testing.assert_array_less(np.abs(got - expected), 2.0**-10 * terms + 1e-6)


@pytest.mark.parametrize("rotation", [1, 16])
@pytest.mark.parametrize("scaled", ["weight", "both"])
def test_beside_outliers_and_rotations(backend: Backend, rotation: int, scaled: str) -> None:
    """Groups are of the rotated input, and of what outlier columns leave; these are added behind all groups."""
    rng = np.random.default_rng(rotation)
    part, x = random_part(rng, 24, 32, 3, scaled), random_rows(rng, 5, 96, backend.activation_dtype.type)
    alone = replace(part, rotation=rotation)
    y = expected(model_rotated(x, rotation), [part], 32)
    np.testing.assert_array_equal(backend.host(backend.linear(backend.array(x), backend.weight([alone]), fp32=True)), y)
    if rotation > 1:
        return
    index = np.array([3, 40], np.int32)
    part.codes[:, index] = 0
    kept = rng.standard_normal((24, 2)).astype(np.float16)
    rest = np.array(x)
    rest[:, index] = 0
    y = expected(rest, [part], 32)
    side = x[:, index].astype(np.float64) @ kept.T.astype(np.float64)
    weight = backend.weight([replace(part, outliers=OutlierColumns(index, kept))])
    got = backend.host(backend.linear(backend.array(x), weight, fp32=True))
    terms = np.abs(y) + np.abs(x[:, index].astype(np.float64)) @ np.abs(kept.T.astype(np.float64))
    assert_close(got, y + side, "linear, float sum", np.float32, terms)


def model_rotated(x: np.ndarray, block: int) -> np.ndarray:
    """Blocks times Sylvester's matrix, step by step in fp32."""
    y = x.astype(np.float32).reshape(-1, block)
    h = 1
    while h < block:
        pairs = y.reshape(-1, block // (2 * h), 2, h)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(-1, block)
        h *= 2
    return (y * np.float32(block**-0.5)).reshape(x.shape) if block > 1 else x


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scaled", ["weight", "input", "both"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_input_that_is_not_finite_shows(backend: Backend, scaled: str, bad: float) -> None:
    rng = np.random.default_rng(1)
    weight = backend.weight([random_part(rng, 8, 32, 3, scaled)])
    x = rng.standard_normal((3, 96)).astype(backend.activation_dtype)
    x[1, 70] = bad
    got = backend.host(backend.linear(backend.array(x), weight))
    assert not np.isfinite(got[1]).any() and np.isfinite(got[[0, 2]]).all()


# -- quantization ------------------------------------------------------------------------------------------------------


@given(SEEDS, ROWS, SHAPES)
def test_a_group_is_quantized_as_a_row(seed: int, rows: int, shape: tuple[int, int]) -> None:
    rng, (size, groups) = np.random.default_rng(seed), shape
    x = random_rows(rng, rows, size * groups, np.float32)
    codes, scale = quantize_rows(x, size)
    weight = quantize_weight(x, group_size=size)
    assert scale.shape == weight.scale.shape == (rows, groups) and weight.group_size == size
    rows_alone = quantize_weight(x.reshape(rows * groups, size))
    np.testing.assert_array_equal(weight.codes.reshape(-1, size), rows_alone.codes)
    np.testing.assert_array_equal(weight.scale.ravel(), rows_alone.scale)
    np.testing.assert_array_equal(weight.dequantize().reshape(-1, size), rows_alone.dequantize())
    for g in range(groups):
        columns = slice(g * size, (g + 1) * size)
        alone, alone_scale = model.quantize(x[:, columns])
        np.testing.assert_array_equal(codes[:, columns], alone)
        np.testing.assert_array_equal(scale[:, g], alone_scale)


def test_groups_are_whole() -> None:
    x = np.ones((2, 12), np.float32)
    for quantize in (quantize_rows, lambda x, size: quantize_weight(x, group_size=size)):
        for size in (5, 24, -1):
            with pytest.raises(ValueError, match=f"12 columns are no groups of {size}: give a size that divides them"):
                quantize(x, size)


def test_what_does_not_fit_together_is_refused() -> None:
    rng = np.random.default_rng(0)
    part = random_part(rng, 4, 8, 3, "weight")
    with pytest.raises(ValueError, match="scales of equal groups"):
        int8_parts([part, replace(part, scale=part.scale[:, :2])])
    with pytest.raises(ValueError, match="scales of equal groups"):
        int8_parts([part, replace(part, input_group_size=8)])
    with pytest.raises(ValueError, match="24 columns are no 5 groups of equal size"):
        int8_parts([replace(part, scale=np.ones((4, 5), np.float32))])
    with pytest.raises(ValueError, match="of 8 columns, and of 12 elements of its input: groups must be equal"):
        int8_parts([replace(part, input_group_size=12)])
    with pytest.raises(ValueError, match="24 columns are no groups of 7"):
        int8_parts([replace(part, scale=part.scale[:, 0], input_group_size=7)])


def test_rows_and_columns_of_a_weight_keep_their_scales() -> None:
    rng = np.random.default_rng(0)
    part = random_part(rng, 4, 8, 3, "both")
    whole = part.dequantize()
    columns = weight_columns(part, slice(8, 24))
    assert isinstance(columns, Int8Weight) and columns.group_size == columns.input_group_size == 8
    np.testing.assert_array_equal(columns.dequantize(), whole[:, 8:24])
    with pytest.raises(ValueError, match="columns 0 to 12 divide a group of 8 columns that have one scale"):
        weight_columns(part, slice(0, 12))
    order, factors = np.array([2, 0]), np.array([0.5, 2], np.float32)
    turned = RowTransform(order, factors).apply_to_matrix(part)
    assert isinstance(turned, Int8Weight)
    np.testing.assert_array_equal(turned.dequantize(), whole[order] * factors[:, None])
