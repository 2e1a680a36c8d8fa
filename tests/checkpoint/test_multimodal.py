"""The text model inside a multimodal folder is found, run and migrated; the other parts are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import Golden, RandomWeights, goldens
from tolerances import assert_close

import bminf_lite
from bminf_lite import models
from bminf_lite.errors import CheckpointError

OTHERS = ("vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight")


def write(folder: Path, golden: Golden, prefix: str, model_type: str = "mistral3") -> Path:
    """``prefix`` is in front of the names of the text model's tensors, ``model.`` inside it."""
    folder.mkdir()
    config = {"model_type": model_type, "text_config": golden.config, "vision_config": {"model_type": "pixtral"}}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    tensors = RandomWeights(golden.config, golden.seed).tensors
    named = {rename(name, prefix): values for name, values in tensors.items()}
    outer = "model." if prefix.startswith("model.") else ""
    others = {outer + name: np.ones((2, 2), np.float32) for name in OTHERS}
    save_file(named | others, folder / "model.safetensors")
    return folder


def rename(name: str, prefix: str) -> str:
    if prefix.startswith("model."):
        return name if name.startswith("lm_head") else prefix + name.removeprefix("model.")
    return prefix + name


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model.", "model.text_model."])
@pytest.mark.parametrize("family", ["mistral", "ministral3", "llama", "gemma3_text", "gemma4_text"])
def test_the_text_model_runs_and_migrates(family: str, prefix: str, tmp_path: Path) -> None:
    golden = next(goldens(family))
    source = write(tmp_path / "source", golden, prefix)
    with bminf_lite.load(source, device="cpu") as model:
        assert_close(model.logits(golden.tokens), golden.logits, "logits", np.float32, np.abs(golden.logits).max())
    report = bminf_lite.migrate(source, tmp_path / "out", "w8a16")
    assert report.left_out == ("multi_modal_projector", "vision_tower")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == family and "vision_config" not in config
    assert {tensor.name for tensor in report.tensors} == RandomWeights(golden.config, 0).tensors.keys()
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        error = np.linalg.norm(model.logits(golden.tokens) - golden.logits) / np.linalg.norm(golden.logits)
    assert 0 < error < 0.05


def test_transformers_5_ties_the_head_by_the_outer_configuration(tmp_path: Path) -> None:
    golden = next(goldens("mistral"))
    source = write(tmp_path / "source", golden, "model.language_model.")
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]
    save_file(tensors, source / "model.safetensors")
    with bminf_lite.load(source, device="cpu") as model:
        expected = model.logits(golden.tokens)
    save_file({k: v for k, v in tensors.items() if k != "lm_head.weight"}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensor 'lm_head\.weight'"):
        bminf_lite.load(source, device="cpu")
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with bminf_lite.load(source, device="cpu") as model:
        np.testing.assert_array_equal(model.logits(golden.tokens), expected)
    bminf_lite.migrate(source, tmp_path / "out", "w8a16")
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        error = np.linalg.norm(model.logits(golden.tokens) - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.05


def test_parts_may_have_any_name_outside_of_the_text_model(tmp_path: Path) -> None:
    golden = next(goldens("mistral"))
    source = write(tmp_path / "source", golden, "model.language_model.")
    tensors = load_file(source / "model.safetensors")
    parts = dict.fromkeys(
        ("image_newline", "model.aligner.fc1.weight", "model.layersnorm.weight"), np.ones(2, np.float32)
    )
    save_file(tensors | parts, source / "model.safetensors")
    report = bminf_lite.migrate(source, tmp_path / "out", dry_run=True)
    assert report.left_out == ("aligner", "image_newline", "layersnorm", "multi_modal_projector", "vision_tower")
    name = "model.language_model.layers.0.mystery.weight"
    save_file(tensors | {name: np.ones((2, 2), np.float32)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'model\.layers\.0\.mystery\.weight'"):
        bminf_lite.load(source, device="cpu")


def test_a_text_model_that_is_not_known_is_refused_by_the_outer_name() -> None:
    config = {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}}
    with pytest.raises(CheckpointError, match="'gemma3n' is not supported"):
        models.find(models.text_config(config))


def test_an_unknown_architecture_is_refused_with_the_nearest_ones_and_the_guide() -> None:
    with pytest.raises(CheckpointError, match=r"the nearest are qwen3, qwen2, qwen3_moe; .*docs/add_a_model\.md"):
        models.find({"model_type": "qwen4"})
