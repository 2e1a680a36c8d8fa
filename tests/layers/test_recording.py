"""The hooks show each product's input under its tensors' names, and change nothing."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from model_kit import CONFIG
from tiny_models import RandomWeights, TinyModel

from bminf_lite.backend.base import Backend
from bminf_lite.backend.side_products import Adapter
from bminf_lite.layers.recording import PRODUCTS, LinearCall, LinearHooks

TOKENS = np.array([3, 1, 4, 1, 5], np.int32)


@pytest.mark.parametrize("quantized", [False, True])
def test_it_sees_each_product_once_and_changes_nothing(quantized):
    ops, weights = Backend(), RandomWeights(CONFIG, 5, quantized)
    seen: list[LinearCall] = []
    hooks = LinearHooks(ops, weights, seen.append)
    watched = TinyModel(hooks.ops, CONFIG, hooks.weights).run(TOKENS)
    np.testing.assert_array_equal(watched, TinyModel(ops, CONFIG, weights).run(TOKENS))
    block = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    names = [tuple(t.split(".")[-2] for t in call.tensors) for call in seen]
    assert names == [*block, *block, ("lm_head",)]
    assert [p.operation for p in seen[:4]] == ["linear", "linear_add", "gated_linear", "linear_add"]
    assert {p.operation for p in seen} < PRODUCTS
    assert all(t.startswith("model.layers.1.") for p in seen[4:8] for t in p.tensors)
    assert [p.x.shape[1] for p in seen] == [32, 32, 32, 48] * 2 + [32]
    np.testing.assert_array_equal(ops.linear(seen[-1].x, seen[-1].weight, fp32=True), watched)


def test_a_product_with_an_adapter_is_of_the_same_tensors():
    ops, weights = Backend(), RandomWeights(CONFIG, 5, False)
    seen: list[LinearCall] = []
    hooks = LinearHooks(ops, weights, seen.append)
    weight = hooks.ops.weight([hooks.weights.weight("lm_head.weight")])
    out, width = weight.shape
    adapted = hooks.ops.adapted(weight, Adapter(np.ones((2, width), np.float32), np.ones((out, 2), np.float32)))
    hooks.ops.linear(np.ones((1, width), np.float32), adapted)
    assert [(call.tensors, call.weight is adapted) for call in seen] == [(("lm_head.weight",), True)]


def test_every_operation_with_a_weight_is_observed():
    functions = inspect.getmembers(Backend, inspect.isfunction)
    operations = {name: inspect.signature(function).parameters for name, function in functions}
    assert {n for n, parameters in operations.items() if n[0] != "_" and "weight" in parameters} == PRODUCTS
