"""The tool that measures replicas asks the server that has them, and each of them answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

import measure_replicas


@pytest.mark.slow
@pytest.mark.parametrize("streamed", (False, True))
def test_every_replica_answers_its_share(streamed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--shape",
        "llama-tiny",
        "--folder",
        str(tmp_path / "measured"),
        "--device",
        "cpu",
        "--parts",
        "served",
    ]
    arguments += ["--requests", "64", "--tokens", "4", "--clients", "1", "--runs", "1", "--replicas", "2"]
    measure_replicas.main([*arguments, *(["--stream"] if streamed else [])])
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert sum(found["answered"]) == 64 and min(found["answered"]) > 16
    assert found["tokens_per_second"] > 0
    assert sum(found["us_per_request"].values()) > 0  # a front's few requests may take less than a tick of the clock
    assert not (tmp_path / "measured").exists()


@pytest.mark.slow
def test_a_batch_is_measured_beside_its_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "llama-tiny", "--folder", str(tmp_path / "measured"), "--device", "cpu", "--parts", "batch"]
    measure_replicas.main([*arguments, "--requests", "8", "--tokens", "4", "--runs", "1"])
    run, ratio = map(json.loads, capsys.readouterr().out.splitlines())
    assert run["errors"] == 0 and run["batch"] > 0 and ratio["ratio"] > 0
