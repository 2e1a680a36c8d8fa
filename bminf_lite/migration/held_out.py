"""The cost of a migration, measured on a part of the text that the calibration did not use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.opened_model import ModelSource
from ..errors import CheckpointError, UsageError, require_positive
from ..evaluation.blockwise import Batch
from ..evaluation.compare import Progress, compare
from ..evaluation.corpus import Window, fit_windows, parse_config
from ..evaluation.divergence import Divergence
from ..evaluation.outputs import Predictions, VectorDivergence, Vectors, vector_divergence

MAX_HELD_OUT, MAX_TEXTS_HELD_OUT = 8, 32
"""The number of sequences that are held out, and that of texts for a model that makes vectors; of few, an eighth."""


@dataclass(frozen=True)
class CalibrationSplit:
    """Sequences of a text, int32 token ids ``[n]`` each: ``samples`` to calibrate on, ``held_out`` to measure on."""

    samples: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]


def split_samples(sequences: Sequence[np.ndarray], samples: int, most_held_out: int = MAX_HELD_OUT) -> CalibrationSplit:
    """At most ``samples`` of ``sequences`` to calibrate on, and some others to measure on, both evenly spread.

    A single sequence is cut in two.
    """
    if len(sequences) == 1:
        end = len(sequences[0]) - max(len(sequences[0]) // 8, 2)
        return CalibrationSplit((sequences[0][:end],), (sequences[0][end:],))
    held = min(most_held_out, max(len(sequences) // 8, 1))
    chosen = evenly_spaced(len(sequences), min(samples, len(sequences) - held))
    rest = sorted(set(range(len(sequences))) - set(chosen))
    return CalibrationSplit(
        tuple(sequences[i] for i in chosen), tuple(sequences[rest[i]] for i in evenly_spaced(len(rest), held))
    )


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """``wanted`` numbers below ``count``, evenly spaced; a single one is the middle."""
    if wanted == 1:
        return [count // 2]
    return [int(i) for i in np.linspace(0, count - 1, wanted).round()]


def check_divergence(name: str, limit: float | None, has_text: bool) -> None:
    """Raise ``UsageError`` for a ``limit``, called ``name``, that is no number above 0 or has no text to measure on."""
    if limit is None:
        return
    require_positive(name, limit)
    if not has_text:
        raise UsageError(f"{name} needs a text to measure on (--calibrate FILE, calibrate=...)")


def measure_cost(
    model: Path,
    source: Path | ModelSource,
    sequences: Sequence[np.ndarray],
    device: str,
    max_divergence: float | None,
    progress: Progress | None = None,
    known: Sequence[tuple[Batch, np.ndarray]] = (),
) -> dict[str, Any]:
    """The divergence of the checkpoint in ``model`` from ``source`` on ``sequences``.

    It is a :class:`.Divergence`, or a :class:`.VectorDivergence` of a model that makes vectors, as JSON values.
    ``known`` is what was computed of the first before, see :func:`.compare`.
    Raises :class:`CheckpointError` if the mean divergence is more than ``max_divergence``, or NaN.
    """
    config = parse_config(source)
    windows = fit_windows([Window(sequence, len(sequence) - 1) for sequence in sequences], config)
    found: Divergence | VectorDivergence
    if config.generates:
        found = compare(model, source, windows, device, layers=False, progress=progress, known=known).divergence
        amount = f"{found.mean:.6g} {Predictions.unit} from its source on {found.tokens:,} held-out tokens"
    else:
        found = vector_divergence(model, source, windows, device, progress)
        amount = f"{found.mean:.6g} {Vectors.unit} from its source on {len(windows):,} held-out texts"
    if max_divergence is not None and not found.mean <= max_divergence:
        raise CheckpointError(
            f"the int8 model diverges by {amount}, and {max_divergence:g} are allowed: it was not written. Let "
            f"--recipe auto --target-divergence {max_divergence:g} find the fastest quantization that meets it, choose "
            "w8a16, or allow more"
        )
    return found.to_dict()
