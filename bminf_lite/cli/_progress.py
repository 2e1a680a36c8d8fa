"""Progress of a migration that calibrates, with an estimate of its time: a bar on a terminal, else lines.

Hours may pass, so a log gets a line now and then too. The estimate comes from the first layer of the model, and then
from what was measured. A batch of a layer that decides nothing tells how long a forward pass takes; the last batch of a
layer decides its products, which takes most of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import click

LINE_SECONDS = 30.0
QUIET_SECONDS = 10.0
"""A migration that takes less time gets no lines, unless it searches a target."""
PRODUCTS = 4
"""Products of a layer: of queries, keys and values, of attention's output, and two of a gated layer."""
SENSITIVITY_SHARE = 0.25
"""Tokens of a run with one product quantized, 1,024, over those of a batch of the calibration, about 4,096."""
POINTS = 4
"""Assignments that are written and measured: three guesses, and one that proves the best to be that."""
DECISIONS = 0.85
"""The share of a layer's time that its decisions take where it has one batch, which tells nothing of it."""


class MigrationProgress:
    """What the callbacks of a migration tell, as text; ``has_target`` if it searches an assignment for a target.

    ``show`` gets each text. Its first argument is the share that is done, 0 to 1.
    """

    def __init__(self, has_target: bool, show: Callable[[float, str], None], clock: Callable[[], float] = monotonic):
        self._has_target = has_target
        self._show = show
        self._clock = clock
        self._start = self._last = clock()
        self._layers = self._batches = 0
        self._first_layer = ""
        self._batch_seconds: list[float] = []
        self._calibrated = 0.0  # layers
        self._sensitivity = 0.0 if has_target else 1.0  # the share of its runs that is done
        self._points = 0
        self._point_seconds: list[float] = []
        self._point_start = 0.0
        if has_target:
            text = "calibrating; then each product is quantized alone, and some assignments are written and measured"
            show(0.0, f"{text}; an estimate of the time follows the first layer")

    def calibration(self, done: int, total: int, layer: str) -> None:
        """A batch has passed through a layer."""
        self._first_layer = self._first_layer or layer
        if layer == self._first_layer:
            self._batches = done
        now = self._clock()
        self._batch_seconds.append(now - self._last)
        self._last = now
        self._layers = max((total - 1) // max(self._batches, 1), 1)
        self._calibrated = self._layers + 1 if done >= total else done / max(self._batches, 1)  # the head is one
        if layer == self._first_layer:  # it may have more batches
            self._tell(f"calibrating {layer}", None)
        else:
            self._tell(f"calibrating {layer} of {self._layers}", self._remaining())

    def writing(self, done: int, total: int, name: str) -> None:
        """Bytes of a result are written."""
        if done >= total:
            self._tell(f"writing{self._point_text()}", self._remaining())

    def measuring(self, done: int, total: int, part: str) -> None:
        """Layers were run: each product alone at first, if there is a target, then a result on held-out text."""
        now = self._clock()
        if self._sensitivity < 1.0:
            self._sensitivity, self._point_start = done / total, now
            self._tell(f"quantizing each product alone, {part}", self._remaining())
            return
        if done == total:
            if self._has_target:  # else there is one
                self._point_seconds.append(now - self._point_start)
            self._point_start = now
            self._points += 1
        self._tell(f"measuring{self._point_text()}, {part}", self._remaining())

    def _point_text(self) -> str:
        return f" assignment {self._points + 1}" if self._has_target else ""

    @property
    def _layer_seconds(self) -> float:
        """The mean time of a layer's calibration."""
        whole = len(self._batch_seconds) - len(self._batch_seconds) % max(self._batches, 1)
        return sum(self._batch_seconds[:whole]) / max(whole // max(self._batches, 1), 1)

    @property
    def _forward_seconds(self) -> float:
        """The time of a batch in a layer that decides nothing."""
        if self._batches < 2:
            return (1 - DECISIONS) * self._layer_seconds
        plain = [s for i, s in enumerate(self._batch_seconds) if (i + 1) % self._batches]
        return sum(plain) / max(len(plain), 1)

    def _remaining(self) -> float:
        """The seconds that are left."""
        layers, forward = self._layers, self._forward_seconds
        seconds = max(layers + 1 - self._calibrated, 0.0) * self._layer_seconds
        point = 2 * layers * forward
        if self._has_target:
            runs = layers + PRODUCTS * layers * (layers + 1) / 2
            seconds += (1.0 - self._sensitivity) * runs * SENSITIVITY_SHARE * forward
        if self._point_seconds:
            point = sum(self._point_seconds) / len(self._point_seconds)
        points = (POINTS if self._has_target else 1) - self._points
        return seconds + max(points, 0) * point

    def _tell(self, text: str, remaining: float | None) -> None:
        if remaining is None:
            self._show(0.0, text)
            return
        elapsed = self._clock() - self._start
        share = elapsed / (elapsed + remaining) if elapsed + remaining > 0 else 1.0
        self._show(share, f"{text}; about {duration_text(remaining)} left" if remaining >= 1 else text)


def duration_text(seconds: float) -> str:
    """``50 s``, ``14 min``, ``2.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


@contextmanager
def shown(has_target: bool) -> Iterator[MigrationProgress]:
    """Progress as a bar if stderr is a terminal, else as lines."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield MigrationProgress(has_target, Lines(0.0 if has_target else QUIET_SECONDS))
        return
    from tqdm import tqdm

    form = "{desc} |{bar}| {percentage:3.0f}% [{elapsed}]"
    with tqdm(total=1.0, bar_format=form, leave=False) as bar:
        yield MigrationProgress(has_target, Bar(bar))


class Lines:
    """Shows progress as lines on stderr, one in :data:`LINE_SECONDS`; none in the first ones of ``quiet`` seconds."""

    def __init__(self, quiet: float, clock: Callable[[], float] = monotonic):
        self._clock = clock
        self._next = clock() + quiet

    def __call__(self, share: float, text: str) -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + LINE_SECONDS
        click.echo(f"{text} ({share:.0%})", err=True)


class Bar:
    """Shows progress as one bar of tqdm."""

    def __init__(self, bar: Any):
        self._bar = bar

    def __call__(self, share: float, text: str) -> None:
        self._bar.n = share
        self._bar.set_description_str(text, refresh=False)
        self._bar.refresh()
