"""A random checkpoint of a shape, and the measurement of its calibrated migration."""

from __future__ import annotations

import json
from pathlib import Path

import make_random_checkpoint
import measure_calibration
import pytest

import bminf_lite
from bminf_lite.bench.model import read_shape
from bminf_lite.checkpoint.reader import open_checkpoint


@pytest.mark.slow
def test_a_random_checkpoint_is_migrated_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 2048, "num_attention_heads": 2}
    (tmp_path / "small.json").write_text(json.dumps(read_shape("llama-tiny") | small))
    make_random_checkpoint.make(tmp_path / "source", str(tmp_path / "small.json"), layers=1)
    with open_checkpoint(tmp_path / "source") as checkpoint:
        assert {info.dtype for info in checkpoint.tensors.values()} == {"BF16"}
        assert 0.018 < checkpoint.read("model.layers.0.mlp.up_proj.weight").astype("f4").std() < 0.022
    with bminf_lite.load(tmp_path / "source", "cpu") as model:
        assert model.generate("The", max_new_tokens=2).token_ids
    out = tmp_path / "out"
    measure_calibration.main([str(tmp_path / "source"), str(out), "--samples", "3", "--device", "cpu"])
    printed = capsys.readouterr().out
    for phase in ("calibrating", "quantizing and writing", "measuring the cost", "all", "peak host memory"):
        assert f"\n{phase}: " in printed
    assert not out.exists()
