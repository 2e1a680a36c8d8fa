"""GPTQ (https://arxiv.org/abs/2210.17323): rounding that compensates its own errors.

A weight's columns are rounded one after another. The columns that are not rounded yet change to compensate the error
that rounding a column causes in the product. The Hessian of the product's squared error, ``X^T X`` over the
calibration's inputs, gives these changes. Columns with the largest inputs come first ("act-order"), because their
errors cost most and all other columns can still compensate them. Scales stay as they are; codes change, mostly by one.

The Hessian comes from the first three quarters of the inputs. The other quarter decides: if the error there does not
become smaller by :data:`GAIN`, the plainly rounded codes are kept. The arithmetic is the device's, see
:mod:`bminf_lite.backend.gptq`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..backend.base import Backend
from ..backend.quantization import Int8Weight
from ..backend.values import Array
from ..checkpoint.recipe import Scheme
from .calibration import sample_rows
from .errors import ErrorEvaluator, QuantizationCandidate

HELD_OUT_ROWS = 256

GAIN = 0.05
"""The least reduction of the error, relative to that of plain rounding."""


class GPTQInputs:
    """A product's inputs for GPTQ, added in parts: the Hessian, and some held-out inputs."""

    def __init__(self, ops: Backend, parts: int = 1):
        self._calibration_ops = ops.calibration_ops()
        self._hessian: Array | None = None
        self._held_out: list[Array] = []
        self._rows = max(HELD_OUT_ROWS // parts, 1)

    def add(self, x: Array) -> None:
        """Add a part, an activation ``[T, in]``."""
        seen = x.shape[0] * 3 // 4
        self._hessian = self._calibration_ops.add_hessian(x, seen, self._hessian)
        index = seen + sample_rows(x.shape[0] - seen, self._rows)
        self._held_out.append(self._calibration_ops.rows(x, index))

    def held_out(self) -> Array:
        """Inputs that are not in the Hessian, fp32 ``[n, in]`` on the device."""
        return self._calibration_ops.joined(self._held_out)

    @property
    def hessian(self) -> Array:
        """``X^T X`` of the inputs that are not held out, ``[in, in]`` on the device."""
        assert self._hessian is not None
        return self._hessian


class GPTQRounding:
    """Rounds the matrices of one product in several ways. ``matrices`` are those of :class:`.CalibrationOps`."""

    def __init__(self, ops: Backend, inputs: GPTQInputs, matrices: Sequence[Array]):
        self._calibration_ops = ops.calibration_ops()
        self._inputs = inputs
        self._matrices = matrices
        self._evaluator = ErrorEvaluator(ops, inputs.held_out(), matrices)
        self._codes: dict[tuple[int, bytes], list[Int8Weight]] = {}
        self._gains: dict[tuple[int, bytes], bool] = {}

    def quantize(self, candidate: QuantizationCandidate) -> list[Int8Weight] | None:
        """The matrices quantized like ``candidate`` with GPTQ, or None if that gains too little.

        ``candidate`` is int8 without outlier columns. A w8a16 candidate gets what a w8a8 one with the same codes got.
        """
        dynamic, key = candidate.scheme is Scheme.W8A8, _key(candidate)
        better = [replace(weight, dynamic=dynamic) for weight in self._rounded(candidate)]
        if key not in self._gains:
            errors = [self._evaluator.error(i, weight, candidate.factors) for i, weight in enumerate(better)]
            self._gains[key] = max(errors) < (1 - GAIN) * max(self._evaluator.errors(candidate))
        return better if self._gains[key] else None

    def _rounded(self, candidate: QuantizationCandidate) -> list[Int8Weight]:
        """The codes, which depend on the factors and the rotation alone; computed once for each."""
        factors, rotation, key = candidate.factors, candidate.rotation, _key(candidate)
        if key not in self._codes:
            ops = self._calibration_ops
            root = ops.gptq_root(self._inputs.hessian, factors, rotation)
            self._codes[key] = [ops.gptq_weight(matrix, root, factors, rotation) for matrix in self._matrices]
        return self._codes[key]


def _key(candidate: QuantizationCandidate) -> tuple[int, bytes]:
    """What codes depend on: the rotation and the factors."""
    return candidate.rotation, b"" if candidate.factors is None else candidate.factors.tobytes()
