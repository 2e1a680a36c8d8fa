"""The measurement of adapters on a tiny shape: every case runs."""

from __future__ import annotations

import json
from pathlib import Path

import measure_adapters
import pytest

SHAPE = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


MIXTURE = {**SHAPE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("more", [(), ("--experts",)])
def test_every_case(capsys: pytest.CaptureFixture[str], tmp_path: Path, more: tuple[str, ...]) -> None:
    (shape := tmp_path / "config.json").write_text(json.dumps(MIXTURE if more else SHAPE))
    options = ["--rank", "4", "--slots", "2", "--streams", "3", "--prompt", "40", "--new", "6"]
    measure_adapters.main(["--shape", str(shape), "--device", "cpu", *options, *more])
    head, *cases = map(json.loads, capsys.readouterr().out.splitlines())
    assert head["rank"] == 4
    assert [case["case"] for case in cases] == ["one sequence", "3 streams", "prompt of 40", "adapter on the host"]
    assert all(0 < case["speed"] < 10 for case in cases[:3])


def test_the_kernels_of_a_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (shape := tmp_path / "config.json").write_text(json.dumps(SHAPE))
    options = ["--rank", "4", "--slots", "2", "--streams", "3", "--prompt", "40", "--new", "6", "--cases", "streams"]
    measure_adapters.main(["--shape", str(shape), "--device", "cpu", *options, "--trace"])
    title, *rows, _, _ = capsys.readouterr().out.splitlines()
    assert title.startswith("streams:")
    counts = {row.split(maxsplit=4)[4]: row.split()[:3:2] for row in rows}
    assert counts["all"][0] == counts["all"][1] != "0"
