"""The hooks show each product's input under its tensors' names, and change nothing."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from tiny_models import RandomWeights

from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.layers.cache import KVCache
from bminf_lite.layers.recording import PRODUCTS, LinearCall, LinearHooks

CONFIG = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TOKENS = np.array([3, 1, 4, 1, 5], np.int32)


def logits(ops: Backend, weights: RandomWeights) -> np.ndarray:
    architecture = models.find(CONFIG)
    config = architecture.parse(CONFIG)
    network = architecture.Model(config, weights, ops)
    batch = ForwardBatch.packed(ops.array, [TOKENS])
    return ops.host(network(batch, KVCache(ops, config.cache_shape, 1, 8, 64), all_logits=True))


@pytest.mark.parametrize("quantized", [False, True])
def test_it_sees_each_product_once_and_changes_nothing(quantized):
    ops, weights = Backend(), RandomWeights(CONFIG, 5, quantized)
    seen: list[LinearCall] = []
    hooks = LinearHooks(ops, weights, seen.append)
    watched = logits(hooks.ops, hooks.weights)
    np.testing.assert_array_equal(watched, logits(ops, weights))
    block = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    names = [tuple(t.split(".")[-2] for t in call.tensors) for call in seen]
    assert names == [*block, *block, ("lm_head",)]
    assert [p.operation for p in seen[:4]] == ["linear", "linear_add", "gated_linear", "linear_add"]
    assert {p.operation for p in seen} < PRODUCTS
    assert all(t.startswith("model.layers.1.") for p in seen[4:8] for t in p.tensors)
    assert [p.x.shape[1] for p in seen] == [32, 32, 32, 48] * 2 + [32]
    np.testing.assert_array_equal(ops.linear(seen[-1].x, seen[-1].weight, fp32=True), watched)


def test_every_operation_with_a_weight_is_observed():
    operations = {name: inspect.signature(f).parameters for name, f in vars(Backend).items() if inspect.isfunction(f)}
    assert {n for n, parameters in operations.items() if n[0] != "_" and "weight" in parameters} == PRODUCTS


def test_it_is_what_the_backend_is_in_everything_else():
    ops = Backend(np.float16)
    hooks = LinearHooks(ops, RandomWeights(CONFIG, 5), lambda product: None)
    assert hooks.ops.name == ops.name and hooks.ops.activation_dtype == ops.activation_dtype
    np.testing.assert_array_equal(hooks.ops.array(TOKENS), TOKENS)
