"""What layers do beyond the equations that tests/models compares with transformers'."""

from __future__ import annotations

import numpy as np
import pytest

from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import quantize_weight
from bminf_lite.errors import CheckpointError
from bminf_lite.layers.linear import Linear
from bminf_lite.layers.loading import PermutedWeights


class Tensors:
    """Two matrices ``[6, 8]`` and ``[3, 8]`` with biases; those in ``int8`` are quantized."""

    def __init__(self, *int8: str):
        rng = np.random.default_rng(0)
        self.tensors = {f"{n}.weight": rng.standard_normal((k, 8)).astype(np.float32) for n, k in (("a", 6), ("b", 3))}
        self.tensors |= {f"{n}.bias": rng.standard_normal(k).astype(np.float32) for n, k in (("a", 6), ("b", 3))}
        self.int8 = int8

    def vector(self, name):
        return self.tensors[name]

    def weight(self, name):
        return quantize_weight(self.tensors[name]) if name in self.int8 else self.tensors[name]


X = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)


@pytest.mark.parametrize("bias", [False, True])
def test_stacked_matrices_are_one_product(bias):
    weights = Tensors()
    expected = [X @ weights.vector(f"{n}.weight").T + bias * weights.vector(f"{n}.bias") for n in "ab"]
    y = Linear(Backend(), weights, ["a", "b"], bias)(X)
    np.testing.assert_allclose(y, np.concatenate(expected, axis=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("int8", [(), ("a.weight",)])
def test_permuted_weights_permute_the_outputs(int8):
    rows, weights = np.array([5, 0, 3, 1, 2, 4]), Tensors(*int8)
    y, permuted = (Linear(Backend(), w, ["a"], True)(X) for w in (weights, PermutedWeights(weights, rows)))
    np.testing.assert_allclose(permuted, y[:, rows], rtol=1e-5, atol=1e-6)


def test_logits_are_fp32_whatever_the_activation_type():
    half, layer = X.astype(np.float16), Linear(Backend(np.float16), Tensors(), ["a"])
    assert layer.fp32(half).dtype == np.float32 and layer(half).dtype == np.float16


def test_matrices_quantized_differently_do_not_stack():
    with pytest.raises(CheckpointError, match=r"a, b: .*quantized alike"):
        Linear(Backend(), Tensors("b.weight"), ["a", "b"])
