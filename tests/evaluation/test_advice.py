"""What is advised follows from what was lost and from how products are quantized."""

from __future__ import annotations

import math

import pytest

from bminf_lite.checkpoint.recipe import DEFAULT_RECIPE, PORTABLE_RECIPE, built_in_recipes
from bminf_lite.evaluation.advice import MEASURED, SMALL, ProductCounts, advice, expectation

PLAIN, ROTATED, FLOAT_INPUTS = (
    ProductCounts(plain=3, rotated=1),
    ProductCounts(rotated=4),
    ProductCounts(float_inputs=4),
)


def test_products_are_counted_by_their_schemes() -> None:
    found = ProductCounts.of(["w8a8", "w8a8 H64", "w8a8, w8a8 H64", "w8a16", "w8a16 H64", "float", "w8a8+4"])
    assert found == ProductCounts(plain=2, rotated=2, float_inputs=2)


@pytest.mark.parametrize(
    ("counts", "expected"), [(PLAIN, "w8a8-rotate-all"), (ROTATED, "--target-divergence 0.01"), (FLOAT_INPUTS, "gptq")]
)
def test_a_large_loss_has_a_remedy(counts: ProductCounts, expected: str) -> None:
    assert expected in advice(0.02, counts)[0]
    assert "--target-divergence 0.01" in advice(0.02, counts, was_searched=True)[0]
    named = "\n".join(advice(0.02, counts, ["model.x.weight"]))
    assert ('"model.x.weight" = "w8a16"' in named) == (counts is not FLOAT_INPUTS)


@pytest.mark.parametrize("counts", [PLAIN, ROTATED, FLOAT_INPUTS])
def test_a_small_loss_needs_none(counts: ProductCounts) -> None:
    [line] = advice(SMALL, counts, ["model.x.weight"])
    assert "small" in line
    assert not advice(math.nan, counts)


def test_what_was_measured_is_expected() -> None:
    assert {DEFAULT_RECIPE, PORTABLE_RECIPE} <= MEASURED.keys() <= set(built_in_recipes())
    assert all(0 < low <= high for low, high in MEASURED.values())
    assert "0.004 to 0.0046" in expectation("w8a8-rotate-all") and expectation("mine") == ""
