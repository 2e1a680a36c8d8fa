"""The gradients of a norm and of a softmax, defined over NumPy in the dtype of their arguments (fp32 or fp64)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class NormGradients:
    """The gradients of a norm's input ``x`` ``[..., features]``, and of its ``weight`` and ``bias`` ``[features]``."""

    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray


def normalised_from_output(y: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray:
    """A norm's normalised input, from its output ``y``: ``(y - bias) / weight``, NaN where the weight is 0."""
    n = y if bias is None else y - bias
    if weight is None:
        return n
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: np.ndarray = n / weight
    normalised: np.ndarray = np.where(weight == 0, np.asarray(np.nan, y.dtype), quotient)
    return normalised


def norm_gradients(
    dy: np.ndarray, normalised: np.ndarray, weight: np.ndarray | None, inverse: np.ndarray, center: bool
) -> NormGradients:
    """The gradients of a norm (https://arxiv.org/abs/1607.06450, https://arxiv.org/abs/1910.07467).

    ``dy`` ``[..., features]`` is the gradient of its output, ``normalised`` likewise is ``(x - mean) * inverse``, and
    ``inverse`` ``[...]`` is that of :func:`~bminf_lite.backend.functions.norm_statistics`.
    """
    g = dy if weight is None else dy * weight
    dx = g - normalised * np.mean(g * normalised, axis=-1, keepdims=True)
    if center:
        dx = dx - g.mean(axis=-1, keepdims=True)
    leading = tuple(range(dy.ndim - 1))
    return NormGradients(dx * inverse[..., None], (dy * normalised).sum(axis=leading), dy.sum(axis=leading))


def softmax_gradient(dy: np.ndarray, y: np.ndarray, scale: float) -> np.ndarray:
    """The gradient of ``x`` in ``y = softmax(scale * x + ...)``: ``scale * y * (dy - sum(dy * y))``."""
    dx: np.ndarray = y.dtype.type(scale) * (y * (dy - (dy * y).sum(axis=-1, keepdims=True)))
    return dx
