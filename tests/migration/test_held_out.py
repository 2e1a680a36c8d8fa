"""What a migration cost: text that is held out, the limit that leaves no bad model, and what the manifest says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from hypothesis import given
from hypothesis import strategies as st

import bminf_lite
from bminf_lite.errors import CheckpointError
from bminf_lite.evaluation.compare import compare
from bminf_lite.evaluation.corpus import Window
from bminf_lite.migration.held_out import MAX_HELD_OUT, measure_cost, split_samples


@given(st.integers(2, 300), st.integers(1, 200))
def test_what_is_held_out_is_not_calibrated_on(count, samples):
    found = split_samples([np.array([i, i]) for i in range(count)], samples)
    used, held = ({int(piece[0]) for piece in part} for part in (found.samples, found.held_out))
    assert not used & held
    assert len(found.held_out) == len(held) == min(MAX_HELD_OUT, max(count // 8, 1))
    assert len(found.samples) == len(used) == min(samples, count - len(held))


def test_a_single_piece_is_cut():
    found = split_samples([np.arange(512)], 128)
    np.testing.assert_array_equal(np.concatenate([*found.samples, *found.held_out]), np.arange(512))
    assert len(found.held_out[0]) == 64


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16", "auto"])
def test_the_manifest_says_what_it_cost(source: Path, text: Path, tmp_path: Path, recipe: str):
    report = bminf_lite.migrate(source, tmp_path / "out", recipe, calibrate=text, device="cpu", max_divergence=0.1)
    manifest = json.loads((tmp_path / "out" / "bminf_lite.json").read_text())
    assert manifest["cost"] == report.cost
    assert ("calibration" in manifest) == (recipe == "auto")
    assert 0 < report.cost["kl"] < 0.01 and report.cost["tokens"] > 100
    ids = tiny_ids(text)  # each piece begins with the token of a text's begin
    sequences = split_samples([np.array([256, *ids[i : i + 127]]) for i in range(0, len(ids), 127)], 128).held_out
    windows = [Window(piece.astype(np.int32), len(piece) - 1) for piece in sequences]
    again = compare(tmp_path / "out", source, windows, "cpu", layers=False).divergence
    assert again.to_dict() == {key: value for key, value in report.cost.items() if key != "trade"}
    assert ("trade" in report.cost) == (recipe == "auto")


def tiny_ids(text: Path) -> list[int]:
    return tiny_checkpoint.byte_tokenizer().encode(text.read_text(), add_special_tokens=False).ids


def test_a_bad_model_is_not_written_and_an_earlier_result_stays(source: Path, text: Path, tmp_path: Path):
    bminf_lite.migrate(source, tmp_path / "out", "w8a16")
    with pytest.raises(
        CheckpointError, match=r"1e-09 are allowed: it was not written\. Let --recipe auto --target-div"
    ):
        bminf_lite.migrate(source, tmp_path / "out", calibrate=text, device="cpu", max_divergence=1e-9, force=True)
    assert json.loads((tmp_path / "out" / "bminf_lite.json").read_text())["recipe"]["name"] == "w8a16"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_is_no_number_is_more_than_any_limit(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: object, **kwargs: object) -> object:
        found = compare(source, source, [Window(np.arange(9, dtype=np.int32), 8)], "cpu", layers=False)
        object.__setattr__(found.divergence, "kl", math.nan)
        return found

    monkeypatch.setattr("bminf_lite.migration.held_out.compare", broken)
    with pytest.raises(CheckpointError, match="nan nats"):
        measure_cost(source, source, [np.arange(9)], "cpu", 1e9)
