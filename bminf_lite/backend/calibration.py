"""Trying ways to quantize a weight on the device where it will run: what a calibration asks of a backend.

This is the definition, over NumPy, as :class:`.base.Backend` is of a model's operations; another backend's trials
return the same codes, scales and magnitudes, and the same errors but for the order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .quantization import OutlierColumns, quantize_weight
from .values import Array

if TYPE_CHECKING:
    from .base import Backend


class CalibrationOps:
    """What ``ops`` can do with the weights and activations of a calibration.

    A *matrix* is a float weight ``[out, in]`` on the device, every bit of it, as :meth:`matrix` makes it; *rows* are
    inputs of a product, fp32 ``[n, in]``.
    """

    def __init__(self, ops: Backend):
        self.ops = ops

    def matrix(self, values: np.ndarray) -> Array:
        """A float matrix in fp32, fp16 or bf16 on the device; it may still be in a file."""
        return np.asarray(values).astype(np.float32)

    def column_absmax(self, x: Array, before: Array | None = None) -> Array:
        """``max|x|`` of each column of an activation, fp32 ``[in]``, and of ``before``, which may be overwritten."""
        values = self.ops.host(x)
        top = np.maximum(values.max(axis=0), -values.min(axis=0)).astype(np.float32)
        return top if before is None else np.maximum(top, before)

    def weight_column_absmax(self, matrix: Array) -> Array:
        """``max|w|`` of each column, fp32 ``[in]``."""
        return np.abs(matrix).max(axis=0)

    def relative_column_absmax(self, matrix: Array) -> Array:
        """``max(|w| / max|w of its row|)`` of each column, fp32 ``[in]``; a row of zeros counts as it is."""
        rows = np.abs(matrix).max(axis=1, keepdims=True)
        return (np.abs(matrix) / np.where(rows > 0, rows, np.float32(1))).max(axis=0)

    def rows(self, x: Array, index: np.ndarray) -> Array:
        """Some rows of an activation ``[T, in]``."""
        return self.ops.host(x)[index].astype(np.float32)

    def joined(self, parts: Sequence[Array]) -> Array:
        """Rows one after another."""
        return np.concatenate(parts)

    def divided(self, rows: Array, factors: np.ndarray | None) -> Array:
        """``rows / factors``, with ``factors`` fp32 ``[in]``, in the activation type."""
        quotient = rows if factors is None else rows / factors
        return quotient.astype(self.ops.activation_dtype)

    def weight(
        self,
        matrix: Array,
        dynamic: bool | None,
        factors: np.ndarray | None = None,
        outliers: np.ndarray | None = None,
    ) -> Any:
        """The matrix, its columns multiplied by ``factors``, as ``linear`` takes it: w8a8, w8a16 if not ``dynamic``.

        With None for ``dynamic`` it stays float. The input columns ``outliers`` (int32 ``[n]``, ascending) stay fp16.
        The matrix must be finite, and so must its product with the factors.
        """
        weight = matrix if factors is None else matrix * factors
        if dynamic is None:
            return self.ops.weight([weight])
        if outliers is None:
            return self.ops.weight([quantize_weight(weight, dynamic)])
        kept = OutlierColumns(outliers, weight[:, outliers].astype(np.float16))
        rest = np.array(weight)
        rest[:, outliers] = 0
        return self.ops.weight([replace(quantize_weight(rest, dynamic), outliers=kept)])

    def squares(self, got: Array, expected: Array) -> tuple[np.ndarray, np.ndarray]:
        """``|got - expected|^2`` and ``|expected|^2`` of each row, fp32 ``[n, out]`` -> fp64 ``[n]`` on the host."""
        difference = got - expected
        return (
            np.einsum("ij,ij->i", difference, difference, dtype=np.float64),
            np.einsum("ij,ij->i", expected, expected, dtype=np.float64),
        )
