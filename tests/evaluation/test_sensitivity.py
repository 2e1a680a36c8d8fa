"""What each product costs alone: against a checkpoint in which only that product is int8."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import bminf_lite
from bminf_lite import backend
from bminf_lite.checkpoint.recipe import Recipe, Scheme
from bminf_lite.evaluation.compare import compare
from bminf_lite.evaluation.corpus import Window
from bminf_lite.evaluation.sensitivity import product_divergences


def windows() -> list[Window]:
    random = np.random.default_rng(0)
    return [Window(random.integers(0, 256, n).astype(np.int32), n - 1) for n in (40, 90)]


def test_each_is_that_of_a_model_with_one_int8_product(source: Path, tmp_path: Path) -> None:
    with closing(backend.create("cpu")) as ops:
        found = product_divergences(source, windows(), ops)
    assert len(found) == 9 and list(found)[-1] == ("lm_head.weight",)
    for number in (0, 3, 6):
        names, expected = list(found.items())[number]
        recipe = Recipe("one", Scheme.FLOAT, Scheme.FLOAT, dict.fromkeys(names, Scheme.W8A8))
        bminf_lite.migrate(source, tmp_path / str(number), recipe)
        measured = compare(tmp_path / str(number), source, windows(), "cpu", layers=False).divergence.kl
        assert expected == pytest.approx(measured, rel=1e-3)


def test_they_nearly_add_up_to_the_whole_model_s(source: Path, tmp_path: Path) -> None:
    with closing(backend.create("cpu")) as ops:
        found = product_divergences(source, windows(), ops)
    bminf_lite.migrate(source, tmp_path / "all", "w8a8")
    measured = compare(tmp_path / "all", source, windows(), "cpu", layers=False).divergence.kl
    assert sum(found.values()) == pytest.approx(measured, rel=0.2)
