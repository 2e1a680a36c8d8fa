"""Mixed precision: what to do with a product that int8 activations spoil although they were smoothed.

Typical are down projections, where a single token makes a few channels a thousand times larger than all others. First a
few input columns are kept in fp16, if the recipe allows that and if it is enough; else all activations of the product
stay float, with int8 weights. Either costs little: the weights that have to be read are nearly the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..checkpoint.recipe import Calibration, Scheme
from .errors import Judge, Version

FP16_MAX = float(np.finfo(np.float16).max)


def choose(judge: Judge, version: Version, settings: Calibration, input_max: np.ndarray) -> tuple[Version, float]:
    """``version``, or the first alternative that brings the largest error of the products to ``settings.max_error``.

    Returns it with that error. w8a16 is the last resort, and taken whatever its error. ``input_max`` is ``max|x|`` per
    input ``[in]``, before smoothing.
    """
    error = max(judge.errors(version))
    if version.scheme is not Scheme.W8A8 or not 0 < settings.max_error < error:
        return version, error
    index = largest_inputs(judge, version, input_max, settings.outlier_columns)
    alternatives = [replace(version, outliers=index)] if len(index) else []
    for alternative in [*alternatives, replace(version, scheme=Scheme.W8A16)]:
        error = max(judge.errors(alternative))
        if error <= settings.max_error:
            break
    return alternative, error


def largest_inputs(judge: Judge, version: Version, input_max: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` inputs that are largest after smoothing and whose weights fp16 can hold, int32, ascending."""
    if count == 0:
        return np.empty(0, np.int32)
    factors = np.float32(1) if version.factors is None else version.factors
    magnitudes = [judge.ops.host(judge.trials.matrix_magnitudes(matrix)) for matrix in judge.matrices]
    weight_max = np.max(magnitudes, axis=0) * factors
    size = np.where(weight_max <= FP16_MAX, input_max / factors, 0)
    index = np.argsort(-size, kind="stable")[:count]
    return np.sort(index[size[index] > 0]).astype(np.int32)
