"""The cost of int8 for the demo model on held-out text: as it is, and with outliers that do not change its function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

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
            self.measured, self.calibration = ids[: 2 * WINDOW], ids[2 * WINDOW : 3 * WINDOW]
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


LEFT_OUT = [pytest.param(*case, marks=pytest.mark.slow) for case in [("w8a16", 0.0005), ("auto", 0.003)]]


@pytest.mark.parametrize("recipe, bound", [("w8a8", 0.004), *LEFT_OUT])
def test_int8_costs_little(demo: Demo, tmp_path: Path, recipe: str, bound: float) -> None:
    assert demo.cost(DEMO, tmp_path / "out", recipe) < bound


CASES = {"norms": 0.03, "neurons": 0.012, "values": 0.012, "spike": 0.02}
"""Where the outliers are, and their least cost for plain w8a8: several times that of the demo model."""


def with_outliers(demo: Demo, folder: Path, cases: Iterable[str]) -> Path:
    """The demo model with outliers that do not change its predictions."""
    frequent = Counter(demo.measured).most_common(1)[0][0]
    changes = {
        "norms": outliers.in_norms,
        "neurons": outliers.in_neurons,
        "values": outliers.in_values,
        "spike": outliers.spike(frequent),
    }

    def put_in(tensors: outliers.Tensors, config: dict[str, Any]) -> None:
        for case in cases:
            changes[case](tensors, config)

    source = outliers.write(DEMO, folder, put_in)
    with bminf_lite.load(source, "cpu") as model:
        np.testing.assert_allclose(demo.predictions(model), demo.expected, atol=1e-3)
    return source


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_outliers_cost_plain_int8_much(demo: Demo, tmp_path: Path, case: str) -> None:
    assert demo.cost(with_outliers(demo, tmp_path / "source", [case]), tmp_path / "plain", "w8a8") > CASES[case]


@pytest.mark.slow
def test_a_calibration_finds_all_outliers(demo: Demo, tmp_path: Path) -> None:
    assert demo.cost(with_outliers(demo, tmp_path / "source", CASES), tmp_path / "auto", "auto") < 0.005
