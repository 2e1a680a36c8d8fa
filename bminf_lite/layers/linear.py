"""Linear layers: ``y = x W^T + b``. Matrices that read the same input are stacked into one."""

from __future__ import annotations

from collections.abc import Sequence

from ..backend.base import Backend
from ..backend.values import Array
from ..errors import CheckpointError
from .loading import Weights


class Linear:
    """One product with the matrices ``names`` stacked along their outputs (so query, key and value are one product).

    ``names`` are checkpoint prefixes: each has a ``.weight`` and, if ``bias``, a ``.bias``. Raises ``CheckpointError``
    for matrices that are not quantized alike.
    """

    def __init__(self, ops: Backend, weights: Weights, names: Sequence[str], bias: bool = False):
        self.ops = ops
        parts = [weights.weight(f"{name}.weight") for name in names]
        biases = [weights.vector(f"{name}.bias") for name in names] if bias else [None] * len(parts)
        try:
            self.weight = ops.weight(parts, biases)
        except ValueError as error:
            raise CheckpointError(f"{', '.join(names)}: {error}") from error

    def __call__(self, x: Array) -> Array:
        """``[T, in]`` -> ``[T, out]``."""
        return self.ops.linear(x, self.weight)

    def fp32(self, x: Array) -> Array:
        """``[T, in]`` -> fp32 ``[T, out]``: logits, or the start of a residual stream."""
        return self.ops.linear(x, self.weight, fp32=True)

    def add_to(self, residual: Array, x: Array) -> Array:
        """``residual + self(x)``, fp32 ``[T, out]``; ``residual`` may be overwritten."""
        return self.ops.linear_add(x, self.weight, residual)
