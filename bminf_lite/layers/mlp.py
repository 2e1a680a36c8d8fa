"""Feed-forward layers."""

from __future__ import annotations

from ..backend.base import Backend
from ..backend.values import Array
from .linear import Linear
from .loading import Weights


class GatedMLP:
    """``down(f(gate(x)) * up(x))`` (https://arxiv.org/abs/2002.05202), added to the residual stream."""

    def __init__(self, ops: Backend, weights: Weights, name: str, activation: str = "silu", bias: bool = False):
        self.ops = ops
        self.activation = activation
        self.gate_up = Linear(ops, weights, [f"{name}.gate_proj", f"{name}.up_proj"], bias)
        self.down = Linear(ops, weights, [f"{name}.down_proj"], bias)

    def add_to(self, residual: Array, x: Array) -> Array:
        """``residual`` fp32 ``[T, features]`` plus the layer's output for the normalised ``x``."""
        return self.down.add_to(residual, self.ops.gated_linear(x, self.gate_up.weight, self.activation))
