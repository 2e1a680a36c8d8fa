"""What a calibration computes on a device equals its definition: codes, scales and magnitudes bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_values import FLOAT_TYPES, ROWS, SEEDS, WIDTHS, norm_on, random_norm, random_rows
from tolerances import assert_close

from bminf_lite.backend.base import Backend

OUTPUTS = st.sampled_from([1, 3, 17, 64, 300])
TYPES = st.sampled_from(FLOAT_TYPES)


def random_matrix(rng: np.random.Generator, outputs: int, width: int, dtype: type) -> np.ndarray:
    """Rows of very different size, a row of zeros now and then, and rarely one too small for an fp16 scale."""
    matrix = random_rows(rng, outputs, width, np.float32)
    return (matrix * rng.choice([1, 1e-5], p=[0.9, 0.1])).astype(dtype)


def powers_of_two(rng: np.random.Generator, width: int) -> np.ndarray:
    return np.exp2(rng.integers(-4, 5, width)).astype(np.float32)


@pytest.mark.slow
@given(SEEDS, OUTPUTS, WIDTHS, TYPES, st.sampled_from([True, False, None]), st.booleans(), st.booleans())
def test_a_weight_is_the_one_that_quantizing_gives(
    backend: Backend, seed: int, outputs: int, width: int, dtype: type, dynamic: bool | None, scaled: bool, kept: bool
):
    """Seen through products with each input alone."""
    rng = np.random.default_rng(seed)
    values = random_matrix(rng, outputs, width, dtype)
    factors = powers_of_two(rng, width) if scaled and dynamic is not None else None
    index = np.sort(rng.choice(width, rng.integers(1, width + 1), replace=False)).astype(np.int32)
    outliers = index if kept and dynamic is not None else None
    found = []
    for ops in (backend, Backend(backend.activation_dtype.type)):
        calibration_ops = ops.calibration_ops()
        weight = calibration_ops.weight(calibration_ops.matrix(values), dynamic, factors, outliers)
        assert weight.shape == (outputs, width)
        alone = ops.array(np.eye(width, dtype=ops.activation_dtype))
        found.append(np.asarray(ops.host(ops.linear(alone, weight, fp32=True))))
    np.testing.assert_array_equal(*found)


@given(SEEDS, OUTPUTS, st.sampled_from([(64, 8), (48, 16), (130, 2), (640, 64), (2560, 256)]), TYPES, st.booleans())
def test_a_rotated_weight_is_the_one_that_quantizing_gives(
    backend: Backend, seed: int, outputs: int, shape: tuple[int, int], dtype: type, scaled: bool
):
    (width, block), rng = shape, np.random.default_rng(seed)
    values, factors = random_matrix(rng, outputs, width, dtype), powers_of_two(rng, width) if scaled else None
    x, found = random_rows(rng, 3, width, backend.activation_dtype.type), []
    for ops in (backend, Backend(backend.activation_dtype.type)):
        calibration_ops = ops.calibration_ops()
        weight = calibration_ops.weight(calibration_ops.matrix(values), True, factors, None, block)
        found.append(np.asarray(ops.host(ops.linear(ops.array(x), weight, fp32=True))))
    np.testing.assert_array_equal(*found)


@given(SEEDS, OUTPUTS, WIDTHS, TYPES)
def test_magnitudes_of_a_matrix(backend: Backend, seed: int, outputs: int, width: int, dtype: type):
    values = random_matrix(np.random.default_rng(seed), outputs, width, dtype)
    calibration_ops, definition = backend.calibration_ops(), Backend().calibration_ops()
    for name in ("weight_column_absmax", "relative_column_absmax"):
        got, expected = (getattr(t, name)(t.matrix(values)) for t in (calibration_ops, definition))
        np.testing.assert_array_equal(backend.host(got), expected)
        assert expected.dtype == np.float32


@given(SEEDS, ROWS, WIDTHS)
def test_magnitudes_and_rows_of_activations(backend: Backend, seed: int, rows: int, width: int):
    rng, calibration_ops = np.random.default_rng(seed), backend.calibration_ops()
    parts = [random_rows(rng, rows, width, backend.activation_dtype.type) for _ in range(2)]
    top = None
    for part in parts:
        top = calibration_ops.column_absmax(backend.array(part), top)
    np.testing.assert_array_equal(backend.host(top), np.abs(np.concatenate(parts)).max(axis=0).astype(np.float32))
    index = [rng.permutation(rows)[: rng.integers(1, rows + 1)] for _ in parts]
    joined = calibration_ops.joined(
        [calibration_ops.rows(backend.array(p), i) for p, i in zip(parts, index, strict=True)]
    )
    expected = np.concatenate([p[i] for p, i in zip(parts, index, strict=True)]).astype(np.float32)
    np.testing.assert_array_equal(backend.host(joined), expected)
    factors = powers_of_two(rng, width)
    for given_factors, quotient in ((None, expected), (factors, expected / factors)):
        divided = backend.host(calibration_ops.divided(joined, given_factors))
        assert divided.dtype == backend.activation_dtype
        np.testing.assert_array_equal(divided, quotient.astype(backend.activation_dtype))


@given(SEEDS, ROWS, WIDTHS)
def test_a_norm_is_seen_unrounded_and_can_be_used_afterwards(backend: Backend, seed: int, rows: int, width: int):
    rng, calibration_ops = np.random.default_rng(seed), backend.calibration_ops()
    residual, norm = random_rows(rng, rows, width, np.float32), norm_on(backend, random_norm(rng, width, True))
    expected = backend.host(backend.norm(backend.array(residual), norm)).copy()
    x = backend.norm(backend.array(residual), norm)
    np.testing.assert_array_equal(backend.host(calibration_ops.rows(x, np.arange(rows))), expected)
    np.testing.assert_array_equal(backend.host(calibration_ops.column_absmax(x)), np.abs(expected).max(axis=0))
    np.testing.assert_array_equal(backend.host(x), expected)


@given(SEEDS, ROWS, OUTPUTS)
def test_squares(backend: Backend, seed: int, rows: int, outputs: int):
    rng = np.random.default_rng(seed)
    expected = random_rows(rng, rows, outputs, np.float32)
    got = expected + rng.standard_normal((rows, outputs)).astype(np.float32) / 8
    pairs = zip(
        backend.calibration_ops().squares(backend.array(got), backend.array(expected)),
        Backend().calibration_ops().squares(got, expected),
        strict=True,
    )
    for squares, exact in pairs:
        assert squares.dtype == np.float64
        np.testing.assert_allclose(squares, exact, rtol=1e-12)


@given(SEEDS, OUTPUTS, WIDTHS, TYPES)
def test_a_float_weight_is_rounded_to_the_activation_type(
    backend: Backend, seed: int, outputs: int, width: int, dtype: type
):
    """Loaded for a model or made for a trial, it is the same."""
    rng = np.random.default_rng(seed)
    values = random_matrix(rng, outputs, width, dtype)
    x = random_rows(rng, 5, width, backend.activation_dtype.type)
    calibration_ops = backend.calibration_ops()
    one, other = (
        backend.host(backend.linear(backend.array(x), weight, fp32=True)).copy()
        for weight in (calibration_ops.weight(calibration_ops.matrix(values), None), backend.weight([values]))
    )
    np.testing.assert_array_equal(one, other)
    rounded = values.astype(backend.activation_dtype).astype(np.float64)
    # On an H200 the error of a subnormal number's product is that of the smallest normal one's.
    least = np.finfo(backend.activation_dtype).smallest_normal
    terms = np.maximum(np.abs(x.astype(np.float64)), least) @ np.maximum(np.abs(rounded), least).T
    assert_close(one, x.astype(np.float64) @ rounded.T, "linear, float sum", np.float32, terms)
