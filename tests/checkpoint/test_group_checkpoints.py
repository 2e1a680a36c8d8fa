"""Checkpoints whose weights have a scale for each group of columns: what is written, read back, and cannot be run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoint import tensors as random_tensors
from tiny_checkpoints import CONFIG, MakeCheckpoint

import bminf_lite
from bminf_lite.backend.quantization import Int8Weight, quantize_weight
from bminf_lite.backend.rotation import rotated
from bminf_lite.checkpoint.compressed_tensors import parse_quantization
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.recipe import Recipe, RotatedInputs, Scheme, parse_recipe
from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.models.spec import Role

GROUPS = Recipe("groups", Scheme.W8A16, Scheme.W8A16, group_size=16)
WIDE = {"hidden_size": 64, "intermediate_size": 192}


def edit(folder: Path, **settings: Any) -> None:
    """Change how the weights of the first group of layers are said to be quantized."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= settings
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rotation", [1, 16])
@pytest.mark.parametrize("tied", [False, True])
def test_each_group_of_columns_is_quantized_as_a_row_of_its_own(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, dtype: Any, rotation: int, tied: bool
) -> None:
    settings = WIDE | {"tie_word_embeddings": tied}
    source = make_checkpoint(tensors=random_tensors(CONFIG | settings, dtype=dtype), **settings)
    recipe = dataclasses.replace(GROUPS, rotation=rotation, rotated_inputs=RotatedInputs.ALL)
    report = migrate(source, tmp_path / "out", recipe)
    with open_model(source) as before, open_model(tmp_path / "out") as after:
        sizes = set()
        for name, parameter in before.spec.parameters.items():
            if parameter.role not in (Role.LINEAR, Role.HEAD):
                continue
            got, weight = after.weights().weight(name), np.asarray(before.weights().weight(name)).astype(np.float32)
            assert isinstance(got, Int8Weight) and not got.dynamic
            expected = quantize_weight(rotated(weight, got.rotation), False, recipe.group_size_of(before.spec, name))
            np.testing.assert_array_equal(got.codes, expected.codes)
            np.testing.assert_array_equal(got.scale, expected.scale)
            sizes.add(got.group_size)
        assert sizes == {16} and all(t.worst_row is None or t.worst_row < t.shape[0] for t in report.tensors)
    with bminf_lite.load(tmp_path / "out", device="cpu") as model, bminf_lite.load(source, device="cpu") as plain:
        logits, expected_logits = model.logits([1, 2, 3]), plain.logits([1, 2, 3])
    # rounding moves logits of tiny models by up to 3 %; groups in a wrong order would make others of them
    assert np.abs(logits - expected_logits).max() < 0.05 * np.abs(expected_logits).max()
    assert bminf_lite.verify(tmp_path / "out")


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
def test_a_gpu_runs_it(make_checkpoint: MakeCheckpoint, tmp_path: Path, tied: bool) -> None:
    settings = WIDE | {"tie_word_embeddings": tied}
    source = make_checkpoint(tensors=random_tensors(CONFIG | settings), **settings)
    groups = dataclasses.replace(GROUPS, group_size=32, rotation=16, rotated_inputs=RotatedInputs.ALL)
    migrate(source, tmp_path / "out", groups)
    found = []
    for device in ("cpu", "cuda"):
        with bminf_lite.load(tmp_path / "out", device=device) as model:
            found.append(model.logits([1, 2, 3, 4, 5, 6]))
    # fp16 activations and weights, each rounded by 2^-11, through two layers
    assert np.abs(found[1] - found[0]).max() < 0.01 * np.abs(found[0]).max()


def test_a_width_without_groups_keeps_a_scale_per_row(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(intermediate_size=36, tensors=random_tensors(CONFIG | {"intermediate_size": 36}))
    migrate(source, tmp_path / "out", GROUPS)
    with open_model(tmp_path / "out") as opened:
        weight = opened.weights().weight("model.layers.0.mlp.down_proj.weight")
        assert isinstance(weight, Int8Weight) and weight.group_size == 0 and weight.scale.ndim == 1


def test_what_cannot_be_run_is_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(tensors=random_tensors(CONFIG | WIDE), **WIDE)
    migrate(source, tmp_path / "out", GROUPS)
    for settings, problem in (
        ({"group_size": 20}, "columns are no groups of 20"),
        ({"actorder": "group"}, "weights.actorder is 'group'"),
        ({"actorder": None, "group_size": 8}, "weight_scale' has shape"),
        ({"strategy": "channel", "group_size": 16}, "weights.group_size is 16"),
    ):
        edit(tmp_path / "out", **settings)
        with pytest.raises(CheckpointError, match=problem):
            open_model(tmp_path / "out")
        edit(tmp_path / "out", strategy="group", group_size=16, actorder=None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    with pytest.raises(CheckpointError, match="groups of 16 columns and quantized activations"):
        parse_quantization(config, "x")


def test_a_damaged_manifest_is_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    settings = WIDE | {"tie_word_embeddings": True}
    source = make_checkpoint(tensors=random_tensors(CONFIG | settings), **settings)
    migrate(source, tmp_path / "out", GROUPS)
    manifest = json.loads((tmp_path / "out" / "bminf_lite.json").read_text())
    assert manifest["grouped_when_loaded"] == {"lm_head.weight": 16} and manifest["recipe"]["group_size"] == 16
    manifest["grouped_when_loaded"]["lm_head.weight"] = 5
    (tmp_path / "out" / "bminf_lite.json").write_text(json.dumps(manifest))
    with open_model(tmp_path / "out") as opened, pytest.raises(CheckpointError, match="grouped_when_loaded"):
        opened.weights()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("group_size = 24", "group_size is 24, not a power of two from 16 to 1,024"),
        ("group_size = 64\n[calibration]\nsmoothing = true", "recipes without \\[calibration\\]"),
    ],
)
def test_recipes_that_make_no_sense(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_recipe(f'linear = "w8a16"\nhead = "w8a16"\n{text}\n', "x")
