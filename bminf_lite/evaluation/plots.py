"""Coordinates for the report's plots: what lies where in an SVG. What it looks like is the template's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """Values from ``low`` to ``high`` to positions from ``start`` to ``end``, logarithmic or linear.

    ``ticks`` are values with their labels.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def __call__(self, value: float) -> float:
        """The position of ``value``, held between the ends."""
        low, high, x = (math.log10(max(v, 1e-300)) if self.log else v for v in (self.low, self.high, value))
        share = (x - low) / (high - low)
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 1)

    def marks(self) -> list[tuple[float, str]]:
        """Positions and labels of the ticks."""
        return [(self(value), label) for value, label in self.ticks]


def log_axis(values: Iterable[float], start: float, end: float, unit: str = "", decades: int = 5) -> Axis:
    """A logarithmic axis over the positive ones of ``values``, at most so many ``decades`` down from the largest."""
    positive = [v for v in values if 0 < v < math.inf] or [1.0]
    high = max(positive) * 1.3
    low = max(min(positive) / 1.3, high / 10**decades)
    if high < 4 * low:  # values that are nearly one still have ticks around them
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    steps = [1.0] if high / low > 300 else [1.0, 3.0] if high / low > 10 else [1.0, 2.0, 3.0, 5.0, 7.0]
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [10.0**e * step for e in exponents for step in steps]
    return Axis(low, high, start, end, True, tuple((t, number(t) + unit) for t in ticks if low <= t <= high))


def number(value: float) -> str:
    """A tick's label: ``0.01``, ``300``, or ``10⁻⁵`` for what would be long."""
    exponent = math.floor(math.log10(value) + 1e-9)
    if -4 < exponent < 5:
        return f"{value:.6g}"
    factor = round(value / 10.0**exponent)
    return ("" if factor == 1 else f"{factor}·") + "10" + str(exponent).translate(SUPERSCRIPT)


def count_axis(count: int, start: float, end: float) -> Axis:
    """Places for ``count`` things, each at the middle of its share; labels at most about ten of them."""
    step = max(1, math.ceil(count / 10))
    return Axis(-0.5, count - 0.5, start, end, False, tuple((float(i), str(i)) for i in range(0, count, step)))


def line(x: Axis, y: Axis, points: Sequence[tuple[float, float]]) -> str:
    """An SVG path through ``points``."""
    return "M" + "L".join(f"{x(a)} {y(b)}" for a, b in points)
