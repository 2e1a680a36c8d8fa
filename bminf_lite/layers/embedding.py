"""Embeddings of tokens and of positions."""

from __future__ import annotations

from typing import Any

from ..backend.adapter_slots import AdapterSite, SavedMatrix
from ..backend.base import Backend
from ..backend.values import Array, ForwardBatch
from .loading import Weights


class Embedding:
    """Rows of the table ``{name}.weight`` ``[vocab, features]``, multiplied by ``scale``."""

    def __init__(self, ops: Backend, weights: Weights, name: str, scale: float = 1.0):
        self.ops = ops
        self.scale = scale
        values = weights.vector(f"{name}.weight")
        self.table = ops.table(values)
        self.saved = saved_site(ops, f"{name}.weight", *values.shape)

    def __call__(self, batch: ForwardBatch) -> Array:
        """A step's tokens to the residual stream, fp32 ``[T, features]``."""
        residual = self.ops.embed(batch.tokens, self.table, self.scale)
        if self.saved is not None:
            residual = self.ops.saved_embed(batch.tokens, self.saved, residual, self.scale)
        return residual


def saved_site(ops: Backend, name: str, rows: int, columns: int) -> Any:
    """Room for the matrices that adapters have in place of the matrix ``name``; None if there is none."""
    slots = ops.adapter_slots
    if slots is None or name not in slots.saved:
        return None
    bank = ops.saved_bank(rows, columns)
    slots.sites.append(AdapterSite((name,), lambda name, part: part, bank, SavedMatrix))
    return bank


class PositionEmbedding:
    """The table ``{name}.weight`` ``[first + context, features]``, a row for each position from row ``first`` on."""

    def __init__(self, ops: Backend, weights: Weights, name: str, first: int = 0):
        self.ops = ops
        self.table = ops.table(weights.vector(f"{name}.weight")[first:])

    def add_to(self, residual: Array, batch: ForwardBatch) -> Array:
        """``residual`` fp32 ``[T, features]`` plus the rows of the tokens' positions; it may be overwritten."""
        return self.ops.add_positions(residual, self.table, batch)


class TokenTypeEmbedding:
    """The table ``{name}.weight`` ``[types, features]``, a row for each segment of a pair of texts."""

    def __init__(self, ops: Backend, weights: Weights, name: str):
        self.ops = ops
        self.table = ops.table(weights.vector(f"{name}.weight"))

    def add_to(self, residual: Array, batch: ForwardBatch) -> Array:
        """``residual`` fp32 ``[T, features]`` plus the rows of the tokens' types; it may be overwritten."""
        return self.ops.add_token_types(residual, self.table, batch)
