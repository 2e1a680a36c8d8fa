"""The choice among the options of each product, by what quantized models are measured to diverge.

A calibration collects the options (:mod:`..quantize.decisions`), a run of groups of products says what their errors
cost (:mod:`..evaluation.sensitivity`), and both give a path of assignments from the fastest to the most exact
(:mod:`.budget`). Points of the path are made in memory and measured on held-out text (:mod:`..evaluation.candidates`).

With a target the first point of the path that meets it is the answer. Without one it is the most exact point that takes
at most :data:`MORE_TIME` more than rotated w8a8, but never one that diverges more than a quantization of all products
alike: then it is the first point behind it that does not, or that quantization.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.communicator import on_ranks_apart
from ..bench.product_times import make_time_of
from ..checkpoint.opened_model import ModelSource, OpenedModel
from ..checkpoint.weight_rewrite import CalibrationResult
from ..errors import CheckpointError
from ..evaluation.blockwise import Batch
from ..evaluation.candidates import Candidate, CandidateComparison
from ..evaluation.corpus import Window, fit_windows
from ..evaluation.sensitivity import GroupDivergence, product_divergences
from ..quantize.calibration import Progress
from ..quantize.decisions import QuantizationSearch, Uniform
from .budget import BudgetChoice, PathSearch, Point, divergence_weights, fastest_path, point_of, product_choices
from .held_out import CalibrationSplit, evenly_spaced

SENSITIVITY_TOKENS, SENSITIVITY_WINDOW = 256, 128
"""Tokens on which groups of products are quantized alone, and the most of one sample."""
COMPARED_TOKENS = 1024
"""Held-out tokens on which assignments are compared without a target."""
FACTOR_OF_TEXTS = 4
"""A model that makes vectors is compared on ``FACTOR_OF_TEXTS`` times as many tokens: each text has one vector."""
MORE_TIME = 0.04
"""The share of the time of rotated w8a8 that an assignment without a target may take beside it."""

Measure = Callable[[Sequence[Point]], Sequence[float]]
"""The divergences of assignments, NaN for outputs that are not finite."""


class AssignmentSearch:
    """Chooses an option of each product, as the module says.

    ``options`` are those of the float ``model``, whose checkpoint is in ``source``; ``reference`` is that checkpoint
    as it is, from which divergences are measured. Each of ``devices`` runs a part of the groups of products, and of the
    assignments that are measured at once. ``target`` is a divergence in the unit of
    :mod:`..evaluation.outputs`, or None. ``progress`` is called with layers, once for each run of the model.
    """

    def __init__(
        self,
        source: Path | ModelSource,
        reference: OpenedModel,
        model: OpenedModel,
        options: QuantizationSearch,
        tokens: CalibrationSplit,
        devices: Sequence[Backend],
        target: float | None = None,
        progress: Progress | None = None,
    ):
        self.source = source
        self.config = model.config
        self.options = options
        self.tokens = tokens
        self.devices = devices
        self.target = target
        self._progress = progress
        self._factor = 1 if model.config.generates else FACTOR_OF_TEXTS
        held_out = fit_windows([Window(part, len(part) - 1) for part in tokens.held_out], model.config)
        compared = held_out if target else _first(held_out, COMPARED_TOKENS * self._factor)
        self._comparisons = [CandidateComparison(model, compared, ops, reference) for ops in devices]

    def known(self) -> list[tuple[Batch, np.ndarray]]:
        """What was computed of the reference on the held-out samples, see :func:`.compare`."""
        return self._comparisons[0].known()

    def run(self) -> tuple[CalibrationResult, dict[str, Any]]:
        """The rewrites of the answer, and the trade for the manifest.

        Raises :class:`CheckpointError` if no assignment meets the target.
        """
        unit = self._comparisons[0].outputs.unit
        times_of, time_of = make_time_of(self.devices[0])
        weights = self._weights()
        choices = [
            product_choices(self.options.spec, found, weights.get(found[0].decision.tensors, 0.0), time_of)
            for found in self.options.options
        ]
        path = fastest_path(
            [
                [choice for choice in found if not options[choice.number].apart]
                for found, options in zip(choices, self.options.options, strict=True)
            ]
        )
        if self.target is None:
            uniform = {how: self._uniform_point(how, choices) for how in self.options.uniform()}
            limit = (1 + MORE_TIME) * uniform.get(Uniform.ROTATED, path[0]).time.request
            search, uniform, chosen = most_exact(path, uniform, limit, self._measured)
            trade = search.trade(times_of, unit) | {
                "target": None,
                "uniform": {how.value: point.to_dict() for how, point in uniform.items()},
                "assignment": chosen.to_dict(),
            }
        else:
            search = searched(PathSearch(path, self.target), self._measured)
            if search.proposed is None:
                raise CheckpointError(self._none_meets(search.path))
            trade, chosen = search.trade(times_of, unit), search.path[search.proposed]
        return self.options.result(chosen.choices), trade

    def _weights(self) -> dict[tuple[str, ...], float]:
        """The divergence of each product for its error."""
        samples = self.tokens.samples
        length = min(SENSITIVITY_WINDOW, *map(len, samples))
        wanted = max(SENSITIVITY_TOKENS * self._factor // length, 1)
        chosen = evenly_spaced(len(samples), min(wanted, len(samples)))
        windows = fit_windows([Window(samples[i][:length], length - 1) for i in chosen], self.config)
        recipe, spec = self.options.recipe, self.options.spec

        def of_part(rank: int, check: Callable[[], None]) -> list[GroupDivergence]:
            return product_divergences(
                self.source,
                windows,
                self.devices[rank],
                recipe.offline_rotation,
                self._shown(rank, check),
                lambda name: recipe.rotation_of(spec, name),
                rank,
                len(self.devices),
            )

        groups = [group for part in on_ranks_apart(self.devices, of_part) for group in part]
        decisions = [found[0].decision for found in self.options.options]
        return divergence_weights(groups, {decision.tensors: decision.error_before for decision in decisions})

    def _uniform_point(self, how: Uniform, choices: Sequence[Sequence[BudgetChoice]]) -> Point:
        """The assignment in which all products are quantized alike, as far as their options allow it."""
        numbers = self.options.uniform()[how]
        return point_of([found[number] for found, number in zip(choices, numbers, strict=True)])

    def _measured(self, points: Sequence[Point]) -> list[float]:
        candidates = [Candidate(self.options.recipe, self.options.result(point.choices).rewrites) for point in points]
        count = min(len(self.devices), len(candidates))
        means = [math.nan] * len(candidates)

        def measure(rank: int, check: Callable[[], None]) -> list[float]:
            found = self._comparisons[rank].divergences(candidates[rank::count], self._shown(rank, check))
            return [result.mean for result in found]

        for rank, part in enumerate(on_ranks_apart(self.devices[:count], measure)):
            means[rank::count] = part
        return means

    def _shown(self, rank: int, check: Callable[[], None]) -> Progress:
        """The progress of a rank: the first one's is shown."""

        def show(*step: Any) -> None:
            check()
            if rank == 0 and self._progress:
                self._progress(*step)

        return show

    def _none_meets(self, path: Sequence[Point]) -> str:
        points = [point for point in path if point.measured is not None]
        found = "; ".join(f"{point.measured:.6g} in {1e3 * point.time.request:.4g} ms a request" for point in points)
        return (
            f"no quantization diverges by at most {self.target:g} {self._comparisons[0].outputs.unit} from its source "
            f"on held-out text, and none was written (measured: {found}). Allow more, or write a recipe that "
            "leaves some matrices float"
        )


