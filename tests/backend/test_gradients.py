"""The gradients of a norm and of a softmax are those that differences of the operations' own values show."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bminf_lite.backend.functions import norm_statistics, normalise, softmax
from bminf_lite.backend.gradients import norm_gradients, normalised_from_output, softmax_gradient
from bminf_lite.backend.values import Norm

STEP = 1e-6
RANDOM = np.random.default_rng(0)
X, WEIGHT, BIAS, DY = (RANDOM.standard_normal(shape) for shape in ((3, 7), (7,), (7,), (3, 7)))


def differences(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """The gradient of ``sum(function(x) * DY)``, by central differences in fp64."""
    found = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        step = np.zeros_like(x)
        step[index] = STEP
        found[index] = ((function(x + step) - function(x - step)) * DY).sum() / (2 * STEP)
    return found


@pytest.mark.parametrize("center", [True, False])
def test_gradients_of_norms(center):
    def norm(x, weight, bias):
        return normalise(x, Norm(weight, 1e-5, bias, center), np.float64)

    mean, inverse = norm_statistics(X, 1e-5, center)
    normalised = (X - mean[:, None]) * inverse[:, None]
    found = norm_gradients(DY, normalised, WEIGHT, inverse, center)
    np.testing.assert_allclose(found.x, differences(lambda x: norm(x, WEIGHT, BIAS), X), atol=1e-8)
    np.testing.assert_allclose(found.weight, differences(lambda w: norm(X, w, BIAS), WEIGHT), atol=1e-8)
    np.testing.assert_allclose(found.bias, differences(lambda b: norm(X, WEIGHT, b), BIAS), atol=1e-8)
    np.testing.assert_allclose(normalised_from_output(norm(X, WEIGHT, BIAS), WEIGHT, BIAS), normalised)


def test_a_weight_of_zero_hides_what_it_multiplied():
    weight = np.array([1.0, 0.0])
    found = normalised_from_output(np.array([[2.0, 3.0]]), weight, None)
    np.testing.assert_array_equal(found, [[2.0, np.nan]])


def test_gradient_of_a_softmax():
    y = softmax(0.3 * X)
    np.testing.assert_allclose(softmax_gradient(DY, y, 0.3), differences(lambda x: softmax(0.3 * x), X), atol=1e-9)


def test_the_dtype_is_that_of_the_arguments():
    single = X.astype(np.float32)
    assert softmax_gradient(single, softmax(single), 0.5).dtype == np.float32
    mean, inverse = norm_statistics(single, 1e-5, True)
    assert {mean.dtype, inverse.dtype, norm_gradients(single, single, None, inverse, True).x.dtype} == {single.dtype}
