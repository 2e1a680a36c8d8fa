"""What int8 costs the demo model on held-out text: as it is, and with outliers put in that change nothing in float."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path

import numpy as np
import outliers
import pytest

import bminf_lite
from bminf_lite.evaluation.perplexity import perplexity

DEMO = Path(str(resources.files("bminf_lite.demo_model")))
TOKENS = 1536
WINDOW = 512


class Demo:
    """The demo model: held-out text to measure and to calibrate on, and what float makes of it."""

    def __init__(self) -> None:
        with bminf_lite.load(DEMO, "cpu") as model:
            ids = model.tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8"), False)
            self.measured, self.calibration = ids[:TOKENS], ids[2 * TOKENS : 3 * TOKENS]
            self.perplexity = perplexity(model, self.measured, WINDOW).value
            self.logits = model.logits(ids[:WINDOW])

    def cost(self, source: Path, out: Path, recipe: str, calibration: int = TOKENS) -> float:
        """The relative increase of perplexity that migrating ``source`` into ``out`` brings."""
        calibrate = None if recipe in ("w8a8", "w8a16") else self.calibration[:calibration]
        bminf_lite.migrate(source, out, recipe, calibrate=calibrate, device="cpu")
        with bminf_lite.load(out, "cpu") as model:
            return perplexity(model, self.measured, WINDOW).value / self.perplexity - 1


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo()


@pytest.mark.parametrize("recipe, bound", [("w8a16", 0.001), ("w8a8", 0.005), ("w8a8-smooth", 0.002), ("auto", 0.002)])
def test_perplexity_of_int8(demo: Demo, tmp_path: Path, recipe: str, bound: float) -> None:
    assert abs(demo.cost(DEMO, tmp_path / "out", recipe)) < bound


CASES = {"norms": 0.03, "neurons": 0.005, "values": 0.008, "spike": 0.04}
"""Where the outliers are, and what they cost plain w8a8 at least: several times what the demo model pays."""


@pytest.mark.parametrize("case", CASES)
def test_outliers_cost_plain_int8_much_and_a_calibration_finds_them(demo: Demo, tmp_path: Path, case: str) -> None:
    frequent = Counter(demo.measured).most_common(1)[0][0]
    put_in = {
        "norms": outliers.in_norms,
        "neurons": outliers.in_neurons,
        "values": outliers.in_values,
        "spike": outliers.spike(frequent),
    }[case]
    source = outliers.write(DEMO, tmp_path / "source", put_in)
    with bminf_lite.load(source, "cpu") as model:
        difference = model.logits(demo.measured[:WINDOW]) - demo.logits
    assert np.abs(difference).max() < 1e-5 * np.abs(demo.logits).max()
    assert demo.cost(source, tmp_path / "plain", "w8a8") > CASES[case]
    assert abs(demo.cost(source, tmp_path / "auto", "auto", TOKENS // 2)) < 0.01
