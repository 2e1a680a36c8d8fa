"""Quantizations in memory diverge as the folders that a migration writes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

import bminf_lite
from bminf_lite import backend
from bminf_lite.checkpoint.migrate import recipe_rewrites
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.recipe import load_recipe
from bminf_lite.evaluation.candidates import Candidate, CandidateComparison
from bminf_lite.evaluation.compare import compare
from bminf_lite.evaluation.corpus import Window

RECIPES = ("w8a8", "w8a8-rotate-all", "w8a16")


def test_each_is_that_of_the_folder_whichever_run_measures_it(source: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    windows = [Window(random.integers(0, 256, n).astype(np.int32), n - 1) for n in (40, 90)]
    expected = {}
    for recipe in RECIPES:
        report = bminf_lite.migrate(source, tmp_path / recipe, recipe)
        assert (report.only_bminf_lite is None) == ("rotate" not in recipe)
        expected[recipe] = compare(tmp_path / recipe, source, windows, "cpu", layers=False).divergence.to_dict()
    steps: list[tuple[int, int]] = []
    with open_model(source) as model, closing(backend.create("cpu")) as ops:
        candidates = [Candidate(load_recipe(name), recipe_rewrites(model.spec, load_recipe(name))) for name in RECIPES]
        comparison = CandidateComparison(model, windows, ops)
        found = comparison.divergences(candidates, lambda done, total, part: steps.append((done, total)))
        assert [divergence.to_dict() for divergence in found] == list(expected.values())
        assert [found.to_dict() for found in comparison.divergences(candidates[1:2])] == [expected[RECIPES[1]]]
        for known in (comparison.known(), CandidateComparison(model, windows, ops).known()):
            again = compare(tmp_path / RECIPES[1], source, windows, "cpu", layers=False, known=known).divergence
            assert again.to_dict() == expected[RECIPES[1]]
    assert steps == [(i, 3) for i in range(4)]
