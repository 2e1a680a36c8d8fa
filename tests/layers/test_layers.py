"""Layers are their equations over the backend's operations."""

from __future__ import annotations

import numpy as np
import pytest

from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import quantize_weight
from bminf_lite.backend.values import Norm
from bminf_lite.errors import CheckpointError
from bminf_lite.layers.embedding import Embedding
from bminf_lite.layers.linear import Linear, LMHead
from bminf_lite.layers.mlp import GatedMLP
from bminf_lite.layers.norm import RMSNorm


class Tensors(dict):
    """Checkpoint tensors by name; those named in ``int8`` are quantized."""

    int8: tuple[str, ...] = ()

    def vector(self, name):
        return self[name]

    def weight(self, name):
        return quantize_weight(self[name]) if name in self.int8 else self[name]


@pytest.fixture
def tensors() -> Tensors:
    rng = np.random.default_rng(0)
    shapes = {"a": (6, 8), "b": (3, 8), "m.gate_proj": (10, 8), "m.up_proj": (10, 8), "m.down_proj": (8, 10)}
    made = Tensors()
    for name, shape in shapes.items():
        made[f"{name}.weight"] = rng.standard_normal(shape).astype(np.float32)
        made[f"{name}.bias"] = rng.standard_normal(shape[0]).astype(np.float32)
    made["n.weight"] = rng.standard_normal(8).astype(np.float32)
    return made


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)


@pytest.mark.parametrize("bias", [False, True])
def test_stacked_matrices_are_one_product(tensors, x, bias):
    y = Linear(Backend(), tensors, ["a", "b"], bias)(x)
    expected = [x @ tensors[f"{n}.weight"].T + bias * tensors[f"{n}.bias"] for n in "ab"]
    np.testing.assert_allclose(y, np.concatenate(expected, axis=1), rtol=1e-5, atol=1e-6)


def test_add_to_adds_to_the_residual(tensors, x):
    residual = np.ones((5, 6), np.float32)
    y = Linear(Backend(), tensors, ["a"]).add_to(residual.copy(), x)
    np.testing.assert_allclose(y, residual + x @ tensors["a.weight"].T, rtol=1e-5, atol=1e-6)


def test_the_head_is_fp32_on_every_backend(tensors, x):
    assert LMHead(Backend(np.float16), tensors, ["a"])(x.astype(np.float16)).dtype == np.float32
    assert Linear(Backend(np.float16), tensors, ["a"])(x.astype(np.float16)).dtype == np.float16


def test_matrices_quantized_differently_do_not_stack(tensors):
    tensors.int8 = ("b.weight",)
    with pytest.raises(CheckpointError, match=r"a, b: .*quantized alike"):
        Linear(Backend(), tensors, ["a", "b"])


@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(tensors, x, bias):
    gate, up = (x @ tensors[f"m.{n}_proj.weight"].T + bias * tensors[f"m.{n}_proj.bias"] for n in ("gate", "up"))
    inner = gate / (1 + np.exp(-gate)) * up
    expected = x + inner @ tensors["m.down_proj.weight"].T + bias * tensors["m.down_proj.bias"]
    gate_up = Linear(Backend(), tensors, ["m.gate_proj", "m.up_proj"], bias)
    y = GatedMLP(Backend(), "silu", gate_up, Linear(Backend(), tensors, ["m.down_proj"], bias)).add_to(x.copy(), x)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_embedding_and_norm(tensors):
    rows = Embedding(Backend(), tensors, "a")(np.array([3, 0, 3], np.int32))
    np.testing.assert_array_equal(rows, tensors["a.weight"][[3, 0, 3]])
    norm = RMSNorm(Backend(), tensors, "n", 1e-5)
    assert isinstance(norm.norm, Norm) and norm.norm.eps == 1e-5
    expected = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-5) * tensors["n.weight"]
    np.testing.assert_allclose(norm(rows), expected, rtol=1e-5)
