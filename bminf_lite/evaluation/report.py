"""A comparison as one HTML file: plots that point out the worst layers, and a table of all products.

The file refers to no other file: plots are inline SVG, and the script that sorts the table is part of it. This module
computes positions; the template decides how they look.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from ..files import check_writable, save_result
from ..version import __version__
from .compare import Comparison, LinearReport

TEMPLATE = "report.html.j2"
COLOURS = 6
MIN_PERCENT, MAX_PERCENT = 0.1, 30.0
"""The errors between which a larger one makes a cell of the map darker."""
SHADES = (0.1, 0.3, 1, 3, 10, 30)
"""Errors in the map's legend, in percent."""
TINY = 1e-300
"""A logarithmic axis shows smaller values as zero: their products would underflow."""
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class ProductRow:
    """A product as the table and the plots show it; ``percent`` is its own rms error, relative to its output."""

    id: str
    linear: LinearReport
    layer: int | None
    kind: str
    percent: float
    accumulated_percent: float

    @property
    def strength(self) -> float:
        """The opacity of its cell, 0.05 to 1."""
        return strength(self.percent)


def check_report_path(path: Path) -> None:
    """Raise ``UsageError``, before a comparison takes its time, if no report can be written there."""
    check_writable(path, "--report")


def write_report(path: Path, comparison: Comparison, model: Path, reference: Path, text: Path) -> None:
    """Write the report to ``path``. Raises ``BminfError`` if it cannot be written; an earlier file stays then."""
    html = render(comparison, model.name, reference.name, text.name)
    save_result(path, html.encode(errors="backslashreplace"))  # for names that are not UTF-8


def render(comparison: Comparison, model: str, reference: str, text: str) -> str:
    """The report's HTML; ``model``, ``reference`` and ``text`` are the names in its title."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.undefined = jinja2.StrictUndefined
    source = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    table = rows(comparison)
    kinds = list(dict.fromkeys(row.kind for row in table))
    return environment.from_string(source).render(
        model=model,
        reference=reference,
        text=text,
        device=comparison.device,
        version=__version__,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        d=comparison.divergence,
        rows=table,
        worst=max(table, key=lambda row: row.percent, default=None),
        kinds=kinds,
        colours=COLOURS,
        heatmap=heatmap(table, kinds),
        scale=[(f"{x:g} %", strength(x)) for x in SHADES],
        depth=depth(comparison),
        infinity=math.inf,
        scatter=scatter(table, kinds),
        outliers=outliers(table, kinds),
        tail=tail(comparison.divergence.divergences),
    )


def percent(snr_db: float) -> float:
    """Signal to noise as the rms error in percent of the output."""
    return float(100 * 10 ** (-snr_db / 20))


def strength(percent: float) -> float:
    """The opacity by which an error is shown, 0.05 to 1."""
    share = math.log(max(percent, MIN_PERCENT) / MIN_PERCENT) / math.log(MAX_PERCENT / MIN_PERCENT)
    return round(0.05 + 0.95 * math.pow(min(share, 1.0), 1.6), 3)


def rows(comparison: Comparison) -> list[ProductRow]:
    """All products, in the order of the model."""
    placed = [(block.layer, linear) for block in comparison.blocks for linear in block.linears]
    everything: list[tuple[int | None, LinearReport]] = [*placed, *((None, linear) for linear in comparison.head)]
    return [
        ProductRow(
            f"p{i}",
            linear,
            layer,
            re.sub(r"^(.*?\.)?\d+\.", "", linear.name) if layer is not None else linear.name,
            percent(linear.own.snr_db),
            percent(linear.accumulated.snr_db),
        )
        for i, (layer, linear) in enumerate(everything)
    ]


def heatmap(table: Sequence[ProductRow], kinds: Sequence[str]) -> dict[str, Any]:
    """A cell for each product: a row for each kind of product, a column for each layer."""
    layers = max((row.layer + 1 for row in table if row.layer is not None), default=1)
    left, height, top = 170, 26, 8
    width = max(780 / layers, 8)
    x = count_axis(layers, left, left + width * layers)
    cells = [
        {
            "row": row,
            "x": round(left + width * (row.layer or 0), 1),
            "y": top + height * kinds.index(row.kind),
            "wide": width * layers if row.layer is None else width,
        }
        for row in table
    ]
    return {
        "cells": cells,
        "x": x,
        "left": left,
        "cell_height": height,
        "top": top,
        "width": left + width * layers,
        "height": top + height * len(kinds) + 56,
        "bottom": top + height * len(kinds),
        "gap": 1 if width < 20 else 2,
    }


def depth(comparison: Comparison) -> dict[str, Any]:
    """The residual stream's errors by layer."""
    own = [(b.layer, percent(b.own.snr_db)) for b in comparison.blocks]
    accumulated = [(b.layer, percent(b.accumulated.snr_db)) for b in comparison.blocks]
    x = count_axis(max(len(own), 1), 56, 470)
    y = log_axis([v for _, v in own + accumulated], 250, 12, " %")
    bar = max(min(24.0, 0.7 * (x.end - x.start) / max(len(own), 1)), 1.5)
    path = line(x, y, accumulated) if own else ""
    return {"x": x, "y": y, "own": own, "accumulated": accumulated, "line": path, "bar": round(bar, 1)}


