"""A migration with a target for the divergence: calibrate once, then write and measure points of the trade."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from .. import backend
from ..backend.base import Backend
from ..bench.product_times import make_time_of
from ..checkpoint.weight_rewrite import CalibrationResult
from ..errors import CheckpointError
from ..evaluation.corpus import Window, fit_windows, parse_config
from ..evaluation.sensitivity import product_divergences
from ..quantize.calibration import Progress
from ..quantize.decisions import QuantizationSearch
from .budget import PathSearch, Point, fastest_path, product_choices
from .held_out import CalibrationSplit, evenly_spaced

SENSITIVITY_TOKENS = 1024
"""Tokens on which each product is quantized alone."""


class PointRejected(Exception):
    """A point was measured and is not the answer: another is to be written."""


class TargetSearch:
    """Writes and measures points of the trade until the fastest that meets ``target`` is found.

    ``next_point`` and ``verify`` are parts of a migration (:func:`bminf_lite.checkpoint.migrate.migrate`), which is to
    be repeated after :class:`PointRejected`. ``measure`` returns the cost of a folder.
    """

    def __init__(
        self,
        source: Path,
        tokens: CalibrationSplit,
        target: float,
        measure: Callable[[Path], dict[str, Any]],
        progress: Progress | None = None,
    ):
        self.source = source
        self.tokens = tokens
        self.target = target
        self._measure = measure
        self._progress = progress
        self._options: QuantizationSearch | None = None
        self._search: PathSearch
        self._times_of = ""
        self._costs: dict[int, dict[str, Any]] = {}

    def next_point(self, calibrate: Callable[[Backend], QuantizationSearch], device: str) -> CalibrationResult:
        """The rewrites of the next point. ``calibrate`` collects the products' options on a backend, once."""
        if self._options is None:
            with closing(backend.create(device)) as ops:
                self._options = calibrate(ops)
                self._search = PathSearch(self._path(self._options, ops), self.target)
        number = self._search.proposed
        assert number is not None
        return self._options.result(self._search.path[number].choices)

    def verify(self, folder: Path) -> Mapping[str, Any]:
        """Measure the point in ``folder``; returns its cost and the trade if it is the answer.

        Raises :class:`PointRejected` if it is not, and :class:`CheckpointError` if no point meets the target.
        """
        number = self._search.proposed
        assert number is not None
        if not self._search.done:
            cost = self._costs[number] = self._measure(folder)
            self._search.tell(number, float("nan") if cost["kl"] is None else cost["kl"])
        if self._search.done and self._search.proposed is None:
            raise CheckpointError(self._none_meets())
        if not self._search.done or self._search.proposed != number:
            raise PointRejected
        return self._costs[number] | {"trade": self._search.trade(self._times_of)}

    def _path(self, options: QuantizationSearch, ops: Backend) -> list[Point]:
        samples = self.tokens.samples
        chosen = evenly_spaced(len(samples), min(max(SENSITIVITY_TOKENS // len(samples[0]), 1), len(samples)))
        windows = [Window(samples[i], len(samples[i]) - 1) for i in chosen]
        windows = fit_windows(windows, parse_config(self.source))
        rotated = options.recipe.offline_rotation
        divergences = product_divergences(self.source, windows, ops, rotated, self._progress)
        self._times_of, time_of = make_time_of(ops)
        return fastest_path(
            [
                product_choices(options.spec, found, divergences[found[0].decision.tensors], time_of)
                for found in options.options
            ]
        )

    def _none_meets(self) -> str:
        points = [point for point in self._search.path if point.measured is not None]
        found = "; ".join(f"{point.measured:.6g} in {1e3 * point.time.request:.4g} ms a request" for point in points)
        return (
            f"no quantization diverges by at most {self.target:g} nats per token from its source on held-out text, "
            f"and none was written (measured: {found}). Allow more, or write a recipe that leaves some matrices float"
        )
