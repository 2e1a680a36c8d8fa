"""``bminf-lite migrate``: options, output and refusals. What migration computes is tested in tests/checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_checkpoint
from cli_kit import output, run

import bminf_lite


def test_what_it_writes_can_be_loaded(source: Path, tmp_path: Path) -> None:
    text = output("migrate", source, tmp_path / "out")
    assert str(tmp_path / "out") in text and "times smaller" in text and "dB" in text
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        assert len(model.generate("hello", max_new_tokens=3).token_ids) == 3


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_a_dry_run_names_every_tensor_and_writes_nothing(source: Path, tmp_path: Path, recipe: str) -> None:
    text = output("migrate", source, tmp_path / "out", "--dry-run", "--recipe", recipe)
    for name in tiny_checkpoint.tensors(tiny_checkpoint.CONFIG):
        (line,) = (x for x in text.splitlines() if x.startswith(f"{name} "))
        assert ("float" if "norm" in name or "embed" in name else recipe) in line
    assert "would write" in text and not any(tmp_path.iterdir())


def test_force_is_needed_to_replace_and_a_recipe_may_be_a_file(source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('name = "mine"\nlinear = "w8a8"\nhead = "float"\n')
    output("migrate", source, tmp_path / "out")
    again = run("migrate", source, tmp_path / "out", "--recipe", recipe)
    assert again.exit_code == 1 and "--force" in again.stderr
    assert "recipe mine" in output("migrate", source, tmp_path / "out", "--recipe", recipe, "--force")
    assert json.loads((tmp_path / "out" / "bminf_lite.json").read_text())["recipe"]["head"] == "float"


@pytest.mark.parametrize("recipe", ["w4a4", "no/such/file.toml"])
def test_an_unknown_recipe_is_wrong_usage(source: Path, tmp_path: Path, recipe: str) -> None:
    result = run("migrate", source, tmp_path / "out", "--recipe", recipe)
    assert result.exit_code == 2 and recipe in result.stderr and "w8a16" in result.stderr
    assert not (tmp_path / "out").exists()