def scatter(table: Sequence[ProductRow], kinds: Sequence[str]) -> dict[str, Any]:
    """Each product's own error over the largest magnitude of its input."""
    x = log_axis([row.linear.input.largest for row in table], 56, 470)
    y = log_axis([row.percent for row in table], 250, 12, " %")
    points = [
        {"row": row, "x": x(row.linear.input.largest), "y": y(row.percent), "colour": kinds.index(row.kind) % COLOURS}
        for row in table
        if row.percent > 0
    ]
    return {"x": x, "y": y, "points": points}


def outliers(table: Sequence[ProductRow], kinds: Sequence[str]) -> dict[str, Any]:
    """The largest magnitude of each input by layer, a curve per kind; also the reference's where it differs."""
    placed = [row for row in table if row.layer is not None]
    x = count_axis(max((row.layer + 1 for row in placed if row.layer is not None), default=1), 56, 470)
    y = log_axis([v for row in placed for v in (row.linear.input.largest, row.linear.reference_input.largest)], 250, 12)
    curves = []
    for kind in dict.fromkeys(row.kind for row in placed):
        same = [row for row in placed if row.kind == kind]
        ours = [(row.layer or 0, row.linear.input.largest) for row in same]
        theirs = [(row.layer or 0, row.linear.reference_input.largest) for row in same]
        differs = any(abs(math.log(max(a[1], 1e-9) / max(b[1], 1e-9))) > 0.2 for a, b in zip(ours, theirs, strict=True))
        dots = [(x(layer), y(value)) for layer, value in ours]
        colour = kinds.index(kind) % COLOURS
        curves.append(
            {
                "kind": kind,
                "colour": colour,
                "line": line(x, y, ours),
                "dots": dots,
                "reference": line(x, y, theirs) if differs else "",
            }
        )
    return {"x": x, "y": y, "curves": curves}


def tail(divergences: np.ndarray) -> dict[str, Any]:
    """The share of tokens whose divergence exceeds a value."""
    values = np.sort(divergences[np.isfinite(divergences) & (divergences > 0)])[::-1]
    if not len(values):
        return {}
    share = np.arange(1, len(values) + 1) / len(divergences) * 100
    picked = np.concatenate([space(1, len(values), 100) for space in (np.geomspace, np.linspace)])
    low = max(float(np.quantile(values, 0.05)), float(values[0]) / 1e6)
    x = log_axis([low, float(values[0])], 56, 470, decades=7)
    y: Axis = log_axis([share[0], 100 / 1.3], 250, 12, " %", decades=7)
    points = [(float(values[i]), float(share[i])) for i in np.unique(picked.astype(int)) - 1 if values[i] >= low]
    marks = [("median", float(np.median(divergences))), ("99.9 %", float(np.quantile(divergences, 0.999)))]
    return {"x": x, "y": y, "line": line(x, y, points), "marks": [(name, x(value)) for name, value in marks]}


@dataclass(frozen=True)
class Axis:
    """Maps values from ``low`` to ``high`` to positions from ``start`` to ``end``, on a logarithmic or linear scale.

    ``ticks`` are values with their labels.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def __call__(self, value: float) -> float:
        """The position of ``value``; values beyond ``low`` and ``high`` are at the ends."""
        value = min(max(value, self.low), self.high)
        low, high, x = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return round(self.start + (x - low) / (high - low) * (self.end - self.start), 1)

    def marks(self) -> list[tuple[float, str]]:
        """Positions and labels of the ticks."""
        return [(self(value), label) for value, label in self.ticks]


def log_axis(values: Iterable[float], start: float, end: float, unit: str = "", decades: int = 5) -> Axis:
    """A logarithmic axis for the positive ones of ``values``, at most ``decades`` down from the largest."""
    positive = [v for v in values if TINY <= v <= 1 / TINY] or [1.0]
    high = max(positive) * 1.3
    low = max(min(positive) / 1.3, high / 10**decades)
    if high < 4 * low:  # nearly equal values would have no tick around them
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = middle / 2, middle * 2
    steps = [1.0] if high / low > 300 else [1.0, 3.0] if high / low > 10 else [1.0, 2.0, 3.0, 5.0, 7.0]
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [10.0**e * step for e in exponents for step in steps]
    return Axis(low, high, start, end, True, tuple((t, number(t) + unit) for t in ticks if low <= t <= high))


def number(value: float) -> str:
    """A tick's label: ``0.01``, ``300``, or ``10⁻⁵`` where decimals would be long."""
    exponent = math.floor(math.log10(value) + 1e-9)
    if -4 < exponent < 5:
        return f"{value:.6g}"
    factor = round(value / 10.0**exponent)
    return ("" if factor == 1 else f"{factor}·") + "10" + str(exponent).translate(SUPERSCRIPT)


def count_axis(count: int, start: float, end: float) -> Axis:
    """A linear axis with ``count`` equal shares, the values at their middles, and about ten labels at most."""
    step = max(1, math.ceil(count / 10))
    return Axis(-0.5, count - 0.5, start, end, False, tuple((float(i), str(i)) for i in range(0, count, step)))


def line(x: Axis, y: Axis, points: Sequence[tuple[float, float]]) -> str:
    """An SVG path through ``points``."""
    return "M" + "L".join(f"{x(a)} {y(b)}" for a, b in points)