def most_exact(
    path: Sequence[Point], uniform: Mapping[Uniform, Point], limit: float, measure: Measure
) -> tuple[PathSearch, dict[Uniform, Point], Point]:
    """The last point of ``path`` that takes at most ``limit`` seconds for a request, if nothing uniform is more exact.

    Otherwise it is the first one behind it that is as exact as the best uniform quantization, or that if there is none.
    Returns the search along the path, the ``uniform`` points and the answer, all measured.
    """
    first = max((i for i, point in enumerate(path) if point.time.request <= limit), default=0)
    *divergences, of_first = measure([*uniform.values(), path[first]])
    found = {how: replace(point, measured=kl) for (how, point), kl in zip(uniform.items(), divergences, strict=True)}
    best = min(found.values(), key=lambda point: _or_infinite(point.measured))
    search = PathSearch(path, _or_infinite(best.measured))
    search.begin(first, of_first)
    searched(search, measure)
    return search, found, best if search.proposed is None else search.path[search.proposed]


def searched(search: PathSearch, measure: Measure) -> PathSearch:
    """``search`` after the measurements that it proposes."""
    while not search.done:
        number = search.proposed
        assert number is not None
        [divergence] = measure([search.path[number]])
        search.tell(number, divergence)
    return search


def _first(windows: Sequence[Window], tokens: int) -> list[Window]:
    """The first windows, of ``tokens`` tokens or, if they are longer, one."""
    ends = np.cumsum([len(window.tokens) for window in windows])
    return list(windows[: max(int(np.searchsorted(ends, tokens, side="right")), 1)])


def _or_infinite(divergence: float | None) -> float:
    """A divergence that compares: infinity for NaN."""
    return math.inf if divergence is None or math.isnan(divergence) else divergence
