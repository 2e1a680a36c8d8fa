"""``bminf-lite migrate``: options, output and refusals. What migration computes is tested in tests/checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_checkpoint
from click.testing import CliRunner, Result

import bminf_lite
from bminf_lite.cli import main


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_checkpoint.write(tmp_path / "source")


def migrate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["migrate", *map(str, arguments)])


def test_what_it_writes_can_be_loaded(source: Path, tmp_path: Path) -> None:
    result = migrate(source, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert str(tmp_path / "out") in result.stdout
    assert "times smaller" in result.stdout
    assert "dB" in result.stdout
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        assert len(model.generate("hello", max_new_tokens=3).token_ids) == 3


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_a_dry_run_names_every_tensor_and_writes_nothing(source: Path, tmp_path: Path, recipe: str) -> None:
    result = migrate(source, tmp_path / "out", "--dry-run", "--recipe", recipe)
    assert result.exit_code == 0, result.stderr
    for name in tiny_checkpoint.tensors(tiny_checkpoint.CONFIG):
        (line,) = (x for x in result.stdout.splitlines() if x.startswith(f"{name} "))
        assert ("float" if "norm" in name or "embed" in name else recipe) in line
    assert "would write" in result.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_recipe_from_a_file(source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('name = "mine"\nlinear = "w8a8"\nhead = "float"\n')
    result = migrate(source, tmp_path / "out", "--recipe", recipe)
    assert result.exit_code == 0, result.stderr
    assert "recipe mine" in result.stdout
    assert json.loads((tmp_path / "out" / "bminf_lite.json").read_text())["recipe"]["head"] == "float"


def test_force_is_needed_to_replace(source: Path, tmp_path: Path) -> None:
    assert migrate(source, tmp_path / "out").exit_code == 0
    again = migrate(source, tmp_path / "out", "--recipe", "w8a16")
    assert again.exit_code == 1
    assert "--force" in again.stderr
    assert migrate(source, tmp_path / "out", "--recipe", "w8a16", "--force").exit_code == 0
    assert json.loads((tmp_path / "out" / "bminf_lite.json").read_text())["recipe"]["linear"] == "w8a16"


@pytest.mark.parametrize("recipe", ["w4a4", "no/such/file.toml"])
def test_an_unknown_recipe_is_wrong_usage(source: Path, tmp_path: Path, recipe: str) -> None:
    result = migrate(source, tmp_path / "out", "--recipe", recipe)
    assert result.exit_code == 2
    assert recipe in result.stderr
    assert "w8a16" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_no_checkpoint(tmp_path: Path) -> None:
    result = migrate(tmp_path / "none", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert str(tmp_path / "none") in result.stderr
