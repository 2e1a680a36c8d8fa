"""SmoothQuant (https://arxiv.org/abs/2211.10438): outliers move from activations into weights.

An activation has one scale per token, so a channel that is always large costs the other channels their precision. A
factor per channel divides the activation and multiplies the columns of the matrices that read it:
``factor = max|x|^a / w^(1 - a)``, where ``w`` is the column's largest weight relative to its row's, and the exponent
``a`` sets how much of the range moves to the weights. The division is folded into the producer of the activation (a
norm's weight, the matrix before), so it costs nothing at run time. The best exponent differs from layer to layer; the
error of the int8 product decides.

Factors are powers of two, so multiplying by them is exact and the float model keeps every bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..checkpoint.weight_rewrite import WeightRewrite
from ..models.spec import Fold, Parameter, Spec
from .errors import ErrorEvaluator, QuantizationCandidate

EXPONENTS = tuple(round(0.1 * i, 1) for i in range(1, 11))
"""The exponents that are tried, beside no smoothing at all."""

FEW_EXPONENTS = (0.2, 0.5, 0.8)
"""Those that are tried where a product has several options."""

GAIN = 0.1
"""The least relative reduction of the error: a smaller one may be chance."""

MAX_SHIFT = 12
"""Factors lie between ``2**-MAX_SHIFT`` and ``2**MAX_SHIFT``: enough for any outlier, and far from fp16's limits."""


LARGEST_INPUT = 2.0**13
"""Activations up to this size leave fp16 room for tokens that a calibration has not seen."""


@dataclass(frozen=True)
class Smoothing:
    """``factors`` per channel of the producer, fp32 powers of two, None for ones, and their ``exponent``, if any."""

    exponent: float | None = None
    factors: np.ndarray | None = None


def search_smoothing(
    evaluator: ErrorEvaluator,
    fold: Fold,
    input_max: np.ndarray,
    plain: QuantizationCandidate,
    exponents: Sequence[float] = EXPONENTS,
) -> Smoothing:
    """The smoothing with the smallest mean error of the products, or none if that gains less than :data:`GAIN`.

    ``input_max`` is ``max|x|`` per input ``[in]``; ``plain`` says how the products are quantized beside that.
    """
    absmax = evaluator.calibration_ops.relative_column_absmax
    weight_max = np.max([evaluator.ops.host(absmax(matrix)) for matrix in evaluator.matrices], axis=0)
    best, least = Smoothing(), (1 - GAIN) * np.mean(evaluator.errors(plain))
    for exponent in exponents:
        factors = channel_factors(input_max, weight_max, exponent, fold)
        error = np.mean(evaluator.errors(replace(plain, factors=expand_channels(factors, fold))))
        if error < least:
            best, least = Smoothing(exponent, factors), error
    return best


def limit_range(found: Smoothing, fold: Fold, input_max: np.ndarray) -> Smoothing:
    """``found``, all factors times the power of two that keeps activations within :data:`LARGEST_INPUT`.

    A GPU stores activations in fp16, which ends at 65,504. The same factor for all channels changes scales alone, not
    codes. ``input_max`` is ``max|x|`` per input ``[in]``.
    """
    channels = reduce_channels(input_max, fold)
    factors = np.ones(len(channels), np.float32) if found.factors is None else found.factors
    largest = float((channels / factors).max())
    if not largest > LARGEST_INPUT:
        return found
    return replace(found, factors=factors * np.float32(2.0 ** math.ceil(math.log2(largest / LARGEST_INPUT))))


def channel_factors(input_max: np.ndarray, weight_max: np.ndarray, exponent: float, fold: Fold) -> np.ndarray:
    """The factors of the producer's channels, rounded to powers of two, their geometric mean about 1.

    A channel that is always zero, or that no weight reads, has factor 1.
    """
    x, w = reduce_channels(input_max, fold), reduce_channels(weight_max, fold)
    used = (x > 0) & (w > 0)
    shift = np.zeros(len(x))
    shift[used] = exponent * np.log2(x[used], dtype=np.float64) - (1 - exponent) * np.log2(w[used], dtype=np.float64)
    shift[used] -= np.mean(shift[used]) if used.any() else 0
    factors: np.ndarray = np.exp2(np.clip(np.rint(shift), -MAX_SHIFT, MAX_SHIFT)).astype(np.float32)
    return factors


def fold_factors(spec: Spec, fold: Fold, factors: np.ndarray) -> dict[str, WeightRewrite]:
    """The rewrite of each tensor of a fold, as it is stored, for ``factors`` fp32 ``[channels]``."""
    rewrites = {name: along(spec.parameters[name], 1, expand_channels(factors, fold)) for name in fold.consumers}
    return rewrites | {name: along(spec.parameters[name], 0, 1 / factors) for name in fold.producers}


def along(parameter: Parameter, axis: int, factors: np.ndarray) -> WeightRewrite:
    """Factors for the outputs (``axis`` 0) or the inputs (1) of a matrix, or for a vector."""
    rows = len(parameter.shape) == 2 and (axis == 0) != parameter.transposed
    return WeightRewrite(row_factors=factors) if rows else WeightRewrite(column_factors=factors)


def expand_channels(channels: np.ndarray, fold: Fold) -> np.ndarray:
    """Values per channel of the producer -> per input of the consumers."""
    return np.repeat(channels.reshape(-1, fold.block), fold.repeat, axis=0).reshape(-1)


def reduce_channels(inputs: np.ndarray, fold: Fold) -> np.ndarray:
    """Values per input of the consumers -> the largest for each channel of the producer."""
    channels: np.ndarray = inputs.reshape(-1, fold.repeat, fold.block).max(axis=1).reshape(-1)
    return channels
