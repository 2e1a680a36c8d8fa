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


def rms_norm(ops: Backend, weights: Weights, name: str, eps: float, scale: float = 1.0) -> NormLayer:
    """``x / sqrt(mean(x^2) + eps) * weight * scale``, with the weight ``{name}.weight`` ``[features]``."""
    weight = weights.vector(f"{name}.weight")
    scaled = weight if scale == 1 else weight.astype(np.float32) * np.float32(scale)
    return NormLayer(ops, Norm(ops.vector(scaled), eps))


def layer_norm(ops: Backend, weights: Weights, name: str, eps: float) -> NormLayer:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, with ``{name}.weight`` and ``{name}.bias``."""
    weight, bias = (ops.vector(weights.vector(f"{name}.{part}")) for part in ("weight", "bias"))
    return NormLayer(ops, Norm(weight, eps, bias, center=True))
