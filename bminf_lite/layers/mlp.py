"""Feed-forward layers. ``activation`` names ``f``, one of ``backend.functions.ACTIVATIONS``.

``add_to`` adds the output to the residual stream, fp32 ``[T, features]``; ``x`` is the normalised stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backend.base import Backend
from ..backend.values import Array
from .linear import Linear, RowParallelLinear


@dataclass(frozen=True)
class GatedMLP:
    """``down(f(gate(x)) * up(x))`` (https://arxiv.org/abs/2002.05202); ``gate_up`` computes both side by side."""

    ops: Backend
    activation: str
    gate_up: Linear
    down: RowParallelLinear

    def hidden(self, x: Array) -> Array:
        """``f(gate(x)) * up(x)``, which ``down`` reads."""
        return self.ops.gated_linear(x, self.gate_up.weight, self.activation)

    def add_to(self, residual: Array, x: Array) -> Array:
        return self.down.add_to(residual, self.hidden(x))


@dataclass(frozen=True)
class MLP:
    """``down(f(up(x)))``."""

    ops: Backend
    activation: str
    up: Linear
    down: RowParallelLinear

    def hidden(self, x: Array) -> Array:
        """``f(up(x))``, which ``down`` reads."""
        return self.ops.activated_linear(x, self.up.weight, self.activation)

    def add_to(self, residual: Array, x: Array) -> Array:
        return self.down.add_to(residual, self.hidden(x))
