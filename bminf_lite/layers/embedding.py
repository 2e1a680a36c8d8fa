"""Embeddings of tokens and of positions."""

from __future__ import annotations

from ..backend.base import Backend
from ..backend.values import Array, ForwardBatch
from .loading import Weights


class Embedding:
    """The table ``{name}.weight`` ``[vocab, features]``, looked up."""

    def __init__(self, ops: Backend, weights: Weights, name: str):
        self.ops = ops
        self.table = ops.table(weights.vector(f"{name}.weight"))

    def __call__(self, tokens: Array) -> Array:
        """int32 ``[T]`` -> the residual stream, fp32 ``[T, features]``."""
        return self.ops.embed(tokens, self.table)


class PositionEmbedding:
    """The table ``{name}.weight`` ``[first + context, features]``, a row for each position from row ``first`` on."""

    def __init__(self, ops: Backend, weights: Weights, name: str, first: int = 0):
        self.ops = ops
        self.table = ops.table(weights.vector(f"{name}.weight")[first:])

    def add_to(self, residual: Array, batch: ForwardBatch) -> Array:
        """``residual`` fp32 ``[T, features]`` plus the rows of the tokens' positions; it may be overwritten."""
        return self.ops.add_positions(residual, self.table, batch)
