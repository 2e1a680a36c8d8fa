"""A migration with a target: the first of several quantizations that meets it, and what it says about the others."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import bminf_lite
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.recipe import Scheme
from bminf_lite.cli.migrate import tried_lines
from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.migration.budget import MAX_ERRORS, budget_steps


def test_steps_get_slower_and_more_exact() -> None:
    steps = budget_steps(offline_only=False)
    assert [step.rotation for step in steps] == [1, 1, *[64] * (2 + len(MAX_ERRORS)), 1]
    assert steps[0].linear is Scheme.W8A8 and steps[-1].linear is Scheme.W8A16
    allowed = [step.calibration.max_error for step in steps if step.calibration and step.calibration.max_error]
    assert allowed == sorted(allowed, reverse=True) == list(MAX_ERRORS)
    assert len({step.name for step in steps}) == len(steps)
    assert all(step.rotation == 1 for step in budget_steps(offline_only=True))


@pytest.mark.slow
@pytest.mark.parametrize("offline_only", [False, True])
def test_the_first_that_meets_the_target_is_kept(source: Path, text: Path, tmp_path: Path, offline_only: bool) -> None:
    def run(target: float, out: str):
        return bminf_lite.migrate(
            source, tmp_path / out, "auto", calibrate=text, samples=4, device="cpu", target_divergence=target,
            offline_only=offline_only,
        )  # fmt: skip

    easy = run(1.0, "easy")
    assert easy.recipe.name == "w8a8" and easy.cost["tried"] == []
    target = easy.cost["kl"] * 0.7
    report = run(target, "out")
    tried = report.cost["tried"]
    assert report.cost["kl"] <= target and tried[0] == {"recipe": "w8a8", "kl": easy.cost["kl"]}
    assert all(attempt["kl"] > target for attempt in tried)
    names = [step.name for step in budget_steps(offline_only)]
    assert [attempt["recipe"] for attempt in tried] + [report.recipe.name] == names[: len(tried) + 1]
    assert json.loads((tmp_path / "out" / "bminf_lite.json").read_text())["cost"]["tried"] == tried
    lines = tried_lines(report.cost, report.recipe.name)
    assert len(lines) == len(tried) + 2 and lines[-1].split()[0] == report.recipe.name.split()[0]
    with open_model(tmp_path / "out") as model:
        assert not (offline_only and model.checkpoint.quantization and model.checkpoint.quantization.transforms)
    with pytest.raises(CheckpointError, match=r"at most 1e-15 nats.*w8a8: .*; w8a16: "):
        run(1e-15, "none")
    assert not (tmp_path / "none").exists()


def test_mistakes_are_told_before_any_work(source: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for limit in (0, math.nan):
        with pytest.raises(UsageError, match=r"target_divergence is .* must be more than 0"):
            bminf_lite.migrate(source, out, "auto", calibrate=text, target_divergence=limit)
    with pytest.raises(UsageError, match="target_divergence needs a text"):
        bminf_lite.migrate(source, out, "auto", target_divergence=1)
    with pytest.raises(UsageError, match="needs the recipe auto"):
        bminf_lite.migrate(source, out, "w8a8", calibrate=text, target_divergence=1)
    with pytest.raises(UsageError, match="neither max_divergence nor dry_run"):
        bminf_lite.migrate(source, out, "auto", calibrate=text, target_divergence=1, dry_run=True)
    with pytest.raises(UsageError, match="needs target_divergence"):
        bminf_lite.migrate(source, out, "auto", calibrate=text, offline_only=True)
