"""The measurement of the engine compares steps of the engine and of ``bench`` at the same contexts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import measure_engine
import pytest

from bminf_lite.bench.runner import Workload

SMALL = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
DECODED = {count: Workload("tg", 30, 20, count) for count in (1, 3)}


@pytest.fixture
def shape(tmp_path: Path) -> str:
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    return str(tmp_path / "small.json")


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_decoding_is_compared_with_bench_in_one_run(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    measure_engine.main(["--shape", shape, "--device", "cpu", "--context", "64", "decoding"], DECODED)
    model, part, end = lines_of(capsys)
    assert (model["device"][:3], end["captured after the warm-up"]) == ("CPU", 0)
    for count in (1, 3):
        found = part[f"{count} sequences"]
        assert found["ratio"] == pytest.approx(found["engine"] / found["bench"], abs=0.01) and found["engine"] > 0
        assert found["bench_mean_position"] == 20 + 14.5
        assert found["mean_position"] == pytest.approx(34.5, abs=5), "the same contexts"
        assert 0 < found["steps"] <= 4 * 30
    assert part["1 sequences"] | {"steps": 120, "mean_position": 34.5} == part["1 sequences"]


def test_a_part_that_does_not_exist_is_refused_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measure_engine.main(["turn", "turns"])
    assert "there is no part turns; there are decoding, bits, turn" in capsys.readouterr().err
