"""A float model's weights as a migration would store them, made in memory when they are read.

So a quantization can be run and measured before anything is written. Codes and scales are those of the files that
:mod:`bminf_lite.checkpoint.migrate` writes with the same recipe and the same rewrites.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from ..backend.quantization import HostWeight, Int8Weight, OutlierColumns, fits_fp16, quantize_weight
from ..backend.rotation import rotated
from ..backend.stored_matrix import StoredMatrix
from ..checkpoint.recipe import Recipe, Scheme
from ..checkpoint.weight_rewrite import NO_REWRITE, WeightRewrite
from ..layers.loading import Weights
from ..models.spec import Role, Spec

LARGEST_SHARED = 1 << 28
"""Bytes; a matrix of a layer of a model with 70 billion parameters has as many."""


class RewrittenWeights:
    """``weights`` of a float model of ``spec``, quantized by ``rewrites``, by tensor name, and else by ``recipe``.

    A rotation or a group of columns is only what a rewrite says. Tables in ``narrowed`` become fp16, and so does a head
    that is one of them.
    """

    def __init__(
        self,
        weights: Weights,
        spec: Spec,
        recipe: Recipe,
        rewrites: Mapping[str, WeightRewrite],
        narrowed: Collection[str] = (),
    ):
        self._weights = weights
        self._narrowed = narrowed
        self._spec = spec
        self._recipe = recipe
        self._rewrites = rewrites

    def weight(self, name: str) -> HostWeight:
        """The matrix ``name`` ``[out, in]``, float or int8."""
        rewrite, parameter = self._rewrites.get(name, NO_REWRITE), self._spec.parameters[name]
        by_row, by_column = rewrite.row_factors, rewrite.column_factors
        if parameter.transposed:  # the factors are those of the matrix as it is stored
            by_row, by_column = by_column, by_row
        scheme = self._scheme(name, rewrite)
        if rewrite.codes is not None:  # the float matrix, which may have to be dequantized, is not read
            return _rounded_before(rewrite, by_row, scheme)
        values = self._weights.weight(name)
        assert not isinstance(values, Int8Weight)
        values = self._narrow(name, values)
        if by_row is not None or by_column is not None:
            values = _multiplied(_multiplied(values, by_column), None if by_row is None else by_row[:, None])
        return values if scheme is Scheme.FLOAT else _quantized(values, scheme, rewrite)

    def vector(self, name: str) -> np.ndarray:
        """The float tensor ``name``."""
        values = self._narrow(name, self._weights.vector(name))
        return _multiplied(values, self._rewrites.get(name, NO_REWRITE).column_factors)

    def _narrow(self, name: str, values: np.ndarray) -> np.ndarray:
        """A table, or a head that is one, in the type of the file; converted when it is read if it is stored."""
        if self._spec.tied.get(name, name) not in self._narrowed:
            return values
        fp16 = np.dtype(np.float16)
        return values.converted(fp16) if isinstance(values, StoredMatrix) else values.astype(fp16)

    def _scheme(self, name: str, rewrite: WeightRewrite) -> Scheme:
        role = self._spec.parameters[name].role
        if role not in (Role.LINEAR, Role.HEAD):
            return Scheme.FLOAT
        return rewrite.scheme or self._recipe.scheme_of(name, role is Role.HEAD)


class SharedWeights:
    """``weights`` that several models or observers read: a matrix is read once, and kept until :meth:`clear`.

    A stored matrix may take longer to read than to multiply, because it is dequantized. Matrices of more than
    :data:`LARGEST_SHARED` bytes, tables above all, are not kept. Any thread may read.
    """

    def __init__(self, weights: Weights):
        self._weights = weights
        self._kept: dict[str, HostWeight] = {}
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget all matrices, before those of the next layer are read."""
        self._kept.clear()

    def weight(self, name: str) -> HostWeight:
        """The matrix ``name``. It is shared, so it is read only."""
        with self._lock:
            if name not in self._kept:
                found = self._weights.weight(name)
                if not isinstance(found, StoredMatrix) or found.nbytes > LARGEST_SHARED:
                    return found
                self._kept[name] = np.asarray(found)
            return self._kept[name]

    def vector(self, name: str) -> np.ndarray:
        """The float tensor ``name``."""
        return self._weights.vector(name)


def _multiplied(values: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
    """``values`` times factors that are powers of two, which are exact in fp32."""
    return values if factors is None else np.asarray(values).astype(np.float32) * factors


def _rounded_before(rewrite: WeightRewrite, by_row: np.ndarray | None, scheme: Scheme) -> Int8Weight:
    """A matrix whose codes a calibration has rounded; the factors of its rows change its scales alone."""
    assert rewrite.codes is not None and rewrite.scale is not None
    scale = rewrite.scale.astype(np.float32)
    if by_row is not None:
        scale = scale * by_row
    stored = scale.astype(np.float16) if fits_fp16(scale) else scale
    return Int8Weight(np.asarray(rewrite.codes), stored, scheme is Scheme.W8A8, rotation=rewrite.rotation or 1)


def _quantized(values: np.ndarray, scheme: Scheme, rewrite: WeightRewrite) -> Int8Weight:
    dynamic, block = scheme is Scheme.W8A8, rewrite.rotation or 1
    matrix = np.asarray(values) if block == 1 else rotated(values, block)
    if rewrite.outliers is None:
        return replace(quantize_weight(matrix, dynamic, rewrite.group_size or 0), rotation=block)
    kept = OutlierColumns(rewrite.outliers, matrix[:, rewrite.outliers].astype(np.float16))
    rest = matrix.astype(np.float32)
    rest[:, rewrite.outliers] = 0
    return replace(quantize_weight(rest, dynamic), outliers=kept)
