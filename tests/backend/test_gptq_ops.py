"""GPTQ on every backend: its root is the inverse of the damped Hessian, and codes are those of the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_values import FLOAT_TYPES, SEEDS

from bminf_lite.backend import gptq
from bminf_lite.backend.base import Backend
from bminf_lite.backend.gptq import Root, hessian, inverse_root, transformed_hessian
from bminf_lite.backend.quantization import quantize_weight
from bminf_lite.backend.rotation import rotated

TYPES = st.sampled_from(FLOAT_TYPES)
SMALL = st.sampled_from([1, 7, 16, 64, 65, 128])
LARGE = st.sampled_from([129, 200, 384])
few_examples = settings(max_examples=min(5, settings.default.max_examples))
"""For tests that decompose large matrices."""


def correlated(random: np.random.Generator, rows: int, inputs: int) -> np.ndarray:
    """Inputs that a few directions explain, some far larger than others, fp16 ``[rows, inputs]``."""
    few = max(inputs // 4, 1)
    x = random.standard_normal((rows, few)) @ random.standard_normal((few, inputs)) / few**0.5
    return ((x + 0.3 * random.standard_normal(x.shape)) * random.choice([1, 8], inputs)).astype(np.float16)


def powers_of_two(random: np.random.Generator, inputs: int) -> np.ndarray:
    return np.exp2(random.integers(-3, 4, inputs)).astype(np.float32)


def on_device(backend: Backend, root: Root) -> Any:
    """The definition's root, as the backend's own is."""
    if backend.name == "cpu":
        return root
    from bminf_lite.backend.cuda.backend import CudaBackend
    from bminf_lite.backend.cuda.gptq import DeviceRoot

    assert isinstance(backend, CudaBackend)
    return DeviceRoot(backend.arrays.upload(root.order.astype(np.int32)), backend.arrays.upload(root.values))


@few_examples
@given(SEEDS, st.one_of(SMALL, LARGE), st.booleans(), st.booleans())
def test_the_root_inverts_the_damped_hessian(backend: Backend, seed: int, inputs: int, scaled: bool, turned: bool):
    random, ops = np.random.default_rng(seed), backend.calibration_ops()
    parts = [correlated(random, 3 * inputs + 5, inputs) for _ in range(2)]
    factors, rotation = powers_of_two(random, inputs) if scaled else None, 8 if turned and inputs % 8 == 0 else 1
    total = None
    for part in parts:
        total = ops.add_hessian(backend.array(part.astype(backend.activation_dtype)), len(part) - 3, total)
    exact = transformed_hessian(hessian(np.concatenate([p[:-3] for p in parts]).astype(np.float32)), factors, rotation)
    root = ops.gptq_root(total, factors, rotation)
    order, values = np.asarray(backend.host(root.order)), np.asarray(backend.host(root.values), np.float64)
    assert sorted(order) == list(range(inputs)) and not np.tril(values, -1).any() and (np.diagonal(values) > 0).all()
    diagonal = np.diagonal(exact)[order]
    assert (np.diff(diagonal) <= 1e-3 * diagonal[:-1]).all()
    damped = exact[np.ix_(order, order)] + np.eye(inputs) * gptq.damping_of(np.diagonal(exact))
    np.testing.assert_allclose(values @ damped @ values.T, np.eye(inputs), atol=3e-3)


@given(SEEDS, SMALL, st.sampled_from([1, 3, 17, 64]), TYPES, st.booleans(), st.booleans())
def test_codes_of_one_block_are_the_definition_s(
    backend: Backend, seed: int, inputs: int, outputs: int, dtype: type, scaled: bool, turned: bool
):
    random, ops = np.random.default_rng(seed), backend.calibration_ops()
    values = random.standard_normal((outputs, inputs)).astype(dtype)
    factors, rotation = powers_of_two(random, inputs) if scaled else None, 8 if turned and inputs % 8 == 0 else 1
    root = inverse_root(
        transformed_hessian(hessian(correlated(random, 400, inputs).astype(np.float32)), factors, rotation)
    )
    found = ops.gptq_weight(ops.matrix(values), on_device(backend, root), factors, rotation)
    expected = Backend().calibration_ops().gptq_weight(values.astype(np.float32), root, factors, rotation)
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.scale, expected.scale)
    assert found.scale.dtype == expected.scale.dtype and found.rotation == rotation
    np.testing.assert_array_equal(
        found.scale,
        quantize_weight(rotated(values.astype(np.float32) * (1 if factors is None else factors), rotation)).scale,
    )


@few_examples
@given(SEEDS, LARGE, st.sampled_from([1, 40]))
def test_codes_of_several_blocks_differ_only_behind_a_tie(backend: Backend, seed: int, inputs: int, outputs: int):
    """A row is equal up to the first value that lies so near a tie that the order of a sum decides."""
    random, ops = np.random.default_rng(seed), backend.calibration_ops()
    weight = random.standard_normal((outputs, inputs)).astype(np.float32)
    root = inverse_root(hessian(correlated(random, 2 * inputs, inputs).astype(np.float32)))
    found = ops.gptq_weight(ops.matrix(weight), on_device(backend, root), None, 1)
    values, codes = rounded_values(weight, found.scale.astype(np.float32), root, found.codes)
    distance = np.abs(values - codes)
    wrong = (distance > 0.5 + 1e-3) & (np.abs(values) < 127)
    assert not wrong.any()


def rounded_values(
    weight: np.ndarray, scale: np.ndarray, root: Root, codes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What each code was rounded from, in fp64, if all codes before it are as they are; and the codes in that order."""
    rest, ordered = weight[:, root.order].astype(np.float64) / scale[:, None], codes[:, root.order].astype(np.float64)
    values = np.empty_like(rest)
    for column in range(rest.shape[1]):
        values[:, column] = rest[:, column]
        errors = (rest[:, column] - ordered[:, column]) / root.values[column, column]
        rest[:, column + 1 :] -= errors[:, None] * root.values[column, column + 1 :]
    return values, ordered


@pytest.mark.gpu
def test_a_gpu_rounds_a_product_as_the_definition_does(cuda_backend: Backend) -> None:
    """From the inputs on: the roots differ by rounding, and so do some codes, but not the product's error."""
    random = np.random.default_rng(0)
    x, weight = correlated(random, 2000, 320), random.standard_normal((96, 320)).astype(np.float32)
    errors = []
    for ops in (cuda_backend, Backend(np.float16)):
        calibration_ops = ops.calibration_ops()
        total = calibration_ops.add_hessian(ops.array(x), len(x))
        root = calibration_ops.gptq_root(total, None, 32)
        found = calibration_ops.gptq_weight(calibration_ops.matrix(weight), root, None, 32)
        noise = rotated(x.astype(np.float32), 32) @ (found.dequantize() - rotated(weight, 32)).T
        errors.append(np.square(noise).sum())
    plain = quantize_weight(rotated(weight, 32)).dequantize() - rotated(weight, 32)
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
    assert errors[0] < 0.8 * np.square(rotated(x.astype(np.float32), 32) @ plain.T).sum()
