"""RMSNorm and LayerNorm."""

from __future__ import annotations

import numpy as np

from ..backend.base import Backend
from ..backend.values import Array, Norm
from .loading import Weights


def load_rms_norm(ops: Backend, weights: Weights, name: str, eps: float, scale: float = 1.0) -> Norm:
    """The RMSNorm whose weight is ``{name}.weight`` times ``scale``."""
    weight = weights.vector(f"{name}.weight")
    return Norm(ops.vector(weight if scale == 1 else weight.astype(np.float32) * np.float32(scale)), eps)


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight * scale``."""

    def __init__(self, ops: Backend, weights: Weights, name: str, eps: float, scale: float = 1.0):
        self.ops = ops
        self.norm = load_rms_norm(ops, weights, name, eps, scale)

    def __call__(self, residual: Array) -> Array:
        """fp32 ``[T, features]`` -> ``[T, features]``."""
        return self.ops.norm(residual, self.norm)


class LayerNorm:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` (https://arxiv.org/abs/1607.06450)."""

    def __init__(self, ops: Backend, norm: Norm):
        self.ops = ops
        self.norm = norm

    @classmethod
    def load(cls, ops: Backend, weights: Weights, name: str, eps: float) -> LayerNorm:
        """The norm whose weight and bias are ``{name}.weight`` and ``{name}.bias``."""
        weight, bias = (ops.vector(weights.vector(f"{name}.{part}")) for part in ("weight", "bias"))
        return cls(ops, Norm(weight, eps, bias, center=True))

    def __call__(self, residual: Array) -> Array:
        """fp32 ``[T, features]`` -> ``[T, features]``."""
        return self.ops.norm(residual, self.norm)
