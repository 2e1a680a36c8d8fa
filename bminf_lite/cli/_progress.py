"""Progress of a migration that calibrates, with an estimate of its time: a bar on a terminal, else lines.

Hours may pass, so a log gets a line now and then too. The estimate comes from the first layer of the model, and then
from what was measured. A batch of a layer that decides nothing tells how long a forward pass takes; the last batch of a
layer decides its products, which takes most of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import click

LINE_SECONDS = 30.0
QUIET_SECONDS = 10.0
"""A migration that takes less time gets no lines, unless it searches a target."""
PRODUCTS = 4
"""Products of a layer: of queries, keys and values, of attention's output, and two of a gated layer."""
GROUPS = 6
"""Groups of layers, each with a run for each kind of product: on average half of all layers are behind a group."""
SENSITIVITY_SHARE = 0.125
"""Tokens of a run with some products quantized, 512, over those of a batch of the calibration, about 4,096."""
TARGET_RUNS = 4
"""Runs that measure assignments for a target: three guesses, and one that proves the best to be that."""
DECISIONS = 0.85
"""The share of a layer's time that its decisions take where it has one batch, which tells nothing of it."""


@dataclass(frozen=True)
class Stages:
    """What a migration with a calibration consists of: whether it ``searches`` assignments, and for a target."""

    searches: bool
    has_target: bool = False


class MigrationProgress:
    """What the callbacks of a migration tell, as text; see :class:`Stages` for what it consists of.

    ``show`` gets each text. Its first argument is the share that is done, 0 to 1.
    """

    def __init__(self, stages: Stages, show: Callable[[float, str], None], clock: Callable[[], float] = monotonic):
        self._stages = stages
        self._show = show
        self._clock = clock
        self._start = self._last = clock()
        self._layers = self._batches = 0
        self._first_layer = ""
        self._batch_seconds: list[float] = []
        self._calibrated = 0.0  # layers
        self._sensitivity = 0.0 if stages.searches else 1.0  # the share of its runs that is done
        self._runs = 0
        self._run_seconds: list[float] = []
        self._run_start = 0.0
        self._is_written = False
        if stages.searches:
            text = "calibrating; then some products at a time are quantized, and assignments are measured"
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
        self._is_written = True
        if done >= total:
            self._tell("writing", self._remaining())

    def measuring(self, done: int, total: int, part: str) -> None:
        """Layers were run: with some products quantized, then of assignments, then of the result."""
        now = self._clock()
        if self._sensitivity < 1.0:
            self._sensitivity, self._run_start = done / total, now
            self._tell(f"quantizing some products at a time, {part}", self._remaining())
            return
        if done == total and not self._is_written:
            self._run_seconds.append(now - self._run_start)
            self._runs += 1
        if done == total:
            self._run_start = now
        what = "the result" if self._is_written else "assignments"
        self._tell(f"measuring {what}, {part}", 0.0 if self._is_written and done == total else self._remaining())

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
        seconds = max(layers + 1 - self._calibrated, 0.0) * self._layer_seconds + 2 * layers * forward
        if self._stages.searches and not self._is_written:
            runs = layers * (1 + PRODUCTS * (GROUPS + 1) / 2)
            seconds += (1.0 - self._sensitivity) * runs * SENSITIVITY_SHARE * forward
            run = sum(self._run_seconds) / len(self._run_seconds) if self._run_seconds else 2 * layers * forward
            seconds += max((TARGET_RUNS if self._stages.has_target else 1) - self._runs, 0) * run
        return seconds

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
def shown(stages: Stages) -> Iterator[MigrationProgress]:
    """Progress as a bar if stderr is a terminal, else as lines."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield MigrationProgress(stages, Lines(0.0 if stages.searches else QUIET_SECONDS))
        return
    from tqdm import tqdm

    form = "{desc} |{bar}| {percentage:3.0f}% [{elapsed}]"
    with tqdm(total=1.0, bar_format=form, leave=False) as bar:
        yield MigrationProgress(stages, Bar(bar))


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
