"""Feed-forward layers."""

from __future__ import annotations

from ..backend.base import Backend
from ..backend.values import Array
from .linear import Linear


class GatedMLP:
    """``down(f(gate(x)) * up(x))`` (https://arxiv.org/abs/2002.05202), added to the residual stream.

    ``gate_up`` computes gate and up side by side; ``activation`` names ``f``, one of ``backend.functions.ACTIVATIONS``.
    """

    def __init__(self, ops: Backend, activation: str, gate_up: Linear, down: Linear):
        self.ops = ops
        self.activation = activation
        self.gate_up = gate_up
        self.down = down

    def add_to(self, residual: Array, x: Array) -> Array:
        """``residual`` fp32 ``[T, features]`` plus the layer's output for the normalised ``x``."""
        return self.down.add_to(residual, self.ops.gated_linear(x, self.gate_up.weight, self.activation))


class MLP:
    """``down(f(up(x)))``, added to the residual stream; ``activation`` names ``f``."""

    def __init__(self, ops: Backend, activation: str, up: Linear, down: Linear):
        self.ops = ops
        self.activation = activation
        self.up = up
        self.down = down

    def hidden(self, x: Array) -> Array:
        """``f(up(x))`` of the normalised ``x``, which ``down`` reads."""
        return self.ops.activated_linear(x, self.up.weight, self.activation)

    def add_to(self, residual: Array, x: Array) -> Array:
        """``residual`` fp32 ``[T, features]`` plus the layer's output for the normalised ``x``."""
        return self.down.add_to(residual, self.hidden(x))
