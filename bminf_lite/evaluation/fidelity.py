"""The error of a layer's output, and the properties of its input that make int8 inexact.

Accumulators add batch by batch, and keep no batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..quantize.errors import relative_error

WORST_CHANNELS = 5


@dataclass(frozen=True)
class Fidelity:
    """Signal to noise in decibels (infinite where outputs are equal), and the mean over tokens of the cosine.

    The noise is relative to each token's own output, see :mod:`bminf_lite.quantize.errors`.
    """

    snr_db: float
    cosine: float


@dataclass(frozen=True)
class ActivationStats:
    """The properties that make an activation hard to quantize with one scale per token.

    ``largest`` is the largest magnitude, in multiples of the root mean square of all values. ``channels`` are those
    with the largest magnitudes: their index, and their largest magnitude in the same unit. ``spread`` is the largest
    token's scale over the median token's.
    """

    largest: float
    channels: tuple[tuple[int, float], ...]
    spread: float


class FidelityAccumulator:
    """Collects outputs and expected outputs, fp32 ``[T, out]`` each."""

    def __init__(self) -> None:
        self._noise = self._cosine = 0.0
        self._tokens = 0

    def add(self, expected: np.ndarray, got: np.ndarray) -> None:
        """The outputs of one batch."""
        tokens = len(expected)
        if tokens == 0:
            return
        product = np.einsum("ij,ij->i", expected, got, dtype=np.float64)
        sizes = [np.einsum("ij,ij->i", x, x, dtype=np.float64) for x in (expected, got)]
        norm = np.sqrt(sizes[0] * sizes[1])
        both_zero = (sizes[0] == 0) & (sizes[1] == 0)
        self._cosine += float(np.divide(product, norm, out=both_zero.astype(np.float64), where=norm > 0).sum())
        self._noise += relative_error(got, expected) * tokens
        self._tokens += tokens

    def result(self) -> Fidelity:
        """The fidelity of all outputs that were added."""
        if self._tokens == 0:
            return Fidelity(math.nan, math.nan)
        noise = self._noise / self._tokens
        return Fidelity(math.inf if noise == 0 else -10 * math.log10(noise), self._cosine / self._tokens)


class ActivationStatsAccumulator:
    """Collects the inputs of a product, fp32 ``[T, in]``."""

    def __init__(self) -> None:
        self._largest: np.ndarray | float = 0.0
        self._squares = 0.0
        self._scales: list[np.ndarray] = []
        self._count = 0

    def add(self, x: np.ndarray) -> None:
        """The inputs of one batch."""
        magnitude = np.abs(x)
        self._largest = np.maximum(self._largest, magnitude.max(axis=0))
        self._scales.append(magnitude.max(axis=1))
        self._squares += float(np.einsum("ij,ij->", x, x, dtype=np.float64))
        self._count += x.size

    def result(self) -> ActivationStats:
        """The statistics of all inputs that were added."""
        rms = math.sqrt(self._squares / self._count) or 1.0
        channels = np.asarray(self._largest) / rms
        worst = np.argsort(channels)[::-1][:WORST_CHANNELS]
        scales = np.concatenate(self._scales)
        median = float(np.median(scales)) or 1.0
        return ActivationStats(
            float(channels.max()), tuple((int(c), float(channels[c])) for c in worst), float(scales.max()) / median
        )
