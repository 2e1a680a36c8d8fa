"""What some products cost alone: against a checkpoint in which only these are int8."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import bminf_lite
from bminf_lite import backend
from bminf_lite.checkpoint.recipe import Recipe, Scheme
from bminf_lite.evaluation import sensitivity
from bminf_lite.evaluation.compare import compare
from bminf_lite.evaluation.corpus import Window


def windows() -> list[Window]:
    random = np.random.default_rng(0)
    return [Window(random.integers(0, 256, n).astype(np.int32), n - 1) for n in (40, 90)]


def measured(source: Path, out: Path, names: Iterable[str]) -> float:
    """The divergence of a checkpoint in which only these matrices are w8a8."""
    recipe = Recipe("some", Scheme.FLOAT, Scheme.FLOAT, dict.fromkeys(names, Scheme.W8A8))
    bminf_lite.migrate(source, out, recipe)
    return compare(out, source, windows(), "cpu", layers=False).divergence.kl


@pytest.mark.parametrize("layer_groups", [1, 6])
def test_each_is_that_of_a_model_with_these_int8_products(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer_groups: int
) -> None:
    """Each product of two layers alone, or those of both layers together."""
    monkeypatch.setattr(sensitivity, "LAYER_GROUPS", layer_groups)
    with closing(backend.create("cpu")) as ops:
        found = sensitivity.product_divergences(source, windows(), ops)
    products = [names for group in found for names in group.products]
    assert len(products) == len(set(products)) == 9 and products[-1] == ("lm_head.weight",)
    assert len(found) == (9 if layer_groups == 6 else 5)
    for number in (0, 2, 3):
        names = [name for product in found[number].products for name in product]
        assert found[number].divergence == pytest.approx(measured(source, tmp_path / str(number), names), rel=1e-3)


def test_inputs_are_rotated_as_they_will_be(source: Path) -> None:
    """Rounding differs, so the divergences do, but they stay as small as int8's."""
    with closing(backend.create("cpu")) as ops:
        plain, rotated = (
            sensitivity.product_divergences(source, windows(), ops, rotation_of=lambda name, block=block: block)
            for block in (1, 16)
        )
    for one, other in zip(plain, rotated, strict=True):
        assert one.products == other.products and one.divergence != other.divergence
        assert other.divergence < 10 * one.divergence


def test_they_nearly_add_up_to_the_whole_model_s(source: Path, tmp_path: Path) -> None:
    with closing(backend.create("cpu")) as ops:
        found = sensitivity.product_divergences(source, windows(), ops)
    bminf_lite.migrate(source, tmp_path / "all", "w8a8")
    whole = compare(tmp_path / "all", source, windows(), "cpu", layers=False).divergence.kl
    assert sum(group.divergence for group in found) == pytest.approx(whole, rel=0.2)
