"""Products whose weight keeps a few input columns in fp16: the int8 product of the others, and what those add."""

from __future__ import annotations

import float64_operations as model
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_values import ROWS, SEEDS, WIDTHS, norm_on, random_int8, random_norm, random_rows
from tolerances import assert_close

from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import Int8Weight, OutlierColumns


def random_parts(rng: np.random.Generator, outputs: list[int], width: int, dynamic: bool) -> list[Int8Weight]:
    """Int8 weights with the same columns in fp16, one at least and all at most; the codes are zero there."""
    index = np.sort(rng.choice(width, rng.integers(1, width + 1), replace=False)).astype(np.int32)
    parts = []
    for count in outputs:
        part = random_int8(rng, count, width, dynamic)
        part.codes[:, index] = 0
        columns = OutlierColumns(index, rng.standard_normal((count, len(index))).astype(np.float16))
        parts.append(Int8Weight(part.codes, part.scale, dynamic, columns))
    return parts


def expected(
    x: np.ndarray, parts: list[Int8Weight], bias: np.ndarray | None, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """``x`` fp32 times stacked weights in fp64, and the magnitudes of what is added up in fp32."""
    assert parts[0].outliers is not None
    index, weight = parts[0].outliers.index, np.concatenate([p.dequantize() for p in parts]).astype(np.float64)
    kept, rest = model.rounded(x, dtype).astype(np.float64), np.array(x)
    product, terms = kept @ weight.T, np.abs(kept) @ np.abs(weight).T
    if parts[0].dynamic:
        rest[:, index] = 0
        kept, weight = kept[:, index], weight[:, index]
        codes, scale = (np.concatenate([getattr(p, name) for p in parts]) for name in ("codes", "scale"))
        others = model.w8a8_product(rest, codes, scale, None).astype(np.float64)
        product, terms = others + kept @ weight.T, np.abs(others) + np.abs(kept) @ np.abs(weight).T
    return (product, terms) if bias is None else (product + bias, terms + np.abs(bias))


OUTPUTS = st.lists(st.sampled_from([1, 3, 31, 64]), min_size=1, max_size=3)


@given(SEEDS, ROWS, WIDTHS, OUTPUTS, st.booleans(), st.booleans())
def test_linear(backend: Backend, seed: int, rows: int, width: int, outputs: list[int], dynamic: bool, with_bias: bool):
    rng = np.random.default_rng(seed)
    parts = random_parts(rng, outputs, width, dynamic)
    biases = [rng.standard_normal(n).astype(np.float32) if with_bias else None for n in outputs]
    x = random_rows(rng, rows, width, backend.activation_dtype.type)
    bias = np.concatenate(biases) if with_bias else None
    y, terms = expected(x.astype(np.float32), parts, bias, backend.activation_dtype)
    weight = backend.weight(parts, biases)
    assert weight.shape == (sum(outputs), width)
    got = backend.host(backend.linear(backend.array(x), weight, fp32=True))
    assert_close(got, y, "linear, float sum", np.float32, terms)
    got = backend.host(backend.linear(backend.array(x), weight))
    assert got.dtype == backend.activation_dtype
    assert_close(got, y, "linear, float sum", backend.activation_dtype, terms)


@given(SEEDS, ROWS, WIDTHS, st.booleans())
def test_added_to_the_residual_stream_and_gated(backend: Backend, seed: int, rows: int, width: int, dynamic: bool):
    rng = np.random.default_rng(seed)
    parts = random_parts(rng, [17, 17], width, dynamic)
    x = random_rows(rng, rows, width, backend.activation_dtype.type) / backend.activation_dtype.type(8)
    weight = backend.weight(parts)
    linear = backend.host(backend.linear(backend.array(x), weight)).astype(np.float32)
    residual = rng.standard_normal(linear.shape).astype(np.float32)
    added = backend.host(backend.linear_add(backend.array(x), weight, backend.array(residual)))
    np.testing.assert_array_equal(added, residual + linear)
    gated = backend.host(backend.gated_linear(backend.array(x), weight, "relu"))
    gate, up = np.split(linear, 2, axis=1)
    np.testing.assert_array_equal(gated, (np.maximum(gate, 0) * up).astype(backend.activation_dtype))


@given(SEEDS, ROWS, WIDTHS)
def test_behind_a_norm(backend: Backend, seed: int, rows: int, width: int):
    """The outliers' inputs are rounded, and the others quantized from fp32, as behind any norm."""
    rng = np.random.default_rng(seed)
    residual, norm = random_rows(rng, rows, width, np.float32), random_norm(rng, width, False)
    parts = random_parts(rng, [24], width, True)
    on_device = norm_on(backend, norm)
    normed = backend.host(backend.norm(backend.array(residual), on_device)).astype(np.float32)
    y, terms = expected(normed, parts, None, backend.activation_dtype)
    x = backend.norm(backend.array(residual), on_device)
    got = backend.host(backend.linear(x, backend.weight(parts), fp32=True))
    assert_close(got, y, "linear, float sum", np.float32, terms)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_outlier_that_is_not_finite_shows(backend: Backend, bad: float):
    rng = np.random.default_rng(1)
    part = random_parts(rng, [8], 32, True)[0]
    assert part.outliers is not None
    x = rng.standard_normal((3, 32)).astype(backend.activation_dtype)
    x[1, part.outliers.index[-1]] = bad
    got = backend.host(backend.linear(backend.array(x), backend.weight([part])))
    assert not np.isfinite(got[1]).any() and np.isfinite(got[[0, 2]]).all()
