"""The commands about quality on an encoder-decoder: the trained one of tests/data/digits_model, which sorts digits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import bminf_lite
from bminf_lite.cli import main

MODEL = Path(__file__).parents[1] / "data" / "digits_model"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits, and the same digits sorted: what the encoder reads, and about what the decoder writes."""
    rng = np.random.default_rng(5)
    lists = ["".join(map(str, rng.integers(0, 10, rng.integers(3, 11)))) for _ in range(200)]
    file = tmp_path_factory.mktemp("digits") / "text.jsonl"
    file.write_text("\n".join(json.dumps({"text": digits + "".join(sorted(digits))}) for digits in lists))
    return file


@pytest.fixture(scope="module")
def int8(text: Path) -> Path:
    out = text.parent / "int8"
    arguments = ["migrate", str(MODEL), str(out), "--recipe", "auto", "--calibrate", str(text), "--device", "cpu"]
    result = CliRunner().invoke(main, [*arguments, "--max-divergence", "0.01"])
    assert not result.exit_code, result.output
    assert "cost on" in result.output.splitlines()[-1]
    return out


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [*map(str, arguments), "--device", "cpu"])
    assert not result.exit_code, result.output
    return result.stdout


def test_a_calibrated_model_still_sorts(int8: Path) -> None:
    with bminf_lite.load(int8, "cpu") as model:
        sources = ["90210", "31415926", "7", "2718281828"]
        found = [result.text for result in model.generate(sources, temperature=0)]
    assert found == ["".join(sorted(source)) for source in sources]


def test_compare_and_perplexity_measure_the_same(int8: Path, text: Path) -> None:
    report = text.parent / "report.html"
    compared = json.loads(run("compare", int8, MODEL, text, "--json", "--report", report))
    assert report.read_text().count("EncDecAttention") > 2
    assert 0 < compared["kl"] < 0.01 and abs(compared["ratio"] - 1) < 0.02
    for folder, name in ((int8, "perplexity"), (MODEL, "reference_perplexity")):
        alone = json.loads(run("perplexity", folder, text, "--json"))
        assert alone["perplexity"] == pytest.approx(compared[name], rel=1e-4)
        assert alone["tokens"] == compared["tokens"]


def test_a_limit_holds_for_it_too(text: Path, tmp_path: Path) -> None:
    arguments = ["migrate", str(MODEL), str(tmp_path / "out"), "--calibrate", str(text), "--device", "cpu"]
    result = CliRunner().invoke(main, [*arguments, "--max-divergence", "1e-9"])
    assert result.exit_code and "diverges by" in result.output and not (tmp_path / "out").exists()
