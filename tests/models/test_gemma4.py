"""Gemma 4: layers that read the keys and values of others."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import RandomWeights, goldens, random_tokens, tiny_model

from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.quantize.stages import LayerwiseModel, SequenceBatch

(SHARED,) = (golden for golden in goldens("gemma4_text") if golden.config.get("num_kv_shared_layers"))


def test_layers_behind_the_last_that_keeps_keys_compute_last_tokens(backend: Backend) -> None:
    """Their logits are those of a step that computes all tokens: ragged prompts, decoding, and both."""
    weights = RandomWeights(SHARED.config, SHARED.seed, quantized=True)
    narrow, whole = (tiny_model(backend, SHARED.config, weights, slots=3) for _ in range(2))
    assert narrow.config.last_keeping_layer == 2 and narrow.config.num_layers == 6
    tokens = random_tokens(3, 90, 97).tolist()
    for rows in ([tokens[:9], tokens[9:40], tokens[40:42]], [tokens[42:43], tokens[50:58], tokens[60:61]]):
        ends = np.cumsum([len(row) for row in rows]) - 1
        expected = whole.run(*rows)[ends]
        found = narrow.run(*rows, all_logits=False)
        if backend.name.startswith("cuda"):
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2 * np.abs(expected).max())


@pytest.mark.parametrize("seed", range(3))
def test_an_int8_cache_has_the_scores_of_layers_that_share_keys(seed: int) -> None:
    """Keys are balanced by the norms of the layer that stores them, and queries of other layers are balanced alike."""
    weights = RandomWeights(SHARED.config, seed)
    rng = np.random.default_rng(seed)
    for name in weights.tensors:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weights.tensors[name] = np.exp(rng.uniform(-1.5, 1.5, weights.tensors[name].shape)).astype(np.float32)
    exact, rounded = (tiny_model(CpuBackend(), SHARED.config, weights, int8_cache=int8) for int8 in (False, True))
    expected = exact.run(SHARED.tokens)
    error = rounded.run(SHARED.tokens) - expected
    assert 1e-4 < np.sqrt(np.mean(error**2) / np.mean(expected**2)) < 0.1


@pytest.mark.parametrize("int8_cache", [False, True])
def test_layer_by_layer_is_the_whole_model(int8_cache: bool) -> None:
    """As calibration and comparison run it: what layers share, and their inputs, go from layer to layer."""
    weights = RandomWeights(SHARED.config, SHARED.seed)
    architecture, ops = models.find(SHARED.config), CpuBackend()
    config = architecture.parse(SHARED.config)
    run = LayerwiseModel(architecture.ModelBuilder(config, weights, ops), config, ops, int8_cache)
    batch = SequenceBatch((SHARED.tokens[:20], SHARED.tokens[20:]))
    (state,) = run.start([batch])
    for layer in range(config.num_layers):
        state = run.build(layer)(state.on_host(ops).on_device(ops), batch)
    found = run.output()(state.residual)
    expected = tiny_model(ops, SHARED.config, weights, slots=2, int8_cache=int8_cache).run(*batch.sequences)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_a_stream_beyond_fp16_is_read(backend: Backend) -> None:
    """Numbers of about 1e5: a product reads the residual stream in fp16, at a smaller scale."""
    weights = RandomWeights(SHARED.config, SHARED.seed)
    for name, values in weights.tensors.items():
        if name.endswith(("post_attention_layernorm.weight", "post_per_layer_input_norm.weight")):
            weights.tensors[name] = values * np.float32(3e4)
        if name.endswith("per_layer_input_gate.weight"):
            weights.tensors[name] = values * np.float32(3e-5)
    exact = tiny_model(CpuBackend(), SHARED.config, weights).run(SHARED.tokens)
    found = tiny_model(backend, SHARED.config, weights).run(SHARED.tokens)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, exact, rtol=0, atol=0.1 * np.abs(exact).max())


def test_a_product_with_a_layer_s_input_beyond_fp16_is_read(backend: Backend) -> None:
    """Numbers of about 2e5 are read in fp16, at a smaller scale."""
    weights = RandomWeights(SHARED.config, SHARED.seed)
    for name, values in weights.tensors.items():
        if name.endswith("embed_tokens_per_layer.weight"):
            weights.tensors[name] = values * np.float32(1e3)
        if name.endswith("per_layer_input_gate.weight"):
            weights.tensors[name] = values * np.float32(30)
    exact = tiny_model(CpuBackend(), SHARED.config, weights).run(SHARED.tokens)
    found = tiny_model(backend, SHARED.config, weights).run(SHARED.tokens)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, exact, rtol=0, atol=0.1 * np.abs(exact).max())
