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
    options = ["--model", str(Path(bminf_lite.__file__).parent / "demo_model"), "--device", "cpu", "--new", "24"]
    measure_drafts.main([*options, "--context", "96", "--guesses", "3,8", str(text)])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["temperature"], one["guesses"]) for one in found] == [(0, 3), (0.7, 3), (0, 8), (0.7, 8)]
    for one in found:
        assert one["tokens"] > 0 and one["tokens_per_check"] >= 1
        assert one["of_plain"] == pytest.approx(one["tokens_per_second"] / one["plain_tokens_per_second"], abs=0.02), (
            "the three are rounded"
        )
    measure_drafts.main([*options, "--context", "96", "--check-cost", "1", "--guesses", "3", str(text)])
    free = json.loads(capsys.readouterr().out.splitlines()[0])
    assert free["tokens_per_check"] == found[0]["tokens_per_check"] and free["of_plain"] >= 1
