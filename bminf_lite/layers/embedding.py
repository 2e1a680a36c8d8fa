"""Token embedding."""

from __future__ import annotations

from ..backend.base import Backend
from ..backend.values import Array
from .loading import Weights


class Embedding:
    """The table ``{name}.weight`` ``[vocab, features]``, looked up."""

    def __init__(self, ops: Backend, weights: Weights, name: str):
        self.ops = ops
        self.table = ops.table(weights.vector(f"{name}.weight"))

    def __call__(self, tokens: Array) -> Array:
        """int32 ``[T]`` -> the residual stream, fp32 ``[T, features]``."""
        return self.ops.embed(tokens, self.table)
