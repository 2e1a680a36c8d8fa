"""The measurement of drafts on a tiny shape: every case runs, and its acceptance is the forced one."""

from __future__ import annotations

import json
from pathlib import Path

import measure_drafts
import pytest

SHAPE = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def test_every_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (shape := tmp_path / "config.json").write_text(json.dumps(SHAPE))
    measure_drafts.main(["--shape", str(shape), "--device", "cpu", "--context", "16", "--new", "48"])
    _, plain, *cases = map(json.loads, capsys.readouterr().out.splitlines())
    assert plain["tokens_per_step"] == 1 and plain["of_a_plain_step"] == 1
    assert [case["case"].split(",")[0] for case in cases] == [
        "check of 1 + 4", "check of 1 + 7", "check of 1 + 7", "EAGLE-3 head",
    ]  # fmt: skip
    brought = [case["tokens_per_step"] for case in cases]
    assert brought[2] == 1
    for found, most in zip((brought[0], brought[1], brought[3]), (5, 8, 4), strict=True):
        assert most - 1.5 <= found <= most + 0.5, "the last check of a request is shorter"
