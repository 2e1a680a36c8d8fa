"""The command ``bench`` on the CPU."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from cli_kit import run
from click.testing import Result

import bminf_lite
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.bench import model, runner
from bminf_lite.bench.model import read_shape
from bminf_lite.bench.profiler import Ceilings, Profiler
from bminf_lite.models._decoder import Decoder

DEMO = Path(bminf_lite.__file__).parent / "demo_model"


@pytest.fixture(autouse=True)
def _quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Profiler, "ceilings", lambda self: Ceilings(1e10, 2e10, 1e12))


def bench(*arguments: object) -> Result:
    return run("bench", "--device", "cpu", *arguments)


@pytest.mark.slow
def test_a_shape_with_a_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 99}
    (tmp_path / "small.json").write_text(json.dumps(read_shape("llama-tiny") | small))
    tests = ("-p", "5,9", "-n", "3", "-d", "0,4", "-b", 2, "-r", 2)
    result = bench("--shape", tmp_path / "small.json", *tests, "--plot", tmp_path / "x.png")
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("| small")]
    assert [line.split("|")[5].strip() for line in lines] == [
        "pp5 x 2",
        "pp9 x 2",
        "tg3 x 2",
        "pp5 @ d4 x 2",
        "pp9 @ d4 x 2",
        "tg3 @ d4 x 2",
    ]
    assert "read 10.0 GB/s" in result.stdout
    assert result.stderr.count("tokens/s") == 6
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_bundled_model_as_json() -> None:
    result = bench(DEMO, "-p", 0, "-n", 3, "-r", 1, "-o", "json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    (test,) = data["tests"]
    assert test["model"] == "demo_model" and test["test"] == "tg3" and test["parameters"] > 3e6
    assert test["tokens_per_second"] > 0 and data["versions"]["bminf-lite"] == bminf_lite.__version__


def test_a_prompt_takes_steps_of_as_many_tokens_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    forward = Decoder.__call__

    def counting(self: Decoder, batch: ForwardBatch, *rest: Any) -> Any:
        steps.append(len(batch.tokens))
        return forward(self, batch, *rest)

    monkeypatch.setattr(Decoder, "__call__", counting)
    result = bench(DEMO, "-p", 10, "-n", 0, "-r", 1, "--max-num-batched-tokens", 4)
    assert result.exit_code == 0, result.stderr
    assert steps == 2 * [4, 4, 2]  # a warm-up and a repetition


def test_limits_are_measured_before_the_model_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    monkeypatch.setattr(Profiler, "ceilings", lambda self: order.append("limits") or Ceilings(1e10, 2e10, 1e12))
    monkeypatch.setattr(model, "random_model", lambda *_: order.append("model"))
    monkeypatch.setattr(runner, "run_tests", lambda *_: [])
    bench("--shape", "llama-tiny")
    assert order == ["limits", "model"]


def test_a_trace_as_csv() -> None:
    result = bench("--shape", "llama-tiny", "--trace", "-o", "csv")
    assert result.exit_code == 0, result.stderr
    rows = list(csv.DictReader(io.StringIO(result.stdout.split("\n\n")[0])))
    assert rows[0]["name"].startswith("embed") and rows[-1]["name"].startswith("sample")


@pytest.mark.parametrize("given", [(DEMO,), ("--shape", "llama-tiny")], ids=["a folder", "a shape"])
def test_a_model_divided_among_ranks(given: tuple[object, ...]) -> None:
    result = bench(*given, "--gpus", 2, "-p", 5, "-n", 2, "-r", 1, "-o", "json")
    assert result.exit_code == 0, result.stderr
    prompt, decoded = json.loads(result.stdout)["tests"]
    assert prompt["test"] == "pp5" and decoded["test"] == "tg2"
    assert prompt["device"].startswith("2 x ") and decoded["tokens_per_second"] > 0


def test_kernels_need_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Profiler, "kernels", lambda self: iter(()))
    result = bench("--kernels")
    assert result.exit_code == 0 and result.stdout.startswith("Measured on this device")


@pytest.mark.parametrize("name", ["x.nonsense", "x", "no-such-folder/x.png"])
def test_where_nothing_can_be_drawn_is_told_before_anything_runs(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    result = bench("--shape", "llama-tiny", "--plot", tmp_path / name)
    assert result.exit_code == 2 and result.stdout == ""
    assert name.split("/")[0] in result.stderr and "tokens/s" not in result.stderr


def test_numbers_that_are_too_small_are_all_named() -> None:
    result = bench("--shape", "llama-tiny", "-p", "8,-3", "-b", "0")
    assert "-p is -3, but must be 0 or more; -b is 0, but must be 1 or more" in result.stderr


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama-3-9b", "; the nearest are llama-3-8b, "),
        ("kimi", "; the nearest are kimi-k2, kimi-linear-48b-a3b; "),
        ("zz", "; "),
    ],
)
def test_a_shape_that_there_is_not(name: str, hint: str) -> None:
    """The nearest names and how to list all, not a hundred names."""
    message = bench("--shape", name).stderr
    assert f"'{name}' is neither a file nor a packaged shape{hint}" in message and len(message) < 200
    assert message.endswith('"bminf-lite bench" alone lists all\n')
    assert "mixtral-8x7b" in bench().stderr


def test_a_shape_that_the_host_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bminf_lite.placement.available_memory", lambda: 10 << 20)
    result = bench("--shape", "llama-tiny")
    assert result.exit_code == 1 and "the host has 10.0 MiB free" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [DEMO, "--shape", "llama-tiny"],
        ["--shape", "no-such-shape"],
        ["--shape", "llama-tiny", "-p", "many"],
        ["--shape", "llama-tiny", "-o", "xml"],
        ["--shape", "llama-tiny", "--trace", "-b", "1,2"],
        ["--shape", "llama-tiny", "--trace", "-n", "0", "-p", "0"],
        ["--kernels", "--offline", "4"],
        ["--kernels", "--gpus", "2"],
        ["--shape", "llama-tiny", "--offline", "4", "--online", "2"],
        ["--shape", "llama-tiny", "--online", "0"],
    ],
)
def test_wrong_usage_is_2(arguments: list[object]) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2, result.stdout
    assert result.stdout == "" and result.stderr
