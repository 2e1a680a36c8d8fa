"""Outlier columns: what they compute, when they are taken, and what is in the file."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import outliers
import pytest

import bminf_lite
from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import Int8Weight, OutlierColumns, quantize_weight
from bminf_lite.checkpoint.fp16_range import product_shift
from bminf_lite.checkpoint.manifest import MigrationReport
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.reader import open_checkpoint
from bminf_lite.errors import CheckpointError

DEMO = Path(str(resources.files("bminf_lite.demo_model")))
DOWN = "model.layers.0.mlp.down_proj"
RECIPE = 'linear = "w8a8"\nhead = "w8a8"\n[calibration]\nsmoothing = false\nmax_error = {}\noutlier_columns = {}\n'


def test_matrices_of_one_product_keep_the_same_columns() -> None:
    plain = quantize_weight(np.ones((2, 4), np.float32))
    columns = [OutlierColumns(np.array([i], np.int32), np.zeros((2, 1), np.float16)) for i in (1, 2)]
    parts = [replace(plain, outliers=c) for c in columns]
    with pytest.raises(ValueError, match="same columns"):
        Backend().weight(parts)
    with pytest.raises(ValueError, match="same columns"):
        Backend().weight([parts[0], plain])


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The demo model with a pair of neurons that spikes on a frequent token, and tokens to calibrate on."""
    with bminf_lite.load(DEMO, "cpu") as model:
        ids = model.tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8"))[:640]
    token = max(set(ids), key=ids.count)
    folder = outliers.write(DEMO, tmp_path_factory.mktemp("spiked") / "source", outliers.spike(token))
    return folder, ids


@pytest.fixture(scope="module")
def kept(spiked: tuple[Path, list[int]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MigrationReport]:
    """That model with the pair's columns in fp16."""
    source, ids = spiked
    folder = tmp_path_factory.mktemp("kept")
    (folder / "columns.toml").write_text(RECIPE.format(0.005, 2))
    report = bminf_lite.migrate(source, folder / "out", folder / "columns.toml", calibrate=ids, device="cpu")
    return folder / "out", report


def test_a_spike_is_kept_in_fp16(spiked: tuple[Path, list[int]], kept: tuple[Path, MigrationReport]) -> None:
    (source, ids), (folder, report) = spiked, kept
    decisions = {product["tensors"][0]: product for product in report.calibration["products"]}
    spike = decisions.pop(f"{DOWN}.weight")
    assert spike["outlier_columns"] == (640, 641) and spike["scheme"] == "w8a8"
    assert spike["error_before"] > 0.005 >= spike["error"]
    assert not any(other["outlier_columns"] for other in decisions.values())
    manifest = json.loads((folder / "bminf_lite.json").read_text())
    assert manifest["format_version"] == 2
    with open_checkpoint(folder) as out, open_model(source) as before:
        factor = np.float32(2.0 ** product_shift(before.checkpoint, before.spec.gated[0]))
        weight, original = out.weight(f"{DOWN}.weight"), before.checkpoint.read(f"{DOWN}.weight") * factor
        assert isinstance(weight, Int8Weight) and weight.outliers is not None
        np.testing.assert_array_equal(weight.outliers.values, original[:, 640:].astype(np.float16))
        assert not np.asarray(weight.codes)[:, 640:].any()
    with bminf_lite.load(source, "cpu") as floating, bminf_lite.load(folder, "cpu") as model:
        expected = floating.logits(ids[:256])
        assert np.linalg.norm(model.logits(ids[:256]) - expected) < 0.03 * np.linalg.norm(expected)


@pytest.mark.gpu
def test_a_gpu_runs_it(spiked: tuple[Path, list[int]], kept: tuple[Path, MigrationReport]) -> None:
    with bminf_lite.load(kept[0], "cpu") as reference, bminf_lite.load(kept[0], "cuda") as model:
        ids = spiked[1][:64]
        expected = reference.logits(ids)
        assert np.linalg.norm(model.logits(ids) - expected) < 0.03 * np.linalg.norm(expected)
        assert model.generate(ids, max_new_tokens=8).token_ids  # one row at a time, recorded as a graph


def test_other_readers_are_told_by_name_and_damage_is_found(kept: tuple[Path, MigrationReport], tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(kept[0], folder)
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    assert [g["format"] for g in quantization["config_groups"].values()] == ["bminf-lite-outlier-columns-1"]
    assert quantization["outlier_columns"] == {DOWN: 2}
    for change, message in (
        ({"outlier_columns": {"lm_head": 0}}, "must map layers"),
        ({"outlier_columns": {}}, "unexpected tensor '.*outlier_columns'"),
        ({"outlier_columns": {DOWN: 3}}, r"outlier_columns' has shape \[2\]"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization | change}))
        with pytest.raises(CheckpointError, match=message):
            bminf_lite.load(folder, "cpu")
