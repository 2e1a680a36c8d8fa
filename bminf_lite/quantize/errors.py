"""The error of an int8 product on a calibration's activations, relative to the float product.

The error of a product is the mean over tokens of ``|y_int8 - y|^2 / |y|^2``. Every token has the same weight: some
tokens have enormous activations, and would dominate an error relative to the sum over all tokens. A token whose output
is smaller than the median is divided by the median instead, because small outputs change the residual stream little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..backend.base import Backend
from ..backend.quantization import HostWeight
from ..backend.values import Array
from ..checkpoint.recipe import Scheme


@dataclass(frozen=True)
class QuantizationCandidate:
    """A way to quantize a product, after dividing its inputs and multiplying its weights by ``factors`` ``[in]``.

    The input columns ``outliers`` (int32 ``[n]``) stay fp16. Then inputs and weights are rotated in blocks of
    ``rotation`` elements.
    """

    scheme: Scheme
    factors: np.ndarray | None = None
    outliers: np.ndarray | None = None
    rotation: int = 1


class ErrorEvaluator:
    """Measures int8 versions of the products of ``rows`` with ``matrices``; see :class:`.CalibrationOps` for both.

    The arithmetic is that of ``ops``, so the errors are those at run time.
    """

    def __init__(self, ops: Backend, rows: Array, matrices: Sequence[Array]):
        self.ops = ops
        self.calibration_ops = ops.calibration_ops()
        self.rows = rows
        self.matrices = matrices
        inputs = self.calibration_ops.divided(rows, None)
        self._expected = [self._product(inputs, self.calibration_ops.weight(matrix, None)) for matrix in matrices]
        self._known: dict[tuple[object, ...], list[float]] = {}

    def errors(self, candidate: QuantizationCandidate) -> list[float]:
        """Each product's error in ``candidate``; computed once."""
        key = (candidate.scheme, candidate.rotation, *map(_content, (candidate.factors, candidate.outliers)))
        if key not in self._known:
            self._known[key] = self._errors(candidate)
        return self._known[key]

    def _errors(self, candidate: QuantizationCandidate) -> list[float]:
        inputs, dynamic = self.calibration_ops.divided(self.rows, candidate.factors), candidate.scheme is Scheme.W8A8
        given = candidate.factors, candidate.outliers, candidate.rotation
        return [
            self._error(i, self.calibration_ops.weight(matrix, dynamic, *given), inputs)
            for i, matrix in enumerate(self.matrices)
        ]

    def error(self, index: int, weight: HostWeight, factors: np.ndarray | None) -> float:
        """The error of product ``index`` with another weight, its inputs divided by ``factors``."""
        return self._error(index, self.ops.weight([weight]), self.calibration_ops.divided(self.rows, factors))

    def _error(self, index: int, weight: Array, inputs: Array) -> float:
        return mean_error(*self.calibration_ops.squares(self._product(inputs, weight), self._expected[index]))

    def _product(self, inputs: Array, weight: Array) -> Array:
        return self.ops.linear(inputs, weight, fp32=True)


def _content(values: np.ndarray | None) -> bytes | None:
    """What tells arrays of one length and type apart."""
    return None if values is None else values.tobytes()


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """The error of ``got``, fp32 ``[T, out]`` each; 0 where all of ``expected`` is 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        difference = got - expected
    noise, size = (np.einsum("ij,ij->i", x, x, dtype=np.float64) for x in (difference, expected))
    return mean_error(noise, size)


def mean_error(noise: np.ndarray, size: np.ndarray) -> float:
    """The error from the squares of errors and of outputs, fp64 ``[T]`` each."""
    floor = np.median(size)
    size = np.maximum(size, floor if floor > 0 else size.max(initial=0))
    return float(np.mean(np.divide(noise, size, out=np.zeros_like(noise), where=size > 0)))
