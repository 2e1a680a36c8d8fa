"""Mixed precision for products whose error with int8 activations is too large even after smoothing.

Typical are down projections, where a single token makes a few channels a thousand times larger than all others. If the
recipe allows it and it suffices, a few input columns stay fp16; else all activations of the product stay float, with
int8 weights. Both cost little time, because the weights that are read hardly grow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..checkpoint.recipe import CalibrationSettings, Scheme
from .errors import ErrorEvaluator, QuantizationCandidate

FP16_MAX = float(np.finfo(np.float16).max)


def select_precision(
    evaluator: ErrorEvaluator, candidate: QuantizationCandidate, settings: CalibrationSettings, input_max: np.ndarray
) -> tuple[QuantizationCandidate, float]:
    """``candidate``, or the first alternative that brings the largest error of the products to ``settings.max_error``.

    Returns it with that error. w8a16 is the last resort, and taken whatever its error. ``input_max`` is ``max|x|`` per
    input ``[in]``, before smoothing.
    """
    error = max(evaluator.errors(candidate))
    if candidate.scheme is not Scheme.W8A8 or not 0 < settings.max_error < error:
        return candidate, error
    index = largest_inputs(evaluator, candidate, input_max, settings.outlier_columns)
    alternatives = [replace(candidate, outliers=index)] if len(index) else []
    for alternative in [*alternatives, replace(candidate, scheme=Scheme.W8A16)]:
        error = max(evaluator.errors(alternative))
        if error <= settings.max_error:
            break
    return alternative, error


def largest_inputs(
    evaluator: ErrorEvaluator, candidate: QuantizationCandidate, input_max: np.ndarray, count: int
) -> np.ndarray:
    """The ``count`` inputs that are largest after smoothing and whose weights fp16 can hold, int32, ascending."""
    if count == 0:
        return np.empty(0, np.int32)
    factors = np.float32(1) if candidate.factors is None else candidate.factors
    magnitudes = [
        evaluator.ops.host(evaluator.calibration_ops.weight_column_absmax(matrix)) for matrix in evaluator.matrices
    ]
    weight_max = np.max(magnitudes, axis=0) * factors
    size = np.where(weight_max <= FP16_MAX, input_max / factors, 0)
    index = np.argsort(-size, kind="stable")[:count]
    return np.sort(index[size[index] > 0]).astype(np.int32)
