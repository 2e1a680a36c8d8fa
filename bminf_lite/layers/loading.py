"""The source of a layer's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..backend.quantization import HostWeight, Int8Weight, OutlierColumns


class Weights(Protocol):
    """Tensors by checkpoint name: those of a checkpoint, or random ones of the right shapes."""

    def weight(self, name: str) -> HostWeight:
        """The matrix ``name`` ``[out, in]``, float or int8."""

    def vector(self, name: str) -> np.ndarray:
        """The float tensor ``name``: a norm's weight, a bias or an embedding table."""


@dataclass(frozen=True)
class RowTransform:
    """A change of a tensor's rows, which are a layer's outputs: their ``order``, int ``[out]``, and ``factors``.

    ``order`` may name a part of the rows, also as a slice. ``factors`` is one number, or fp32 ``[out]`` in the new
    order. None leaves the rows as they are.
    """

    order: np.ndarray | slice | None = None
    factors: np.ndarray | float | None = None

    def apply(self, values: np.ndarray) -> np.ndarray:
        """The rows of ``values`` ``[out, ...]``; fp32 if there are factors, which fp16 might not hold exactly."""
        ordered: np.ndarray = self._in_order(values)
        if self.factors is None:
            return ordered
        factors = np.asarray(self.factors, np.float32).reshape((-1,) + (1,) * (len(ordered.shape) - 1))
        values = np.asarray(ordered)
        if factors.size == 1 and _is_one_number(values):
            return np.broadcast_to(np.float32(values.flat[0]) * factors.flat[0], values.shape)
        return values.astype(np.float32) * factors

    def _in_order(self, values: np.ndarray) -> np.ndarray:
        if self.order is None:
            return values
        if isinstance(self.order, np.ndarray) and _is_one_number(values):
            return np.broadcast_to(values.flat[0], (len(self.order), *values.shape[1:]))
        return values[self.order]

    def apply_to_matrix(self, weight: HostWeight) -> HostWeight:
        """The rows of a matrix; the factors multiply the scales of an int8 matrix, not its codes."""
        if not isinstance(weight, Int8Weight):
            return self.apply(weight)
        codes = self._in_order(weight.codes)
        outliers = weight.outliers
        if outliers is not None:
            outliers = OutlierColumns(outliers.index, self.apply(outliers.values).astype(np.float16))
        return replace(weight, codes=codes, scale=self.apply(weight.scale), outliers=outliers)


def _is_one_number(values: np.ndarray) -> bool:
    """Whether ``values`` is one number broadcast, as in ``MetaWeights``."""
    return isinstance(values, np.ndarray) and values.size > 0 and not any(values.strides)


class TransformedWeights:
    """``weights`` with the rows of some layers' tensors changed as they are read.

    ``transforms`` maps a layer's name (``model.layers.0.self_attn.q_proj``) to the change of its weight and bias, or a
    tensor's name to the change of that one alone.
    """

    def __init__(self, weights: Weights, transforms: Mapping[str, RowTransform]):
        self.weights = weights
        self.transforms = transforms

    def change_of(self, name: str) -> RowTransform | None:
        """The change of the tensor ``name``."""
        return self.transforms.get(name) or self.transforms.get(name.rpartition(".")[0])

    def weight(self, name: str) -> HostWeight:
        weight, transform = self.weights.weight(name), self.change_of(name)
        return weight if transform is None else transform.apply_to_matrix(weight)

    def vector(self, name: str) -> np.ndarray:
        values, transform = self.weights.vector(name), self.change_of(name)
        return values if transform is None else transform.apply(values)
