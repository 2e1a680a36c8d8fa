"""A migration with a target: the path of assignments, the search on it, and what a result says about the trade."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bminf_lite
from bminf_lite.bench.product_times import ProductTime
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.recipe import Scheme
from bminf_lite.cli.migrate import choice_lines, trade_lines
from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.evaluation.sensitivity import GroupDivergence
from bminf_lite.migration.budget import BudgetChoice, PathSearch, Point, divergence_weights, fastest_path
from bminf_lite.migration.target import most_exact
from bminf_lite.quantize.decisions import Decision, Uniform

TIMES = st.integers(0, 20).map(float)


def choice(number: int, seconds: float, divergence: float) -> BudgetChoice:
    decision = Decision(("w",), Scheme.W8A8, None, (), "nearest", 1.0, 1.0)
    return BudgetChoice(number, decision, ProductTime(seconds, 0.0), divergence)


PRODUCTS = st.lists(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=4), min_size=1, max_size=3)


@given(PRODUCTS)
def test_no_assignment_is_faster_and_as_exact_as_a_point_of_the_path(products: list[list[tuple[float, float]]]) -> None:
    choices = [[choice(i, *option) for i, option in enumerate(options)] for options in products]
    path = fastest_path(choices)
    every = np.array(np.meshgrid(*(range(len(options)) for options in products))).reshape(len(products), -1).T
    totals = [np.sum([products[p][option] for p, option in enumerate(found)], axis=0) for found in every]
    for point in path:
        chosen = np.sum([products[p][option] for p, option in enumerate(point.choices)], axis=0)
        np.testing.assert_allclose(chosen, (point.time.request, point.expected))
        assert not any(seconds < chosen[0] - 1e-9 and kl <= chosen[1] for seconds, kl in totals)
    assert path[0].time.request == min(seconds for seconds, _ in totals)
    assert path[-1].expected == min(kl for _, kl in totals)
    steps = [(b.time.request - a.time.request, a.expected - b.expected) for a, b in itertools.pairwise(path)]
    slopes = [kl / seconds for seconds, kl in steps]
    assert slopes == sorted(slopes, reverse=True) and all(slope > 0 for slope in slopes)


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=40), st.floats(1e-6, 1), st.integers(0, 2**32))
def test_the_search_finds_the_first_point_in_few_measurements(values: list[float], target: float, seed: int) -> None:
    divergences = sorted(values, reverse=True)
    wrong = np.random.default_rng(seed).uniform(0.5, 2, len(values))
    path = [
        Point((), ProductTime(i, 0), kl * factor) for i, (kl, factor) in enumerate(zip(divergences, wrong, strict=True))
    ]
    search, measured = PathSearch(path, target), 0
    while not search.done:
        number = search.proposed
        assert number is not None
        search.tell(number, divergences[number])
        measured += 1
    assert search.proposed == next((i for i, kl in enumerate(divergences) if kl <= target), None)
    assert measured <= 4 + math.log2(len(path))
    if search.proposed is not None:
        assert search.path[search.proposed].measured == divergences[search.proposed]


VALUES = st.lists(st.one_of(st.floats(1e-6, 1), st.just(math.nan)), min_size=4, max_size=12)


@given(VALUES, st.integers(0, 12))
def test_without_a_target_the_answer_is_never_worse_than_a_uniform_quantization(
    divergences: list[float], limit: int
) -> None:
    """Whatever is measured, also where the divergence does not fall along the path."""
    points = [Point((i,), ProductTime(float(i), 0), 1.0 / (1 + i)) for i in range(len(divergences))]
    uniform, path = dict(zip(Uniform, points[:3], strict=True)), points[3:]
    measured: list[int] = []

    def measure(asked: Sequence[Point]) -> list[float]:
        measured.extend(point.choices[0] for point in asked)
        return [divergences[point.choices[0]] for point in asked]

    search, found, chosen = most_exact(path, uniform, limit, measure)
    known = [kl for kl in divergences[:3] if not math.isnan(kl)]
    assert not known or (chosen.measured is not None and chosen.measured <= min(known))
    assert chosen.measured is None or math.isnan(chosen.measured) or chosen.measured == divergences[chosen.choices[0]]
    assert [point.measured for point in found.values()] == pytest.approx(divergences[:3], nan_ok=True)
    assert len(measured) <= 4 + 4 + math.log2(len(path))
    within = [point for point in path if point.time.request <= limit]
    if within and known and divergences[within[-1].choices[0]] <= min(known):
        assert chosen.choices == within[-1].choices and len(measured) == 4
    assert search.proposed is None or search.path[search.proposed].choices == chosen.choices


@given(st.lists(st.lists(st.tuples(st.floats(0, 1), st.floats(1e-3, 1)), min_size=1, max_size=4), max_size=4))
def test_the_expected_divergences_of_what_was_measured_add_up_to_it(groups: list[list[tuple[float, float]]]) -> None:
    names = iter(range(100))
    errors: dict[tuple[str, ...], float] = {}
    found = []
    for group in groups:
        products = tuple((str(next(names)),) for _ in group)
        errors |= {product: error for product, (_, error) in zip(products, group, strict=True)}
        found.append(GroupDivergence(products, group[0][0]))
    weights = divergence_weights(found, errors)
    assert weights.keys() == errors.keys()
    for group in found:
        expected = sum(weights[product] * errors[product] for product in group.products)
        assert expected == pytest.approx(group.divergence)


def test_auto_is_no_worse_than_a_recipe_for_all_products(source: Path, text: Path, tmp_path: Path) -> None:
    report = bminf_lite.migrate(source, tmp_path / "out", "auto", calibrate=text, samples=4, device="cpu")
    trade = report.cost["trade"]
    assert trade["uniform"].keys() == {how.value for how in Uniform} and trade["target"] is None
    assert report.cost["kl"] == trade["assignment"]["measured"] <= min(p["measured"] for p in trade["uniform"].values())
    for recipe, how in (("w8a8", Uniform.W8A8), ("w8a8-rotate-all", Uniform.ROTATED), ("w8a16", Uniform.W8A16)):
        plain = bminf_lite.migrate(source, tmp_path / recipe, recipe, calibrate=text, samples=4, device="cpu").cost
        # with a calibration keys are scaled, which changes no product's codes but sums of fp32
        assert trade["uniform"][how.value]["measured"] == pytest.approx(plain["kl"], rel=1e-3)
    lines = choice_lines(trade)
    assert len(lines) == 5 and lines[-1].startswith("  chosen for each product")


@pytest.mark.slow
@pytest.mark.parametrize("offline_only", [False, True])
def test_the_fastest_that_meets_the_target_is_kept(
    source: Path, text: Path, tmp_path: Path, offline_only: bool
) -> None:
    def run(target: float, out: str):
        return bminf_lite.migrate(
            source,
            tmp_path / out,
            "auto",
            calibrate=text,
            samples=4,
            device="cpu",
            target_divergence=target,
            offline_only=offline_only,
        )

    easy = run(1.0, "easy").cost
    assert easy["trade"]["chosen"] == 0 and easy["kl"] == easy["trade"]["points"][0]["measured"]
    report = run(easy["kl"] * 0.7, "out")
    trade = report.cost["trade"]
    points, chosen = trade["points"], trade["chosen"]
    assert report.cost["kl"] == points[chosen]["measured"] <= trade["target"] < points[chosen - 1]["measured"]
    assert points[0]["request_seconds"] < points[chosen]["request_seconds"]
    assert points[0]["expected"] == pytest.approx(easy["kl"], rel=0.5)
    assert json.loads((tmp_path / "out" / "bminf_lite.json").read_text())["cost"]["trade"] == trade
    changed = {name for point in points[1 : chosen + 1] for name in [point["change"].split(":")[0]]}
    products = report.calibration["products"]
    assert {p["tensors"][0] for p in products if (p["scheme"], p["rotation"]) != ("w8a8", 1)} <= changed
    with open_model(tmp_path / "out") as model:
        quantization = model.checkpoint.quantization
        assert quantization is not None and not (offline_only and (quantization.transforms or report.only_bminf_lite))
    lines = trade_lines(trade)
    assert sum(line.startswith("  ->") for line in lines) == 1
    assert "the next faster takes -" in lines[-1] and "the next more exact takes +" in lines[-1]
    with pytest.raises(CheckpointError, match=r"at most 1e-15 nats.*measured: .* ms a request"):
        run(1e-15, "none")
    assert not (tmp_path / "none").exists()


def test_a_trade_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bminf_lite.bench.plot import save_trade

    search = PathSearch([Point((i,), ProductTime(1 + i, 0), 2.0**-i) for i in range(4)], 0.3)
    while not search.done:
        assert search.proposed is not None
        search.tell(search.proposed, 2.0**-search.proposed)
    save_trade(search.trade("a GPU"), tmp_path / "trade.svg")
    assert "milliseconds" in (tmp_path / "trade.svg").read_text() or (tmp_path / "trade.svg").stat().st_size > 1000


def test_a_point_without_a_number_meets_no_target() -> None:
    search = PathSearch([Point((), ProductTime(1, 0), 0.1)], 1.0)
    search.tell(0, math.nan)
    assert search.done and search.proposed is None
    assert json.loads(json.dumps(search.trade("a GPU"), allow_nan=False))["points"][0]["measured"] is None


def test_mistakes_are_told_before_any_work(source: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for limit in (0, math.nan, math.inf):
        with pytest.raises(UsageError, match=r"target_divergence is .* must be a number more than 0"):
            bminf_lite.migrate(source, out, "auto", calibrate=text, target_divergence=limit)
    with pytest.raises(UsageError, match="target_divergence needs a text"):
        bminf_lite.migrate(source, out, "auto", target_divergence=1)
    with pytest.raises(UsageError, match=r"needs a w8a8 recipe with a calibration.*, not w8a8,"):
        bminf_lite.migrate(source, out, "w8a8", calibrate=text, target_divergence=1)
    with pytest.raises(UsageError, match="neither max_divergence nor dry_run"):
        bminf_lite.migrate(source, out, "auto", calibrate=text, target_divergence=1, dry_run=True)
    with pytest.raises(UsageError, match="w8a8-smooth rotates nothing"):
        bminf_lite.migrate(source, out, "w8a8-smooth", calibrate=text, offline_only=True)
