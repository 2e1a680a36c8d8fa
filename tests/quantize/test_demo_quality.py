"""The cost of int8 for the demo model on held-out text: as it is, and with outliers that do not change its function."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path

import numpy as np
import outliers
import pytest

import bminf_lite
from bminf_lite.api import Model
from bminf_lite.evaluation.divergence import log_softmax

DEMO = Path(str(resources.files("bminf_lite.demo_model")))
WINDOW = 512


class Demo:
    """The demo model: text to measure and to calibrate on, and the float model's predictions."""

    def __init__(self) -> None:
        with bminf_lite.load(DEMO, "cpu") as model:
            ids = model.tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8"), False)
            self.measured, self.calibration = ids[: 2 * WINDOW], ids[2 * WINDOW : 4 * WINDOW]
            self.expected = self.predictions(model)

    def predictions(self, model: Model) -> np.ndarray:
        """Logarithms of probabilities, fp32 ``[tokens, vocab]``."""
        windows = (self.measured[:WINDOW], self.measured[WINDOW:])
        return np.concatenate([log_softmax(model.logits(window)) for window in windows])

    def cost(self, source: Path, out: Path, recipe: str) -> float:
        """The mean divergence of the predictions, in nats per token, after migrating ``source`` into ``out``."""
        calibrate = None if recipe in ("w8a8", "w8a16") else self.calibration
        bminf_lite.migrate(source, out, recipe, calibrate=calibrate, device="cpu")
        with bminf_lite.load(out, "cpu") as model:
            found = self.predictions(model)
        return float((np.exp(self.expected) * (self.expected - found)).sum(axis=1).mean())


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo()


@pytest.mark.parametrize("recipe, bound", [("w8a16", 0.0005), ("w8a8", 0.004), ("w8a8-smooth", 0.004), ("auto", 0.003)])
def test_int8_costs_little(demo: Demo, tmp_path: Path, recipe: str, bound: float) -> None:
    assert demo.cost(DEMO, tmp_path / "out", recipe) < bound


CASES = {"norms": 0.03, "neurons": 0.012, "values": 0.012, "spike": 0.02}
"""Where the outliers are, and their least cost for plain w8a8: several times that of the demo model."""


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
        np.testing.assert_allclose(demo.predictions(model), demo.expected, atol=1e-3)
    assert demo.cost(source, tmp_path / "plain", "w8a8") > CASES[case]
    assert demo.cost(source, tmp_path / "auto", "auto") < 0.003
