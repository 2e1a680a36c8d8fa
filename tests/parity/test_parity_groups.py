"""Weights with a scale for each group of columns: transformers opens what is written, and computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from parity_kit import relative_error, reopened
from tiny_models import goldens

import bminf_lite
from bminf_lite.checkpoint.recipe import Recipe, Scheme

torch = pytest.importorskip("torch", reason="parity needs torch")
pytest.importorskip("transformers", reason="parity needs transformers")
import make_goldens  # noqa: E402  (needs torch)

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_opens_what_is_written(family: str, tmp_path: Path) -> None:
    golden = next(goldens(family))
    make_goldens.build(golden.config, golden.seed).save_pretrained(tmp_path / "source")
    recipe = Recipe("groups", Scheme.W8A16, Scheme.W8A16, group_size=16)
    bminf_lite.migrate(tmp_path / "source", tmp_path / "out", recipe)
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        logits = model.logits(golden.tokens)
    theirs = make_goldens.logits_of(reopened(tmp_path / "out"), golden.tokens)
    assert relative_error(logits, theirs) < (0.01 if golden.spec.tied else 1e-4)  # a tied head is float there
    assert relative_error(logits, np.asarray(golden.logits)) < 0.02
