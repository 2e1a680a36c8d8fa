"""Migration with a calibration, through the public API: what it decides, and what it refuses before any work."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny_checkpoint
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import WORDS

import bminf_lite
from bminf_lite.checkpoint.migrate import migrate as migrate_checkpoint
from bminf_lite.checkpoint.recipe import DEFAULT_RECIPE, PORTABLE_RECIPE, load_recipe
from bminf_lite.errors import CheckpointError, OutOfMemory, UsageError
from bminf_lite.migration import migrate as migration


class Usage(NamedTuple):
    """What ``shutil.disk_usage`` returns."""

    total: int
    used: int
    free: int


def test_without_a_calibration_it_is_the_checkpoint_s_migration(source: Path, tmp_path: Path) -> None:
    bminf_lite.migrate(source, tmp_path / "a", "w8a8")
    migrate_checkpoint(source, tmp_path / "b", "w8a8")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert "calibration" not in json.loads((tmp_path / "a" / "bminf_lite.json").read_text())


def test_a_report_prints_as_a_few_lines(source: Path, tmp_path: Path) -> None:
    report = bminf_lite.migrate(source, tmp_path / "out")
    assert len(str(report).splitlines()) <= 4 and "times smaller" in str(report)
    assert repr(report) == f"MigrationReport({report})"


def test_a_calibrated_checkpoint_runs_and_its_manifest_says_what_was_decided(
    source: Path, text: Path, tmp_path: Path
) -> None:
    done: list[tuple[int, int, str]] = []
    report = bminf_lite.migrate(
        source,
        tmp_path / "out",
        "w8a8-smooth",
        calibrate=text,
        samples=4,
        device="cpu",
        calibration_progress=lambda *args: done.append(args),
    )
    assert [d[:2] for d in done] == [(i, 3) for i in range(1, 4)]
    manifest = json.loads((tmp_path / "out" / "bminf_lite.json").read_text())
    assert manifest["calibration"] == json.loads(json.dumps(report.calibration))
    products = manifest["calibration"]["products"]
    assert len(products) == 9 and products[-1]["tensors"] == ["lm_head.weight"]
    assert all(p["error"] <= p["error_before"] * 1.01 for p in products)
    with bminf_lite.load(source, "cpu") as before, bminf_lite.load(tmp_path / "out", "cpu") as after:
        ids = list(WORDS.encode())
        expected = before.logits(ids)
        error = after.logits(ids) - expected
    assert 0 < np.linalg.norm(error) < 0.05 * np.linalg.norm(expected)


def test_a_dry_run_with_token_ids_instead_of_a_file(source: Path, text: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 600)
    report = bminf_lite.migrate(source, tmp_path / "out", "auto", calibrate=ids, device="cpu", dry_run=True)
    assert len(report.calibration["products"]) == 9 and not report.cost and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"a few words", "too short"),
        ("a.jsonl", b'{"text": "a"}\n{"title": "b"}\n', "line 2: has no text"),
        ("missing.txt", None, "cannot be read"),
    ],
)
def test_unfit_texts_are_refused_before_any_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, message: str
) -> None:
    monkeypatch.setattr(migration.calibration, "run_calibration", None)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        bminf_lite.migrate(source, tmp_path / "out", "auto", calibrate=tmp_path / name)


def test_other_mistakes_are_told_before_any_work(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration.calibration, "run_calibration", None)
    for recipe in ("w8a8-rotate", "w8a8-rotate-all"):
        with pytest.raises(UsageError, match=f"^portable: the recipe {recipe} may rotate"):
            bminf_lite.migrate(source, tmp_path / "out", recipe, portable=True)
    with pytest.raises(UsageError, match="recipe auto: needs a text"):
        bminf_lite.migrate(source, tmp_path / "out", "auto")
    with pytest.raises(UsageError, match="device 'gpu' is not one of"):
        bminf_lite.migrate(source, tmp_path / "out", device="gpu")
    with pytest.raises(UsageError, match="samples is 0"):
        bminf_lite.migrate(source, tmp_path / "out", "auto", calibrate=text, samples=0)
    with pytest.raises(UsageError, match="token"):
        bminf_lite.migrate(source, tmp_path / "out", "auto", calibrate=[5, 260])
    recipe = tmp_path / "mine.toml"
    recipe.write_text('linear = "w8a8"\nhead = "w8a8"\n[rules]\n"model.layers.7.*" = "float"\n[calibration]\n')
    with pytest.raises(UsageError, match=r"matches 'model.layers.7.\*'"):
        bminf_lite.migrate(source, tmp_path / "out", recipe, calibrate=text)
    with pytest.raises(UsageError, match="needs a text"):
        bminf_lite.migrate(source, tmp_path / "out", max_divergence=0.1)
    for limit in (0, -1, math.nan, math.inf):
        with pytest.raises(UsageError, match="must be a number more than 0"):
            bminf_lite.migrate(source, tmp_path / "out", calibrate=text, max_divergence=limit)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda folder: Usage(1000, 900, 100))
        with pytest.raises(CheckpointError, match=r"deep/out: the disk is full: [\d,]+ bytes are needed and 100 are"):
            bminf_lite.migrate(source, tmp_path / "deep" / "out", "auto", calibrate=text)
    with monkeypatch.context() as read_only:
        read_only.setattr(os, "access", lambda folder, mode: False)
        with pytest.raises(CheckpointError, match=rf"deep/out: nothing can be written in {tmp_path};"):
            bminf_lite.migrate(source, tmp_path / "deep" / "out", "auto", calibrate=text)
    assert not (tmp_path / "deep").exists()
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match="already exists"):
        bminf_lite.migrate(source, tmp_path / "taken", "auto", calibrate=text)


def test_an_input_that_is_not_finite_is_named(text: Path, tmp_path: Path) -> None:
    """The CPU is no remedy on the CPU."""
    source = tiny_checkpoint.write(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 3] = np.nan
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the input of .*q_proj\.weight .* in float32: export the checkpoint"):
        bminf_lite.migrate(source, tmp_path / "out", "auto", calibrate=text, device="cpu")


def test_too_little_room_for_rounded_codes_is_told(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a mapped file that a full disk has no room for would kill the process."""
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: io.FileIO("/dev/full", "r+"))
    (tmp_path / "gptq.toml").write_text('linear = "w8a8"\nhead = "w8a8"\n[calibration]\nrounding = "gptq"\n')
    with pytest.raises(CheckpointError, match=r"codes that GPTQ has rounded.*No space left on device; make room"):
        bminf_lite.migrate(source, tmp_path / "out", tmp_path / "gptq.toml", calibrate=text, device="cpu")
    assert not (tmp_path / "out").exists()


