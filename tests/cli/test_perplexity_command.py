"""``bminf-lite perplexity``: output and refusals. What it computes is tested in tests/evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

import bminf_lite
from bminf_lite.cli import main
from bminf_lite.evaluation.perplexity import perplexity as measure

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("perplexity") / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def perplexity(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["perplexity", *map(str, arguments), "--device", "cpu"])


def test_it_prints_what_the_function_gives(model: Path, text: Path):
    result = perplexity(model, text, "--window", 64, "--stride", 16, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)
    with bminf_lite.load(model, device="cpu") as loaded:
        expected = measure(loaded, loaded.tokenizer.encode(TEXT), 64, 16)
    assert (found["perplexity"], found["standard_error"]) == (expected.value, expected.standard_error)
    assert found["tokens"] == len(TEXT) and found["device"] == "cpu"
    lines = perplexity(model, text, "--window", 64, "--stride", 16)
    assert lines.stdout == f"perplexity {expected}\n"


def test_int8_and_jsonl(model: Path, tmp_path: Path):
    bminf_lite.migrate(model, tmp_path / "int8")
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": TEXT[i : i + 90]}) for i in (0, 50, 70)))
    values = [
        json.loads(perplexity(folder, tmp_path / "texts.jsonl", "--json").stdout)["perplexity"]
        for folder in (model, tmp_path / "int8")
    ]
    np.testing.assert_allclose(*values, rtol=0.1)


def test_what_is_not_finite_is_null_in_json(tmp_path: Path, text: Path):
    tensors = tiny_checkpoint.tensors(tiny_checkpoint.CONFIG)
    tensors["model.norm.weight"] *= np.float32(1e6)
    save_file(tensors, str(tiny_checkpoint.write(tmp_path / "hot") / "model.safetensors"), {"format": "pt"})
    found = json.loads(perplexity(tmp_path / "hot", text, "--json").stdout, parse_constant=pytest.fail)
    assert found["perplexity"] is None and found["standard_error"] is None and found["tokens"] > 2
    (tmp_path / "a.txt").write_text("a")
    assert json.loads(perplexity(tmp_path / "hot", tmp_path / "a.txt", "--json").stdout)["standard_error"] is None


@pytest.mark.parametrize("options", [["--window", 129], ["--window", 1], ["--stride", 0], ["--stride", 129]])
def test_windows_that_make_no_sense_are_wrong_usage(model: Path, text: Path, options: list):
    result = perplexity(model, text, *options)
    assert result.exit_code == 2
    assert options[0].removeprefix("--") in result.stderr


def test_a_bad_text_is_reported_before_a_missing_model(tmp_path: Path, text: Path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n')
    for name in ("bad.jsonl", "none.txt"):
        result = perplexity(tmp_path / "no-model", tmp_path / name)
        assert result.exit_code == 2
        assert name in result.stderr and "no-model" not in result.stderr
    result = perplexity(tmp_path / "no-model", text)
    assert result.exit_code == 1
    assert "no-model: does not exist" in result.stderr
