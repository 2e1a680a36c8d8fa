"""The measurement of drafts on a tiny shape: every case runs, and its acceptance is the forced one."""

from __future__ import annotations

import json
from pathlib import Path

import measure_drafts
import pytest

import bminf_lite

SHAPE = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.slow
def test_every_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (shape := tmp_path / "config.json").write_text(json.dumps(SHAPE))
    options = ["--shape", str(shape), "--device", "cpu", "--context", "16", "--new", "48"]
    measure_drafts.main([*options, "--streams", "3"])
    _, plain, *cases = map(json.loads, capsys.readouterr().out.splitlines())
    assert plain["tokens_per_step"] == 1 and plain["of_a_plain_step"] == plain["of_plain"] == 1
    assert [case["case"].split(",")[0] for case in cases] == [
        "EAGLE-3 head", "check of 1 + 4", "check of 1 + 7", "check of 1 + 7", "n-grams", "schema", "schema", "schema",
        "plain", "3 streams",
    ]  # fmt: skip
    brought = [case["tokens_per_step"] for case in cases]
    assert brought[3] == 1
    for found, most in zip(brought, (4, 5, 8), strict=False):
        assert most - 1.5 <= found <= most + 0.5, "the last check of a request is shorter"
    assert brought[5] == 1 and brought[7] > 2
    assert brought[9] > brought[8]


def test_a_draft_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (shape := tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (small := tmp_path / "small.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 1}))
    options = ["--shape", str(shape), "--draft-shape", str(small), "--device", "cpu", "--context", "16", "--new", "240"]
    measure_drafts.main([*options, "--cases", "draft"])
    _, _, found = map(json.loads, capsys.readouterr().out.splitlines())
    assert found["case"].startswith("draft model") and 3.2 <= found["tokens_per_step"] <= 3.8


def test_texts_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("def first(self):\n    return self.first\n" * 3)
    model = str(Path(bminf_lite.__file__).parent / "demo_model")
    measure_drafts.main(["--model", model, "--device", "cpu", "--new", "24", "--context", "96", str(text)])
    greedy, warm = map(json.loads, capsys.readouterr().out.splitlines())
    assert (greedy["temperature"], warm["temperature"]) == (0, 0.7)
    assert greedy["tokens"] > 0 and greedy["tokens_per_check"] >= 1
