"""What layers do beyond the equations that tests/models compares with transformers'."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bminf_lite.backend.base import Backend
from bminf_lite.backend.functions import rotate
from bminf_lite.backend.quantization import Int8Weight, OutlierColumns, quantize_weight
from bminf_lite.errors import CheckpointError
from bminf_lite.layers.alibi import alibi_slopes
from bminf_lite.layers.linear import Linear, LinearParts
from bminf_lite.layers.loading import RowTransform, TransformedWeights
from bminf_lite.models._rotary import Rotary


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


@pytest.mark.parametrize("kind", ["float", "int8", "int8 with outlier columns"])
def test_transformed_weights_change_the_outputs(kind: str):
    """Rows in another order, and a factor on each; of an int8 matrix the codes stay."""
    rng, order = np.random.default_rng(1), np.array([5, 0, 3, 1, 2, 4])
    factors = rng.uniform(0.1, 3, 6).astype(np.float32)
    matrix, bias, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 8), (6,), (5, 8)))
    weight = matrix if kind == "float" else quantize_weight(matrix, dynamic=False)
    if "outlier" in kind:
        codes, columns = weight.codes.copy(), np.array([2, 5], np.int32)
        codes[:, columns] = 0
        weight = Int8Weight(codes, weight.scale, False, OutlierColumns(columns, matrix[:, columns].astype(np.float16)))
    weights = SimpleNamespace(vector=lambda name: bias, weight=lambda name: weight)
    changed = TransformedWeights(weights, {"a": RowTransform(order, factors)})
    y, transformed = (Linear(Backend(), w, ["a"], True)(x) for w in (weights, changed))
    np.testing.assert_allclose(transformed, y[:, order] * factors, rtol=2e-3 if "outlier" in kind else 1e-5, atol=2e-3)
    other = Linear(Backend(), TransformedWeights(weights, {"b": RowTransform(order, factors)}), ["a"], True)(x)
    np.testing.assert_array_equal(other, y)


@pytest.mark.parametrize("kind", ["int8", "int8 and float"])
def test_matrices_that_are_quantized_alike_are_one_product(kind: str):
    """Each part has the values of its own product, also where a checkpoint quantized the matrices in different ways."""
    rng = np.random.default_rng(4)
    first, second, biases = rng.standard_normal((6, 8)), rng.standard_normal((4, 8)), rng.standard_normal((2, 6))
    x = rng.standard_normal((5, 8)).astype(np.float32)
    matrices = {"a": quantize_weight(first.astype(np.float32)), "b": second.astype(np.float32)}
    if kind == "int8":
        matrices["b"] = quantize_weight(matrices["b"])
    vectors = {"a.bias": biases[0], "b.bias": biases[1, :4]}
    weights = SimpleNamespace(vector=vectors.__getitem__, weight=lambda name: matrices[name.removesuffix(".weight")])
    parts = LinearParts(Backend(), weights, ["a", "b"], bias=True)
    assert len(parts.products) == (1 if kind == "int8" else 2)
    for name, found in zip("ab", parts.fp32(x), strict=True):
        np.testing.assert_array_equal(found, Linear(Backend(), weights, [name], bias=True).fp32(x))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [4, 6, 12])
def test_a_rotation_of_a_part_of_a_head_is_one_of_halves(rotated: int, interleaved: bool):
    """Scores of rotated queries and keys, by pairs of elements in plain Python, and by the operation's halves."""
    rng, head_dim, scale = np.random.default_rng(2), 12, 1.25
    rotary = Rotary(tuple(rng.uniform(0.01, 1, rotated // 2)), scale, interleaved)
    q, k = rng.standard_normal((2, 7, head_dim))
    rotate_pairs = [plain_rotation(x, rotary) for x in (q, k)]
    change, rope = rotary.head_transform(head_dim), rotary.rope(Backend(), head_dim)
    halves = []
    for x in (q, k):
        x = x if change is None else change.apply(x.T).T
        halves.append(rotate(x.astype(np.float32)[:, None], np.arange(7), rope)[:, 0])
    np.testing.assert_allclose(halves[0] @ halves[1].T, rotate_pairs[0] @ rotate_pairs[1].T, rtol=1e-4, atol=1e-4)


def plain_rotation(x: np.ndarray, rotary: Rotary) -> np.ndarray:
    result = x.copy()
    for position, row in enumerate(x):
        for pair, frequency in enumerate(rotary.frequencies):
            i, j = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + rotary.size // 2)
            cos, sin = np.cos(position * frequency) * rotary.scale, np.sin(position * frequency) * rotary.scale
            result[position, i], result[position, j] = row[i] * cos - row[j] * sin, row[j] * cos + row[i] * sin
    return result


def test_matrices_quantized_differently_do_not_stack():
    matrix = np.ones((3, 8), np.float32)
    weights = SimpleNamespace(weight={"a.weight": matrix, "b.weight": quantize_weight(matrix)}.get)
    with pytest.raises(CheckpointError, match=r"a, b: .*quantized alike"):
        Linear(Backend(), weights, ["a", "b"])


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [*range(1, 9), 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_alibi_slopes_are_those_of_the_paper(heads, exponents):
    np.testing.assert_allclose(alibi_slopes(heads), np.exp2(-np.array(exponents)), rtol=1e-7)
