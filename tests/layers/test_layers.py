"""What layers do beyond the equations that tests/models compares with transformers'."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import quantize_weight
from bminf_lite.errors import CheckpointError
from bminf_lite.layers.linear import Linear
from bminf_lite.layers.loading import RowTransform, TransformedWeights


def test_permuted_weights_in_int8_permute_the_outputs():
    rng, rows = np.random.default_rng(0), np.array([5, 0, 3, 1, 2, 4])
    matrix, bias, x = (
        rng.standard_normal((6, 8)),
        rng.standard_normal(6),
        rng.standard_normal((5, 8)).astype(np.float32),
    )
    weights = SimpleNamespace(vector=lambda name: bias, weight=lambda name: quantize_weight(matrix.astype(np.float32)))
    y, permuted = (
        Linear(Backend(), w, ["a"], True)(x) for w in (weights, TransformedWeights(weights, {"a": RowTransform(rows)}))
    )
    np.testing.assert_allclose(permuted, y[:, rows], rtol=1e-5, atol=1e-6)


def test_matrices_quantized_differently_do_not_stack():
    matrix = np.ones((3, 8), np.float32)
    weights = SimpleNamespace(weight={"a.weight": matrix, "b.weight": quantize_weight(matrix)}.get)
    with pytest.raises(CheckpointError, match=r"a, b: .*quantized alike"):
        Linear(Backend(), weights, ["a", "b"])
