"""Factors and errors: what they must be whatever the numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.checkpoint.recipe import CalibrationSettings, Scheme
from bminf_lite.models.spec import Fold
from bminf_lite.quantize.decisions import select_precision
from bminf_lite.quantize.errors import ErrorEvaluator, QuantizationCandidate, relative_error
from bminf_lite.quantize.smoothing import MAX_SHIFT, channel_factors, expand_channels, search_smoothing

PLAIN = Fold(("norm",), ("linear",))


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0.1, 0.5, 1.0]))
def test_factors_are_powers_of_two_and_shared_by_a_group(seed: int, block: int, repeat: int, exponent: float) -> None:
    random = np.random.default_rng(seed)
    fold = Fold((), (), block, repeat)
    count = 3 * block * repeat
    x, w = (np.exp(3 * random.standard_normal(count)).astype(np.float32) for _ in range(2))
    x[random.random(count) < 0.2] = 0
    factors = channel_factors(x, w, exponent, fold)
    exponents = np.log2(factors)
    assert factors.shape == (3 * block,) and (exponents == np.rint(exponents)).all()
    assert np.abs(exponents).max() <= MAX_SHIFT
    groups = expand_channels(factors, fold).reshape(3, repeat, block)
    assert (groups == groups[:, :1]).all()


@given(st.integers(0, 2**32))
def test_the_scale_of_a_row_does_not_matter_to_columns(seed: int) -> None:
    """So folds do not touch each other: one multiplies the rows that another one reads."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((5, 7)).astype(np.float32)
    scaled = weight * np.exp2(random.integers(-9, 9, (5, 1))).astype(np.float32)
    calibration_ops = CpuBackend().calibration_ops()
    np.testing.assert_array_equal(
        calibration_ops.relative_column_absmax(weight), calibration_ops.relative_column_absmax(scaled)
    )


def test_an_outlier_is_smoothed_away() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((300, 64)).astype(np.float32)
    weight = random.standard_normal((32, 64)).astype(np.float32)
    ops = CpuBackend()
    reached = ErrorEvaluator(ops, x, [weight]).errors(QuantizationCandidate(Scheme.W8A8))[0]
    x[:, 5] *= 64
    weight[:, 5] /= 64
    evaluator = ErrorEvaluator(ops, x, [weight])
    found = search_smoothing(evaluator, PLAIN, np.abs(x).max(axis=0), QuantizationCandidate(Scheme.W8A8))
    assert found.factors is not None and found.factors[5] > 8 * np.median(found.factors)
    plain = evaluator.errors(QuantizationCandidate(Scheme.W8A8))[0]
    assert evaluator.errors(QuantizationCandidate(Scheme.W8A8, found.factors))[0] < 2 * reached < 0.05 * plain


def test_the_error_counts_each_token_alike() -> None:
    random = np.random.default_rng(0)
    expected = random.standard_normal((100, 20)).astype(np.float32)
    expected[7] *= 1000  # a token with an enormous output, without an error
    got = expected * np.float32(1.1)
    got[7] = expected[7]
    assert abs(relative_error(got, expected) - 0.0099) < 0.0015
    assert relative_error(expected, expected) == 0
    assert relative_error(np.ones((3, 4)), np.zeros((3, 4))) == 0
    small = expected.copy()
    small[3] = 0  # an output of nothing counts by the median's size
    assert relative_error(small + np.float32(0.1), small) < 0.05


@given(st.integers(0, 2**32), st.floats(1e-6, 1e6))
def test_the_error_has_no_unit(seed: int, unit: float) -> None:
    random = np.random.default_rng(seed)
    expected, noise = random.standard_normal((2, 9, 4))
    one, other = (relative_error(u * (expected + 0.1 * noise), u * expected) for u in (1, unit))
    np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_cheapest_that_is_good_enough_is_chosen() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 48)).astype(np.float32)
    weight = random.standard_normal((16, 48)).astype(np.float32)
    weight[:, 9] = -weight[:, 4]
    evaluator = ErrorEvaluator(CpuBackend(), x, [weight])
    spiked = np.array(x)
    spiked[::3, [4, 9]] = 2000  # the two cancel, and the others are rounded away
    spoiled = ErrorEvaluator(CpuBackend(), spiked, evaluator.matrices)
    w8a8, limits = QuantizationCandidate(Scheme.W8A8), CalibrationSettings(max_error=0.001, outlier_columns=2)
    assert select_precision(evaluator, w8a8, limits, np.abs(x).max(axis=0))[0] is w8a8
    kept, error = select_precision(spoiled, w8a8, limits, np.abs(spiked).max(axis=0))
    assert kept.outliers is not None and kept.outliers.tolist() == [4, 9] and error < 0.001
    none = CalibrationSettings(max_error=0.001)
    assert select_precision(spoiled, w8a8, none, np.abs(spiked).max(axis=0))[0].scheme is Scheme.W8A16
    assert select_precision(spoiled, w8a8, CalibrationSettings(), np.abs(spiked).max(axis=0))[0] is w8a8
