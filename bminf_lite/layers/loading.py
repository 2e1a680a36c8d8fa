"""The source of a layer's weights."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..backend.quantization import HostWeight, Int8Weight


class Weights(Protocol):
    """Tensors by checkpoint name: those of a checkpoint, or random ones of the right shapes."""

    def weight(self, name: str) -> HostWeight:
        """The matrix ``name`` ``[out, in]``, float or int8."""

    def vector(self, name: str) -> np.ndarray:
        """The float tensor ``name``: a norm's weight, a bias or an embedding table."""


class PermutedWeights:
    """``weights`` with the rows of each tensor, which are a layer's outputs, in the order ``rows``, int ``[out]``."""

    def __init__(self, weights: Weights, rows: np.ndarray):
        self.weights = weights
        self.rows = rows

    def weight(self, name: str) -> HostWeight:
        weight = self.weights.weight(name)
        if isinstance(weight, Int8Weight):
            return weight.rows(self.rows)
        permuted: np.ndarray = weight[self.rows]
        return permuted

    def vector(self, name: str) -> np.ndarray:
        permuted: np.ndarray = self.weights.vector(name)[self.rows]
        return permuted
