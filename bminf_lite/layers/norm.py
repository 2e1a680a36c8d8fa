"""RMSNorm (https://arxiv.org/abs/1910.07467) and LayerNorm (https://arxiv.org/abs/1607.06450)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..backend.base import Backend
from ..backend.values import Array, Norm
from .loading import Weights


@dataclass(frozen=True)
class NormLayer:
    """A norm of the residual stream."""

    ops: Backend
    norm: Norm

    def __call__(self, residual: Array) -> Array:
        """fp32 ``[T, features]`` -> ``[T, features]``."""
        return self.ops.norm(residual, self.norm)


def rms_norm(
    ops: Backend, weights: Weights, name: str, eps: float, scale: float | np.ndarray = 1.0, offset: float = 0.0
) -> NormLayer:
    """``x / sqrt(mean(x^2) + eps) * (weight + offset) * scale``, with the weight ``{name}.weight`` ``[features]``.

    ``scale`` is one number, or fp32 ``[features]``.
    """
    weight = weights.vector(f"{name}.weight")
    if offset != 0 or np.any(scale != 1.0):
        weight = (weight.astype(np.float32) + np.float32(offset)) * np.asarray(scale, np.float32)
    return NormLayer(ops, Norm(ops.vector(weight), eps))


def layer_norm(
    ops: Backend,
    weights: Weights,
    name: str,
    eps: float,
    scale: float = 1.0,
    offset: float = 0.0,
    has_bias: bool = True,
) -> NormLayer:
    """``((x - mean(x)) / sqrt(var(x) + eps) * (weight + offset) + bias) * scale``.

    ``{name}.weight`` and ``{name}.bias`` are ``[features]``. Without a bias there are zeros in its place.
    """
    weight = weights.vector(f"{name}.weight").astype(np.float32) + np.float32(offset)
    bias = weights.vector(f"{name}.bias").astype(np.float32) if has_bias else np.zeros_like(weight)
    weight, bias = weight * np.float32(scale), bias * np.float32(scale)
    return NormLayer(ops, Norm(ops.vector(weight), eps, ops.vector(bias), center=True))
