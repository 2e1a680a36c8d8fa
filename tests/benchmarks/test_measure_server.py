"""The scripts that measure a server run, and what they print adds up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import DEMO

pytest.importorskip("starlette", reason="the server needs the extra serve")
pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> str:
    """What a script prints."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=200, env=environment).stdout


def test_a_server_beside_its_engine():
    """On a tiny model on the CPU, with the bundled model's vocabulary."""
    options = ("--shape", "llama-tiny", "--device", "cpu", "--context", "2048", "--clients", "1", "--runs", "1")
    case = "1 stream of 128/128"
    lines = run("measure_server.py", *options, "--tokenizer", str(DEMO), case).splitlines()
    facts, *runs, found = map(json.loads, lines)
    assert facts["http processes"] >= 1 and found["case"] == case
    assert runs == [{"case": case, "run": 0, side: found[side]} for side in ("engine", "http")]
    for side in ("engine", "http"):
        rate, step_ms = found[side]["decode_tokens_per_s"], found[side]["step_ms"]
        assert rate > 0
        # A token takes a step, and half of the steps take the median at least. A client may see the first one late.
        assert side == "http" or rate < 2 * 1000 / step_ms
        assert 0 < found[side]["first_token_ms"] < 128_000 / found[side]["tokens_per_s"]
    assert found["http"]["http_cpu_us"] >= 0  # in units of 10 ms for all tokens


def test_a_load_over_http_alone():
    options = ("--shape", "llama-tiny", "--device", "cpu", "--context", "2048", "--runs", "1", "--only", "http")
    found = json.loads(run("measure_server.py", *options, "--tokenizer", str(DEMO), "6 of 8/3").splitlines()[-1])
    assert found.keys() == {"case", "http"} and found["http"]["tokens_per_s"] > 0


def test_runs_that_are_cut_say_how_much_is_done():
    options = ("--shape", "llama-tiny", "--device", "cpu", "--context", "2048", "--runs", "1", "--seconds", "1")
    lines = run("measure_server.py", *options, "--whole", "--tokenizer", str(DEMO), "6 of 8/2000").splitlines()
    found = json.loads(lines[-1])
    for side in ("engine", "http", "engine, not streamed"):
        assert 0 < found[side]["done"] < 1
    for ratio in ("tokens_per_s, of the engine's", "tokens_per_s, of the engine, not streamed's"):
        assert found[ratio] > 0


def test_the_http_path_with_a_fake_engine():
    found = json.loads(run("bench_http.py", "--streams", "4", "--rate", "2000", "--tokens", "50"))
    assert 0 < found["tokens_per_s"] < 3000 and found["tokens_per_event"] >= 1
    assert 0 < found["first_event_ms_median"] <= found["first_event_ms_last"]
