"""The fastest assignment of quantizations to products whose divergence stays below a target.

Each product has several options (:class:`~bminf_lite.quantize.decisions.ProductOption`), each with a time and with the
divergence that it is expected to cause: its error times the measured divergence for an error of such products in w8a8
(:mod:`bminf_lite.evaluation.sensitivity`). Both add up over products. Smoothing, rotations in the weights and GPTQ cost
no time.

The path starts with the fastest option of every product. Each step gives one product a more exact option: the one that
saves most divergence for its time. So every point of the path is the fastest assignment with its expected divergence
(the greedy solution of the knapsack problem's relaxation, see https://en.wikipedia.org/wiki/Continuous_knapsack_problem
and, for several options of each item, "multiple-choice knapsack"). The divergence of some points is then measured on
held-out text, to find the first point that meets the target.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..bench.product_times import ProductMethod, ProductTime, TimeOf
from ..checkpoint.recipe import CalibrationSettings, Recipe, RotatedInputs, Scheme, load_recipe
from ..evaluation.sensitivity import GroupDivergence, ProductNames
from ..models.spec import Role, Spec
from ..quantize.decisions import Decision, ProductOption

OUTLIER_COLUMNS = 8
"""Columns of a product that may stay fp16."""
GUESSES = 3
"""Points that are chosen by the expected divergence; later ones halve the rest of the path."""


def offline_part(recipe: Recipe) -> Recipe:
    """A recipe that rotates, with rotations in the weights alone, so that other readers open the result."""
    return replace(
        recipe,
        name=f"{recipe.name}, offline only",
        rotation=1,
        rotated_inputs=RotatedInputs.FEED_FORWARD,
        offline_rotation=True,
    )


def budget_recipe(recipe: Recipe, offline_only: bool, rotates_stream: bool) -> Recipe:
    """``recipe``, which calibrates, with everything that options may use: rotations, outlier columns and GPTQ.

    With ``offline_only`` these are what other readers open. ``rotates_stream`` says whether the model's residual stream
    can be rotated in its weights, which is not done where all inputs can be rotated at run time.
    """
    if offline_only:
        recipe = offline_part(recipe)
    settings = recipe.calibration or CalibrationSettings()
    columns = 0 if offline_only else settings.outlier_columns or OUTLIER_COLUMNS
    rotation = 1 if offline_only else max(recipe.rotation, load_recipe("w8a8-rotate").rotation)
    return replace(
        recipe,
        rotation=rotation,
        offline_rotation=rotates_stream and recipe.rotated_inputs is not RotatedInputs.ALL,
        calibration=replace(settings, outlier_columns=columns, rounding="gptq"),
    )


@dataclass(frozen=True)
class BudgetChoice:
    """One option of a product: its number, its decision, its time, and the expected divergence in nats per token."""

    number: int
    decision: Decision
    time: ProductTime
    divergence: float


@dataclass(frozen=True)
class Point:
    """An assignment of an option to each product: their numbers, and its time and expected divergence.

    ``measured`` is the measured divergence, None before that. ``change`` says which product differs from the point
    before, and how it is quantized; empty for the first point.
    """

    choices: tuple[int, ...]
    time: ProductTime
    expected: float
    change: str = ""
    measured: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For the manifest; times in seconds. A measured divergence that is no number is None."""
        measured = None if self.measured is None or not math.isfinite(self.measured) else self.measured
        return {
            "change": self.change,
            "prompt_seconds": self.time.prompt,
            "step_seconds": self.time.step,
            "request_seconds": self.time.request,
            "expected": self.expected,
            "measured": measured,
        }


def product_choices(
    spec: Spec, options: Sequence[ProductOption], weight: float, time_of: TimeOf
) -> tuple[BudgetChoice, ...]:
    """The options of one product. ``weight`` is the divergence that it causes for its error."""
    decisions = [option.decision for option in options]
    return tuple(
        BudgetChoice(number, decision, time_of(method_of(spec, decision)), weight * decision.error)
        for number, decision in enumerate(decisions)
    )


def divergence_weights(
    groups: Sequence[GroupDivergence], error_of: Mapping[ProductNames, float]
) -> dict[ProductNames, float]:
    """The divergence of each product for its error, the same for all products of a group.

    ``error_of`` are the errors with which the divergences were measured.
    """
    weights: dict[ProductNames, float] = {}
    for group in groups:
        total = sum(error_of.get(names, 0.0) for names in group.products)
        weights |= dict.fromkeys(group.products, group.divergence / total if total > 0 else 0.0)
    return weights


