"""Where layers get their weights from."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..backend.quantization import HostWeight, Int8Weight


class Weights(Protocol):
    """Tensors by checkpoint name: a checkpoint, or random ones of the right shapes."""

    def weight(self, name: str) -> HostWeight:
        """The matrix ``name`` ``[out, in]``, float or int8."""
        ...

    def vector(self, name: str) -> np.ndarray:
        """The float tensor ``name``: a gain, a bias or an embedding table."""
        ...


class PermutedWeights:
    """``weights`` with the rows of each tensor, so a layer's outputs, in another order."""

    def __init__(self, weights: Weights, rows: np.ndarray):
        self.weights = weights
        self.rows = rows

    def weight(self, name: str) -> HostWeight:
        """The matrix ``name`` ``[out, in]``, float or int8."""
        weight = self.weights.weight(name)
        if isinstance(weight, Int8Weight):
            return weight.rows(self.rows)
        return weight[self.rows]

    def vector(self, name: str) -> np.ndarray:
        """The bias ``name`` ``[out]``."""
        return self.weights.vector(name)[self.rows]
