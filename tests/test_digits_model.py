"""The trained encoder-decoder of tests/data/digits_model sorts digits, and its int8 versions sort them too.

It was trained as transformers' T5 (tools/train_digits_model.py). An answer is right or wrong, whatever its logits are.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import bminf_lite
from bminf_lite.cli import main

FOLDER = Path(__file__).parent / "data" / "digits_model"
RNG = np.random.default_rng(2026)
SOURCES = ["".join(map(str, RNG.integers(0, 10, RNG.integers(1, 11)))) for _ in range(100)]
"""Texts of one to ten digits, not those of the training."""
SORTED = ["".join(sorted(source)) for source in SOURCES]


def answers(folder: Path) -> list[str]:
    """What the model makes of each, in ragged batches."""
    with bminf_lite.load(folder, device="cpu", max_batch=40) as model:
        return [result.text for result in model.generate(SOURCES, temperature=0)]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [*map(str, arguments), "--device", "cpu"])
    assert not result.exit_code, result.output
    return result.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits, and the same digits sorted: what the encoder reads, and about what the decoder writes."""
    file = tmp_path_factory.mktemp("digits") / "text.jsonl"
    file.write_text("\n".join(json.dumps({"text": a + b}) for a, b in zip(SOURCES, SORTED, strict=True)))
    return file


@pytest.fixture(scope="module")
def calibrated(text: Path) -> Path:
    out = text.parent / "int8"
    printed = run("migrate", FOLDER, out, "--recipe", "auto", "--calibrate", text, "--max-divergence", "0.01")
    assert any("cost on" in line for line in printed.splitlines()), printed
    return out


@pytest.mark.slow
def test_it_sorts_and_int8_keeps_the_right_answers(calibrated: Path, tmp_path: Path) -> None:
    right = [i for i, answer in enumerate(answers(FOLDER)) if answer == SORTED[i]]
    assert len(right) >= 99
    for recipe in ("w8a8", "w8a16"):
        bminf_lite.migrate(FOLDER, tmp_path / recipe, recipe)
    for folder in (tmp_path / "w8a8", tmp_path / "w8a16", calibrated):
        found = answers(folder)
        assert sum(found[i] == SORTED[i] for i in right) >= len(right) - 1


def test_the_command_line_generates_with_an_encoder_decoder() -> None:
    assert run("generate", FOLDER, "90210", "--temperature", "0").strip() == "00129"


@pytest.mark.slow
def test_compare_and_perplexity_measure_the_same(calibrated: Path, text: Path) -> None:
    report = text.parent / "report.html"
    compared = json.loads(run("compare", calibrated, FOLDER, text, "--json", "--report", report))
    assert report.read_text().count("EncDecAttention") > 2
    assert 0 < compared["kl"] < 0.01 and abs(compared["ratio"] - 1) < 0.02
    # `compare` has several windows in a batch, so its sums may differ in the last bits, and then a code of int8.
    for folder, name, rel in ((calibrated, "perplexity", 1e-3), (FOLDER, "reference_perplexity", 1e-6)):
        alone = json.loads(run("perplexity", folder, text, "--json"))
        assert alone["perplexity"] == pytest.approx(compared[name], rel=rel)
        assert alone["tokens"] == compared["tokens"]
