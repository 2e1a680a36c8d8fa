"""What a migration cost, measured on a part of the calibration text that the calibration did not see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, UsageError
from ..evaluation.compare import Progress, compare
from ..evaluation.corpus import Window, config_of, fitted

HELD_OUT = 8
"""As many pieces are held out, or an eighth of a short text."""


@dataclass(frozen=True)
class CalibrationText:
    """Pieces of a text, int32 token ids ``[n]`` each: ``samples`` to calibrate on, ``held_out`` to measure on."""

    samples: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]


def split(pieces: Sequence[np.ndarray], samples: int) -> CalibrationText:
    """At most ``samples`` of ``pieces`` to calibrate on, and some of the others to measure on, both from everywhere.

    A single piece is cut in two.
    """
    if len(pieces) == 1:
        end = len(pieces[0]) - max(len(pieces[0]) // 8, 2)
        return CalibrationText((pieces[0][:end],), (pieces[0][end:],))
    held = min(HELD_OUT, max(len(pieces) // 8, 1))
    chosen = spread(len(pieces), min(samples, len(pieces) - held))
    rest = sorted(set(range(len(pieces))) - set(chosen))
    return CalibrationText(tuple(pieces[i] for i in chosen), tuple(pieces[rest[i]] for i in spread(len(rest), held)))


def spread(count: int, wanted: int) -> list[int]:
    """``wanted`` of the numbers below ``count``, evenly; a single one from the middle."""
    if wanted == 1:
        return [count // 2]
    return [int(i) for i in np.linspace(0, count - 1, wanted).round()]


def check_limit(max_divergence: float | None, has_text: bool) -> None:
    """Raise ``UsageError`` for a limit that makes no sense, or that nothing can be measured for."""
    if max_divergence is None:
        return
    if not max_divergence > 0:
        raise UsageError(f"max_divergence is {max_divergence}; it must be more than 0")
    if not has_text:
        raise UsageError("max_divergence needs a text to measure on (--calibrate FILE, calibrate=...)")


def cost(
    model: Path,
    source: Path,
    pieces: Sequence[np.ndarray],
    device: str,
    max_divergence: float | None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """How far the checkpoint in ``model`` is from ``source`` on ``pieces``; see :class:`.divergence.Divergence`.

    Raises ``CheckpointError`` if the mean divergence is more than ``max_divergence``, or is no number.
    """
    windows = fitted([Window(piece, len(piece) - 1) for piece in pieces], config_of(source))
    found = compare(model, source, windows, device, layers=False, progress=progress).divergence
    if max_divergence is not None and not found.kl <= max_divergence:
        raise CheckpointError(
            f"the int8 model diverges by {found.kl:.6g} nats per token from its source on {found.tokens:,} held-out "
            f"tokens, and {max_divergence:g} are allowed: it was not written. Take a recipe that loses less (auto, "
            "w8a8-smooth, w8a16), or allow more"
        )
    return found.to_dict()
