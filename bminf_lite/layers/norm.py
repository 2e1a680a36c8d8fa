"""RMSNorm and LayerNorm."""

from __future__ import annotations

from ..backend.base import Backend
from ..backend.values import Array, Norm
from .loading import Weights


def load_rms_norm(ops: Backend, weights: Weights, name: str, eps: float) -> Norm:
    """The RMSNorm whose gain is ``{name}.weight``."""
    return Norm(ops.vector(weights.vector(f"{name}.weight")), eps)


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * gain``."""

    def __init__(self, ops: Backend, weights: Weights, name: str, eps: float):
        self.ops = ops
        self.norm = load_rms_norm(ops, weights, name, eps)

    def __call__(self, residual: Array) -> Array:
        """fp32 ``[T, features]`` -> ``[T, features]``."""
        return self.ops.norm(residual, self.norm)
