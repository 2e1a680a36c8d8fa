"""The operations of a calibration, which tries several quantizations of a weight on the device where it will run.

This is their definition, over NumPy, as :class:`.base.Backend` is of a model's operations. Another backend returns the
same codes, scales and magnitudes, and the same errors up to the order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from . import gptq
from .quantization import HostWeight, Int8Weight, OutlierColumns, quantize_weight
from .rotation import rotated
from .values import Array


class Operations(Protocol):
    """The operations of a backend that a calibration uses."""

    activation_dtype: np.dtype

    def host(self, x: Array) -> np.ndarray: ...

    def weight(self, parts: Sequence[HostWeight]) -> Any: ...


class CalibrationOps:
    """Operations on the weights and activations of a calibration.

    A *matrix* is a float weight ``[out, in]`` on the device, not rounded, as :meth:`matrix` makes it. *Rows* are inputs
    of a product, fp32 ``[n, in]``.
    """

    def __init__(self, ops: Operations):
        self.ops = ops

    def matrix(self, values: np.ndarray) -> Array:
        """A float matrix ``[out, in]`` in fp32, fp16 or bf16, or a stored one, on the device."""
        return np.asarray(values).astype(np.float32)

    def column_absmax(self, x: Array, before: Array | None = None) -> Array:
        """``max|x|`` of each column of ``[T, in]`` -> fp32 ``[in]``, or the maximum of that and of ``before``.

        ``before`` may be overwritten.
        """
        values = self.ops.host(x)
        top = np.maximum(values.max(axis=0), -values.min(axis=0)).astype(np.float32)
        return top if before is None else np.maximum(top, before)

    def weight_column_absmax(self, matrix: Array) -> Array:
        """``max|w|`` of each column, fp32 ``[in]``."""
        return np.abs(matrix).max(axis=0)

    def relative_column_absmax(self, matrix: Array) -> Array:
        """``max(|w| / max|w of its row|)`` of each column, fp32 ``[in]``; 0 for a row of zeros."""
        rows = np.abs(matrix).max(axis=1, keepdims=True)
        return (np.abs(matrix) / np.where(rows > 0, rows, np.float32(1))).max(axis=0)

    def rows(self, x: Array, index: np.ndarray) -> Array:
        """The rows ``index`` of an activation ``[T, in]``, fp32 ``[n, in]``."""
        return self.ops.host(x)[index].astype(np.float32)

    def joined(self, parts: Sequence[Array]) -> Array:
        """Rows ``[n_i, in]`` concatenated."""
        return np.concatenate(parts)

    def divided(self, rows: Array, factors: np.ndarray | None) -> Array:
        """``rows / factors``, with ``factors`` fp32 ``[in]`` or None for ones, in the activation type."""
        quotient = rows if factors is None else rows / factors
        return quotient.astype(self.ops.activation_dtype)

    def weight(
        self,
        matrix: Array,
        dynamic: bool | None,
        factors: np.ndarray | None = None,
        outliers: np.ndarray | None = None,
        rotation: int = 1,
    ) -> Any:
        """The matrix, its columns multiplied by ``factors``, as a weight for ``linear``.

        It is w8a8 if ``dynamic`` is true, w8a16 if it is false, and float if it is None. The input columns ``outliers``
        (int32 ``[n]``, ascending) stay fp16; or an int8 weight rotates its input in blocks of ``rotation`` elements.
        The matrix times the factors must be finite.
        """
        weight = matrix if factors is None else matrix * factors
        if dynamic is None:
            return self.ops.weight([weight])
        if outliers is None:
            return self.ops.weight([replace(quantize_weight(rotated(weight, rotation), dynamic), rotation=rotation)])
        kept = OutlierColumns(outliers, weight[:, outliers].astype(np.float16))
        rest = np.array(weight)
        rest[:, outliers] = 0
        return self.ops.weight([replace(quantize_weight(rest, dynamic), outliers=kept)])

    def add_hessian(self, x: Array, count: int, before: Array | None = None) -> Array:
        """``X^T X`` of the first ``count`` rows of an activation ``[T, in]``, plus ``before``: ``[in, in]``.

        ``before`` may be overwritten.
        """
        part = gptq.hessian(self.ops.host(x)[:count].astype(np.float32))
        return part if before is None else before + part

    def gptq_root(self, hessian: Array, factors: np.ndarray | None, rotation: int) -> Any:
        """What :meth:`gptq_weight` needs of a Hessian: see :func:`.gptq.inverse_root`.

        It is that of inputs divided by ``factors`` and rotated in blocks of ``rotation`` elements.
        """
        return gptq.inverse_root(gptq.transformed_hessian(hessian, factors, rotation))

    def gptq_weight(self, matrix: Array, root: Any, factors: np.ndarray | None, rotation: int) -> Int8Weight:
        """The matrix, its columns multiplied by ``factors`` and rotated, rounded by :func:`.gptq.gptq_codes`.

        Scales are those of :meth:`weight`. Codes and scales are on the host.
        """
        weight = rotated(matrix if factors is None else matrix * factors, rotation)
        plain = quantize_weight(weight)
        return replace(plain, codes=gptq.gptq_codes(weight, plain.scale, root), rotation=rotation)

    def squares(self, got: Array, expected: Array) -> tuple[np.ndarray, np.ndarray]:
        """``|got - expected|^2`` and ``|expected|^2`` of each row, fp32 ``[n, out]`` -> fp64 ``[n]`` on the host."""
        noise, size = (np.einsum("ij,ij->i", x, x, dtype=np.float64) for x in (got - expected, expected))
        return noise, size
