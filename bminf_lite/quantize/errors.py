"""How far an int8 product is from the float one, on activations that a calibration saw.

The error of a product is the mean over tokens of ``|y_int8 - y|^2 / |y|^2``. Every token counts the same, however
large its output is: models have tokens with enormous activations, and an error relative to the sum of everything would
see nothing else. A token whose output is smaller than the median counts as if it had the median, because what is added
to a residual stream matters by its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..backend.base import Backend
from ..backend.quantization import HostWeight, OutlierColumns, quantize_weight
from ..checkpoint.recipe import Scheme


@dataclass(frozen=True)
class Version:
    """A way to quantize a product: inputs are divided and weights multiplied by ``factors`` ``[in]`` before.

    The input columns ``outliers`` (int32 ``[n]``) stay fp16.
    """

    scheme: Scheme
    factors: np.ndarray | None = None
    outliers: np.ndarray | None = None

    def of(self, weight: np.ndarray) -> HostWeight:
        """An fp32 weight ``[out, in]`` in this version."""
        if self.factors is not None:
            weight = weight * self.factors
        if self.scheme is Scheme.FLOAT:
            return weight
        dynamic = self.scheme is Scheme.W8A8
        if self.outliers is None:
            return quantize_weight(weight, dynamic)
        kept = OutlierColumns(self.outliers, weight[:, self.outliers].astype(np.float16))
        rest = np.array(weight)
        rest[:, self.outliers] = 0
        return replace(quantize_weight(rest, dynamic), outliers=kept)


class Judge:
    """Measures int8 versions of products with ``weights`` (fp32 ``[out, in]`` each) for ``inputs`` (fp32 ``[T, in]``).

    The arithmetic is that of ``ops``: what is measured is what will run.
    """

    def __init__(self, ops: Backend, inputs: np.ndarray, weights: Sequence[np.ndarray]):
        self.ops = ops
        self.inputs = inputs
        self.weights = weights
        self._expected = [self._product(inputs, weight) for weight in weights]

    def errors(self, version: Version) -> list[float]:
        """Each product's error in ``version``."""
        inputs = self.inputs if version.factors is None else self.inputs / version.factors
        return [self.error(i, version.of(weight), inputs) for i, weight in enumerate(self.weights)]

    def error(self, index: int, weight: HostWeight, inputs: np.ndarray) -> float:
        """The error of product ``index`` with another weight and other inputs."""
        return relative_error(self._product(inputs, weight), self._expected[index])

    def _product(self, inputs: np.ndarray, weight: HostWeight) -> np.ndarray:
        x = self.ops.array(inputs.astype(self.ops.activation_dtype))
        return self.ops.host(self.ops.linear(x, self.ops.weight([weight]), fp32=True))


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """The error as this module defines it, fp32 ``[T, out]`` each; 0 where ``expected`` is 0 throughout."""
    difference = got - expected
    size = np.einsum("ij,ij->i", expected, expected, dtype=np.float64)
    noise = np.einsum("ij,ij->i", difference, difference, dtype=np.float64)
    floor = np.median(size)
    size = np.maximum(size, floor if floor > 0 else size.max(initial=0))
    return float(np.mean(np.divide(noise, size, out=np.zeros_like(noise), where=size > 0)))
