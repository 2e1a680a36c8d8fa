"""Adapters that are merged before a model is quantized: as the merged float folder would be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from adapter_files import factors, merged, modules_of, random_adapter, write_adapter
from safetensors.numpy import load_file

import bminf_lite
from bminf_lite.checkpoint.adapter_merge import MergedFolder
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.errors import CheckpointError

ROTATED = 'linear = "w8a8"\nhead = "float"\noffline_rotation = true\n'


@pytest.fixture(scope="module")
def adapter(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(tmp_path_factory.mktemp("merge") / "french", source, lora_alpha=2)


@pytest.fixture(scope="module")
def float_merged(source: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merged(source, adapter, tmp_path_factory.mktemp("merged") / "float", 0.5)


@pytest.mark.parametrize("recipe", ["w8a8", "w8a8-rotate-all", ROTATED], ids=["w8a8", "rotate-all", "offline"])
def test_the_result_is_that_of_the_merged_folder(
    source: Path, adapter: Path, float_merged: Path, tmp_path: Path, recipe: str
) -> None:
    """But for the last bits of sums of floats, which may change a code."""
    if "\n" in recipe:
        (tmp_path / "recipe.toml").write_text(recipe)
        recipe = str(tmp_path / "recipe.toml")
    report = bminf_lite.migrate(source, tmp_path / "ours", recipe, merge=adapter)
    bminf_lite.migrate(float_merged, tmp_path / "theirs", recipe)
    assert "the adapter french is merged into the weights" in str(report)
    assert json.loads((tmp_path / "ours" / "bminf_lite.json").read_text())["merged"] == "french"
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert {name: values.dtype for name, values in ours.items()} == {n: v.dtype for n, v in theirs.items()}
    for name, values in ours.items():
        if values.dtype == np.int8:
            different = values != theirs[name]
            assert different.mean() < 0.001 and np.abs(values.astype(int) - theirs[name]).max() <= 1, name
        else:
            np.testing.assert_allclose(values.astype(np.float32), theirs[name].astype(np.float32), 2e-3, 1e-6)


def test_costs_are_those_of_the_merged_model(source: Path, adapter: Path, text: Path, tmp_path: Path) -> None:
    """Against the source alone they would be hundreds of times as large."""
    report = bminf_lite.migrate(
        source, tmp_path / "out", "w8a8", merge=adapter, calibrate=text, samples=2, device="cpu"
    )
    assert report.cost["kl"] < 0.01
    with bminf_lite.load(source, device="cpu") as model:
        plain = model.logits(range(30))
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        assert np.linalg.norm(model.logits(range(30)) - plain) > 0.1 * np.linalg.norm(plain)


def test_matrices_stored_by_columns(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 260}
    base = tiny_checkpoint.write(tmp_path / "base", **{"architectures": ["GPT2LMHeadModel"], **config})
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 32), (96, 4)))
    name = "base_model.model.transformer.h.0.attn.c_attn"
    adapter = write_adapter(tmp_path / "a", {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, r=4)
    with open_model(base) as before, open_model(MergedFolder(base, adapter)) as after:
        [changed] = [n for n in before.spec.parameters if n.endswith("c_attn.weight")]
        weights = [np.asarray(model.weights().weight(changed)) for model in (before, after)]
    np.testing.assert_allclose(weights[1] - weights[0], 2 * b @ a, rtol=1e-4, atol=1e-5)


def test_int8_takes_no_adapter(int8: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is int8, and an adapter cannot be merged into codes: .*\(--adapter\)"):
        open_model(MergedFolder(int8, adapter))
    with pytest.raises(CheckpointError, match="is quantized already"):
        bminf_lite.migrate(int8, tmp_path / "out", merge=adapter)


def test_a_tied_head_takes_none(source: Path, tmp_path: Path) -> None:
    tied = tiny_checkpoint.write(tmp_path / "tied", tie_word_embeddings=True)
    adapter = write_adapter(tmp_path / "a", factors(source, modules_of(source)))
    with pytest.raises(CheckpointError, match="changes 'lm_head', the output head, which is the embedding here"):
        open_model(MergedFolder(tied, adapter))
    assert not (tmp_path / "out").exists()
