"""The trained encoder-decoder of tests/data/digits_model sorts digits, and its int8 version sorts them too.

It was trained as transformers' T5 (tools/train_digits_model.py). An answer is right or wrong, whatever its logits are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bminf_lite

FOLDER = Path(__file__).parent / "data" / "digits_model"
COUNT = 300


def sources() -> list[str]:
    """Texts of one to ten digits, not those of the training."""
    rng = np.random.default_rng(2026)
    return ["".join(map(str, rng.integers(0, 10, rng.integers(1, 11)))) for _ in range(COUNT)]


def answers(folder: Path) -> list[str]:
    """What the model makes of each, in ragged batches."""
    with bminf_lite.load(folder, device="cpu", max_batch=100) as model:
        return [result.text for result in model.generate(sources(), temperature=0)]


def right(found: list[str]) -> np.ndarray:
    return np.array([answer == "".join(sorted(source)) for source, answer in zip(sources(), found, strict=True)])


@pytest.fixture(scope="module")
def float_answers() -> list[str]:
    return answers(FOLDER)


def test_it_sorts(float_answers):
    assert right(float_answers).mean() >= 0.99


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_int8_keeps_the_exact_answers(float_answers, recipe, tmp_path):
    bminf_lite.migrate(FOLDER, tmp_path / "int8", recipe=recipe)
    kept = right(answers(tmp_path / "int8"))[right(float_answers)]
    assert kept.mean() >= 0.99


def test_the_command_line_generates_with_an_encoder_decoder(capsys):
    from bminf_lite.cli import main

    with pytest.raises(SystemExit) as exit_:
        main(["generate", str(FOLDER), "90210", "--device", "cpu", "--temperature", "0"])
    assert not exit_.value.code
    assert capsys.readouterr().out.strip() == "00129"