def method_of(spec: Spec, decision: Decision) -> ProductMethod:
    """The product of a decision, all its matrices stacked, as far as its time depends on it."""
    parameters = [spec.parameters[name] for name in decision.tensors]
    shapes = [p.shape[::-1] if p.transposed else p.shape for p in parameters]
    return ProductMethod(
        sum(shape[0] for shape in shapes),
        shapes[0][1],
        decision.scheme,
        decision.rotation,
        len(decision.outlier_columns),
        parameters[0].role is Role.HEAD,
    )


def fastest_path(products: Sequence[Sequence[BudgetChoice]]) -> list[Point]:
    """The points from the fastest assignment to the most exact, each with one product changed."""
    hulls = [lower_hull(choices) for choices in products]
    steps = [
        ((before.divergence - after.divergence) / (after.time.request - before.time.request), i, after)
        for i, hull in enumerate(hulls)
        for before, after in itertools.pairwise(hull)
    ]
    current = [hull[0] for hull in hulls]
    points = [point_of(current)]
    for _, i, after in sorted(steps, key=lambda step: -step[0]):  # a hull's own steps are in this order already
        current[i] = after
        points.append(point_of(current, f"{after.decision.tensors[0]}: {describe(after.decision)}"))
    return points


def lower_hull(choices: Sequence[BudgetChoice]) -> list[BudgetChoice]:
    """The lower convex hull of the options: from the fastest on, each step saves less divergence for its time."""
    hull: list[BudgetChoice] = []
    for choice in sorted(choices, key=lambda choice: (choice.time.request, choice.divergence)):
        if hull and choice.divergence >= hull[-1].divergence:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(before: BudgetChoice, after: BudgetChoice) -> float:
    return (after.divergence - before.divergence) / (after.time.request - before.time.request)


def point_of(chosen: Sequence[BudgetChoice], change: str = "") -> Point:
    """The assignment of one option to each product."""
    time = ProductTime(sum(c.time.prompt for c in chosen), sum(c.time.step for c in chosen))
    return Point(tuple(c.number for c in chosen), time, sum(c.divergence for c in chosen), change)


def describe(decision: Decision) -> str:
    """How a product is quantized, in short: ``w8a8 H64 smoothed gptq``, ``w8a8+8``, ``w8a16``."""
    text = decision.scheme.value
    text += f" H{decision.rotation}" if decision.rotation > 1 else ""
    text += f"+{len(decision.outlier_columns)}" if decision.outlier_columns else ""
    text += "" if decision.exponent is None else " smoothed"
    return text + (" gptq" if decision.rounding == "gptq" else "")


class PathSearch:
    """Finds the first point of a path whose measured divergence is at most ``target``.

    It assumes that the divergence falls along the path. The expected divergence, corrected by the latest measurement,
    proposes :data:`GUESSES` points; after that, the search halves the rest of the path.
    """

    def __init__(self, path: Sequence[Point], target: float):
        self.path = list(path)
        self.target = target
        self._fails, self._meets = -1, len(self.path)
        self._correction = 1.0

    def begin(self, number: int, divergence: float) -> None:
        """Leave out all points before ``number``, whose divergence was measured."""
        self._fails = number - 1
        self.tell(number, divergence)

    @property
    def done(self) -> bool:
        """Whether :attr:`proposed` is the answer."""
        return self._meets - self._fails <= 1

    @property
    def proposed(self) -> int | None:
        """The number of the point to measure, or the answer; None if no point meets the target."""
        if self.done:
            return self._meets if self._meets < len(self.path) else None
        if sum(point.measured is not None for point in self.path) >= GUESSES:
            return (self._fails + self._meets) // 2
        expected = (point.expected * self._correction <= self.target for point in self.path)
        guess = next((i for i, meets in enumerate(expected) if meets), len(self.path) - 1)
        return min(max(guess, self._fails + 1), self._meets - 1)

    def tell(self, number: int, divergence: float) -> None:
        """The measured divergence of the proposed point."""
        point = self.path[number] = replace(self.path[number], measured=divergence)
        if divergence <= self.target:
            self._meets = number
        else:
            self._fails = number
        if math.isfinite(divergence) and point.expected > 0:
            self._correction = divergence / point.expected

    def trade(self, times_of: str, unit: str = "nats per token") -> dict[str, Any]:
        """The trade for the manifest; ``times_of`` says whose times these are, and ``unit`` is that of divergences."""
        return {
            "target": self.target,
            "unit": unit,
            "times_of": times_of,
            "chosen": self.proposed,
            "points": [point.to_dict() for point in self.path],
        }


def is_searchable(recipe: Recipe) -> bool:
    """Whether a recipe leaves something to choose: it calibrates, and its linear layers are w8a8."""
    return recipe.calibration is not None and recipe.linear is Scheme.W8A8


def searches(recipe: Recipe) -> bool:
    """Whether a recipe chooses among options by measured divergence also without a target."""
    return recipe.calibration is not None and recipe.calibration.search
