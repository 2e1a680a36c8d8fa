"""``bminf-lite inspect`` on a float and on migrated checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from click.testing import CliRunner

import bminf_lite
from bminf_lite.cli import main


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("inspect") / "source")


def inspect(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_a_float_checkpoint(source: Path) -> None:
    text = inspect(source)
    expected = tiny_checkpoint.tensors(tiny_checkpoint.CONFIG)
    assert "llama" in text
    assert f"{sum(t.size for t in expected.values()):,}" in text
    for name, tensor in expected.items():
        (line,) = (x for x in text.splitlines() if x.startswith(f"{name} "))
        assert "F32" in line
        assert str(list(tensor.shape)) in line
        assert "scales" not in line


@pytest.mark.parametrize(("recipe", "activations"), [("w8a8", "int8"), ("w8a16", "float")])
def test_a_migrated_checkpoint(source: Path, tmp_path: Path, recipe: str, activations: str) -> None:
    bminf_lite.migrate(source, tmp_path / "out", recipe)
    text = inspect(tmp_path / "out")
    assert f"int8 weights, {activations} activations" in text
    assert f"recipe {recipe}" in text
    assert text.count("scales ") == 2 * 7 + 1  # seven linear layers in each of two blocks, and the head
    assert "[48, 32]" in text  # the shape of the matrix, packed or not


def test_json(source: Path, tmp_path: Path) -> None:
    bminf_lite.migrate(source, tmp_path / "out")
    value = json.loads(inspect(tmp_path / "out", "--json"))
    weight = tiny_checkpoint.tensors(tiny_checkpoint.CONFIG)["lm_head.weight"]
    scales = np.abs(weight).max(axis=1) / np.float32(127)
    assert value["tensors"]["lm_head.weight"]["scale"]["max"] == pytest.approx(scales.max(), rel=2**-11)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "config.json" in result.stderr
