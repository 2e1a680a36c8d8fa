"""Checkpoints whose layers rotate their input: what is written, what is read back, and what cannot be run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import tensors as random_tensors
from tiny_checkpoints import CONFIG, MakeCheckpoint

from bminf_lite.backend.quantization import Int8Weight, quantize_weight
from bminf_lite.backend.rotation import rotated, rotation_of
from bminf_lite.checkpoint.inspect import inspect
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.recipe import Recipe, Scheme, load_recipe
from bminf_lite.cli.inspect import quantization_text
from bminf_lite.errors import CheckpointError
from bminf_lite.models.spec import Role

ONLINE = dataclasses.replace(load_recipe("w8a8-rotate"), offline_rotation=False)
WIDE = {"intermediate_size": 192}
DOWN = "model.layers.0.mlp.down_proj"


def edit(folder: Path, **settings: Any) -> None:
    """Change a ``quantization_config``."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))


def transform(block: int = 64, **settings: Any) -> dict[str, Any]:
    """A ``transform_config`` of one group."""
    applied = [{"targets": ["re:.*down_proj$"], "location": "input"} | settings]
    return {"config_groups": {"R4": {"type": "hadamard", "head_dim": block, "apply": applied}}}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_weights_are_transformed_before_they_are_rounded(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, dtype: Any
) -> None:
    source = make_checkpoint(tensors=random_tensors(CONFIG | WIDE, dtype=dtype), **WIDE)
    migrate(source, tmp_path / "out", ONLINE)
    migrate(source, tmp_path / "plain", "w8a8")
    with open_model(source) as before, open_model(tmp_path / "out") as after, open_model(tmp_path / "plain") as plain:
        for name in before.spec.parameters:
            if not name.endswith("_proj.weight"):
                continue
            got, weight = after.weights().weight(name), np.asarray(before.weights().weight(name)).astype(np.float32)
            assert isinstance(got, Int8Weight) and got.rotation == (64 if "down" in name else 1)
            expected = plain.weights().weight(name)
            if got.rotation > 1:
                expected = quantize_weight(rotated(weight, 64))
            np.testing.assert_array_equal(got.codes, expected.codes)
            np.testing.assert_array_equal(got.scale, expected.scale)
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["transform_config"]
    assert groups["config_groups"]["R4_64"]["apply"][0]["targets"] == [
        f"model.layers.{i}.mlp.down_proj" for i in (0, 1)
    ]
    found = inspect(tmp_path / "out")["quantization"]
    assert found["input_rotations"][0]["block"] == 64
    assert f"{DOWN}, model.layers.1.mlp.down_proj: input rotated in blocks of 64" in quantization_text(found)


def test_a_block_divides_the_width_and_rules_go_first(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    recipe = Recipe("mine", Scheme.W8A8, Scheme.W8A8, {"*.1.mlp.down_proj.weight": Scheme.W8A16}, rotation=64)
    assert recipe.to_dict()["rotation"] == 64 and "rotation" not in load_recipe("w8a8").to_dict()
    migrate(make_checkpoint(), tmp_path / "out", recipe)  # 24 inputs
    with open_model(tmp_path / "out") as model:
        found = [model.weights().weight(f"model.layers.{i}.mlp.down_proj.weight") for i in (0, 1)]
    assert [(w.rotation, w.dynamic) for w in found if isinstance(w, Int8Weight)] == [(8, True), (1, False)]


@pytest.mark.parametrize("linear", [Scheme.W8A8, Scheme.W8A16])
@pytest.mark.parametrize("tied", [False, True])
def test_the_inputs_of_all_int8_matrices_are_rotated(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, linear: Scheme, tied: bool
) -> None:
    """Also that of a tied head, which is quantized when it is loaded; what stays float keeps its input."""
    recipe = dataclasses.replace(
        load_recipe("w8a8-rotate-all"), linear=linear, rules={"model.layers.0.self_attn.*": Scheme.FLOAT}
    )
    source = make_checkpoint(tie_word_embeddings=tied, **WIDE)
    report = migrate(source, tmp_path / "out", recipe)
    assert report.late_rotations == ({"lm_head.weight": 16} if tied else {}) and report.rotated_offline == ()
    with open_model(source) as before, open_model(tmp_path / "out") as after:
        for name, parameter in before.spec.parameters.items():
            if parameter.role not in (Role.LINEAR, Role.HEAD):
                continue
            weight, got = np.asarray(before.weights().weight(name)), after.weights().weight(name)
            if "layers.0.self_attn" in name:
                assert not isinstance(got, Int8Weight)
                continue
            block = rotation_of(parameter.shape[1], 256)
            expected = quantize_weight(rotated(weight, block))
            assert isinstance(got, Int8Weight) and got.rotation == block > 1
            assert got.dynamic == (name == "lm_head.weight" or linear is Scheme.W8A8)
            np.testing.assert_array_equal(got.codes, expected.codes)


@pytest.mark.parametrize("blocks", [{"lm_head.weight": 48}, {"lm_head.weight": 512}, {"model.norm.weight": 16}])
def test_a_manifest_with_blocks_that_cannot_be(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, blocks: dict[str, int]
) -> None:
    out = tmp_path / "out"
    migrate(make_checkpoint(tie_word_embeddings=True), out, "w8a8-rotate-all")
    manifest = json.loads((out / "bminf_lite.json").read_text())
    (out / "bminf_lite.json").write_text(json.dumps(manifest | {"rotated_when_loaded": blocks}))
    with open_model(out) as model, pytest.raises(CheckpointError, match="no block of such a matrix's inputs"):
        model.weights()


def test_checkpoints_of_others_are_read(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Names may be patterns or a class, and the matrix of the transform may lie beside the weight."""
    out = tmp_path / "out"
    migrate(make_checkpoint(**WIDE), out, "w8a8-rotate")
    tensors = load_file(out / "model.safetensors")
    save_file(tensors | {f"{DOWN}.R4_input.weight": np.ones((64, 64), np.float16)}, out / "model.safetensors")
    (out / "bminf_lite.json").unlink()
    edit(out, transform_config=transform(), quantization_status="compressed")
    with open_model(out) as model:
        weight = model.weights().weight(f"{DOWN}.weight")
        assert isinstance(weight, Int8Weight) and weight.rotation == 64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transform_config": transform(256)}, "192 inputs, which are no whole blocks of 256"),
        ({"transform_config": transform(), "ignore": [DOWN]}, "down_proj: stays float, and transform_config"),
        (
            {"transform_config": {"config_groups": dict.fromkeys("ab", transform()["config_groups"]["R4"])}},
            r"several groups of transform_config \(a, b\)",
        ),
        ({"transform_config": transform(), "outlier_columns": {DOWN: 2}}, "has outlier columns, and transform_config"),
    ],
)
def test_transforms_that_cannot_be_run(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    migrate(make_checkpoint(**WIDE), tmp_path / "out", "w8a8-rotate")
    edit(tmp_path / "out", **settings)
    with pytest.raises(CheckpointError, match=message):
        open_model(tmp_path / "out")


def test_a_tied_head_whose_input_is_transformed(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    migrate(make_checkpoint(tie_word_embeddings=True, **WIDE), tmp_path / "out", ONLINE)
    edit(tmp_path / "out", transform_config=transform(8, targets=["lm_head"]))
    with pytest.raises(CheckpointError, match="lm_head: stays float"):
        open_model(tmp_path / "out")