def test_too_little_memory_says_what_to_change(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def observe(*_: object) -> None:
        raise MemoryError("5 GiB are too many")

    monkeypatch.setattr(migration.calibration, "run_calibration", observe)
    with pytest.raises(OutOfMemory, match=r"5 GiB are too many\. Use fewer \(--samples\)"):
        bminf_lite.migrate(source, tmp_path / "out", "auto", calibrate=text, device="cpu")
    assert not (tmp_path / "out").exists()


def test_paths_in_the_home_folder_are_expanded(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths of the source, the result, the recipe and the text."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "source").symlink_to(source)
    (tmp_path / "text.txt").symlink_to(text)
    (tmp_path / "mine.toml").write_text('linear = "w8a8"\nhead = "float"\n')
    report = bminf_lite.migrate("~/source", "~/out", "~/mine.toml", calibrate="~/text.txt", device="cpu")
    assert report.cost and (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("arguments", [(3, "out"), ("source", None), ("source", "out", 1.5)])
def test_arguments_of_another_type_are_refused_by_name(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="must be the path"):
        bminf_lite.migrate(*arguments)


@pytest.mark.parametrize(("portable", "expected"), [(False, DEFAULT_RECIPE), (True, PORTABLE_RECIPE)])
def test_a_migration_that_names_no_recipe_takes_the_default(
    source: Path, tmp_path: Path, portable: bool, expected: str
) -> None:
    assert bminf_lite.migrate(source, tmp_path / "out", portable=portable).recipe.name == expected
    assert not load_recipe(PORTABLE_RECIPE).rotation > 1  # other readers do not rotate inputs
