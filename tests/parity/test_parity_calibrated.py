"""Smoothed and mixed-precision checkpoints in transformers with compressed-tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import outliers
import pytest
from parity_kit import relative_error as error
from parity_kit import reopened

import bminf_lite

pytest.importorskip("torch", reason="parity needs torch")
import make_goldens

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
DEMO = Path(bminf_lite.__file__).parent / "demo_model"


def untouched(tensors: outliers.Tensors, config: dict) -> None:
    """No outliers."""


@pytest.mark.parametrize(
    ("recipe", "put_in"),
    [
        ("w8a8-smooth", outliers.in_norms),
        ("w8a8-smooth", outliers.in_values),
        ("auto", untouched),
        ("auto", outliers.in_norms),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_transformers_opens_it_and_agrees(
    tmp_path: Path, recipe: str, put_in: Callable[[outliers.Tensors, dict], None]
) -> None:
    source, out = outliers.write(DEMO, tmp_path / "source", put_in), tmp_path / "out"
    report = bminf_lite.migrate(
        source, out, recipe, calibrate=DEMO / "heldout.txt", samples=4, device="cpu", offline_only=recipe == "auto"
    )
    schemes = {tensor.scheme.value for tensor in report.tensors}
    assert schemes == ({"w8a8", "w8a16", "float"} if recipe == "auto" else {"w8a8", "float"})
    with bminf_lite.load(source, device="cpu") as before, bminf_lite.load(out, device="cpu") as model:
        ids = np.array(model.tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8")[:3000]))
        ours, unquantized = model.logits(ids), before.logits(ids)
    theirs = make_goldens.logits_of(reopened(out), ids)
    # they round activations by another definition (max / 127.5), and keep a tied head float
    assert error(ours, theirs) < 1.6 * error(theirs, unquantized)
    assert error(theirs, unquantized) < 0.02 and error(ours, unquantized) < 0.02
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean() > 0.95


def test_transformers_refuses_outlier_columns_by_name(tmp_path: Path) -> None:
    """Its readers do not know them, and would compute something else."""
    source = outliers.write(DEMO, tmp_path / "source", outliers.spike(199))  # a frequent token
    recipe, text = tmp_path / "columns.toml", DEMO / "heldout.txt"
    recipe.write_text(
        'linear = "w8a8"\nhead = "w8a8"\n[calibration]\nsmoothing = false\nmax_error = 0.005\noutlier_columns = 2\n'
    )
    report = bminf_lite.migrate(source, tmp_path / "out", recipe, calibrate=text, samples=4, device="cpu")
    assert any(product["outlier_columns"] for product in report.calibration["products"])
    with pytest.raises(ValueError, match="bminf-lite"):
        reopened(tmp_path / "out")
