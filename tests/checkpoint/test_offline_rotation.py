"""Rotations in the weights: the float model stays the same, and what is written is an ordinary checkpoint."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoint import tensors as random_tensors
from tiny_checkpoints import CONFIG, MakeCheckpoint
from tiny_models import EVERY, Golden, RandomWeights, goldens, two_of_each_family

import bminf_lite
from bminf_lite.backend.quantization import Int8Weight, quantize_weight
from bminf_lite.checkpoint.offline_rotation import rotate_offline, rotates_offline, stream_rotation
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.recipe import Recipe, Scheme, load_recipe
from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.evaluation.compare import compare
from bminf_lite.evaluation.corpus import Window
from bminf_lite.migration.budget import offline_part

ALL = [golden for family in EVERY for golden in goldens(family)]
WITH_STREAM = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "granite",
    "smollm3",
    "seed_oss",
    "helium",
    "glm",
    "ministral3",
}
"""Architectures whose layers read RMSNorms alone and add to the residual stream directly."""


@given(features=st.integers(1, 96), rows=st.integers(1, 4), seed=st.integers(0, 100))
def test_a_stream_rotation_is_orthogonal(features: int, rows: int, seed: int) -> None:
    rotate, x = stream_rotation(features), np.random.default_rng(seed).standard_normal((2, rows, features))
    turned = [rotate(part.astype(np.float32)).astype(np.float64) for part in x]
    np.testing.assert_allclose(turned[0] @ turned[1].T, x[0] @ x[1].T, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(rotate(x[0].astype(np.float32)), turned[0])  # the same each time


@pytest.mark.parametrize("golden", two_of_each_family())
def test_the_float_model_stays_the_same(golden: Golden, tmp_path: Path) -> None:
    source = golden.save(tmp_path / "source", RandomWeights(golden.config, golden.seed).tensors)
    with open_model(source) as model:
        rotated = rotate_offline(model)
        assert not rotated.spec.tied or not model.spec.stream
        got, expected = golden.logits_with(rotated.weights()), golden.logits_with(model.weights())
        changed = {name for name in model.spec.parameters if model.checkpoint.tensors.get(name) is not None}
        changed -= {n for n in changed if np.array_equal(rotated.checkpoint.read(n), model.checkpoint.read(n))}
    assert bool(changed) == bool(rotates_offline(golden.spec))
    assert np.linalg.norm(got - expected) < 3e-5 * np.linalg.norm(expected)


def test_which_residual_streams_can_be_rotated() -> None:
    """Not those that a LayerNorm reads, and not those to which a norm of a layer's output is added."""
    found = {golden.config["model_type"] for golden in ALL if golden.spec.stream is not None}
    assert found >= WITH_STREAM & {golden.config["model_type"] for golden in ALL}
    assert not found & {"opt", "gpt2", "gpt_neox", "gemma2", "gemma3_text", "olmo2", "olmo3", "glm4", "cohere", "bloom"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_is_written(make_checkpoint: MakeCheckpoint, tmp_path: Path, dtype: type, tied: bool) -> None:
    """Codes are those of the rotated fp32 weights; an fp32 embedding becomes fp16; a head has a tensor of its own."""
    config = CONFIG | {"tie_word_embeddings": tied}
    source = make_checkpoint(tensors=random_tensors(config, dtype=dtype), tie_word_embeddings=tied)
    rules = {"*.1.mlp.up_proj.weight": Scheme.FLOAT}
    recipe = dataclasses.replace(offline_part(load_recipe("w8a8-rotate")), rules=rules)
    report = bminf_lite.migrate(source, tmp_path / "out", recipe)
    assert report.rotated_offline == ("residual stream" + " (its tied head is stored apart)" * tied, "value heads")
    assert "rotated in the weights: residual stream" in str(report) and report.only_bminf_lite is None
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and "transform_config" not in config["quantization_config"]
    assert config["quantization_config"]["quantization_status"] == "compressed"
    with open_model(source) as before, open_model(tmp_path / "out") as after:
        rotated, weights = rotate_offline(before).weights(), after.weights()
        for name, parameter in after.spec.parameters.items():
            if len(parameter.shape) == 1 or "embed" in name:
                stored_as = np.float16 if "embed" in name and dtype == np.float32 else dtype
                expected = np.asarray(rotated.vector(name)).astype(stored_as)
                np.testing.assert_array_equal(np.asarray(weights.vector(name)), expected)
                continue
            got, expected = weights.weight(name), np.asarray(rotated.weight(name))
            if name == "model.layers.1.mlp.up_proj.weight":
                np.testing.assert_array_equal(np.asarray(got), expected.astype(dtype))
                continue
            quantized = quantize_weight(expected)
            assert isinstance(got, Int8Weight)
            np.testing.assert_array_equal(got.codes, quantized.codes)
            np.testing.assert_array_equal(got.scale, quantized.scale)


def test_layers_are_compared_with_a_rotated_reference(tmp_path: Path) -> None:
    golden = next(goldens("llama"))
    source = golden.save(tmp_path / "source", RandomWeights(golden.config, golden.seed).tensors)
    recipe = Recipe("mine", Scheme.W8A16, Scheme.W8A16, offline_rotation=True)
    bminf_lite.migrate(source, tmp_path / "out", recipe)
    tokens = np.random.default_rng(0).integers(0, golden.config["vocab_size"], 48).astype(np.int32)
    found = compare(tmp_path / "out", source, [Window(tokens, 47)], "cpu")
    assert all(block.accumulated.snr_db > 30 for block in found.blocks)
    plain = compare(tmp_path / "out", source, [Window(tokens, 47)], "cpu", layers=False)
    assert found.divergence.kl == pytest.approx(plain.divergence.kl, rel=1e-2)


def test_a_model_without_anything_to_rotate_is_told(tmp_path: Path) -> None:
    golden = next(goldens("gpt2"))
    source = golden.save(tmp_path / "source", RandomWeights(golden.config, golden.seed).tensors)
    with pytest.raises(UsageError, match=r"w8a8-rotate, offline only: nothing of a gpt2 can be rotated"):
        bminf_lite.migrate(source, tmp_path / "out", "w8a8-rotate", offline_only=True)
    with pytest.raises(UsageError, match="w8a8 rotates nothing"):
        bminf_lite.migrate(source, tmp_path / "out", "w8a8", offline_only=True)
    assert not (tmp_path / "out").exists()
    assert bminf_lite.migrate(source, tmp_path / "out", "w8a8-rotate").rotated_offline == ()


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"])
def test_the_tensor_that_holds_an_infinity_is_named(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    """Not those that are computed from it, and without a warning."""
    tensors = random_tensors(CONFIG)
    tensors[name][..., 3] = np.inf
    with warnings.catch_warnings(action="error"), pytest.raises(CheckpointError) as caught:
        bminf_lite.migrate(make_checkpoint(tensors=tensors), tmp_path / "out", "w8a8-rotate")
    assert f"tensor '{name}' holds a NaN or an infinity" in str(caught.value) and "problems" not in str(caught.value)
