"""GPTQ (https://arxiv.org/abs/2210.17323): rounding that compensates its own errors.

A weight's columns are rounded one after another. The columns that are not rounded yet change to compensate the error
that rounding a column causes in the product. The Hessian of the product's squared error, ``X^T X`` over the
calibration's inputs, gives these changes. Scales stay as they are; codes change, mostly by one.

The Hessian comes from the first three quarters of the inputs. The other quarter decides: if the error there does not
become smaller by :data:`GAIN`, the plainly rounded codes are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..backend.base import Backend
from ..backend.quantization import CODE_MAX, Int8Weight, quantize_weight
from ..backend.rotation import rotated
from ..checkpoint.recipe import Scheme
from .calibration import sample_rows
from .errors import ErrorEvaluator, QuantizationCandidate

BLOCK = 128
"""Columns whose errors are compensated together: within the block one by one, in later columns by one product."""

DAMPING = 0.01
"""Added to the Hessian's diagonal, relative to its mean, so that it can be inverted."""

ROWS = 4096

GAIN = 0.05
"""The least reduction of the error, relative to that of plain rounding."""


class GPTQInputs:
    """A product's inputs for GPTQ, added in parts: the Hessian, and some held-out inputs."""

    def __init__(self, parts: int = 1):
        self._hessian: np.ndarray | None = None
        self._held_out: list[np.ndarray] = []
        self._rows = max(ROWS // parts, 1)

    def add(self, inputs: np.ndarray) -> None:
        """Add a part, fp32 ``[T, in]``."""
        seen = len(inputs) * 3 // 4
        part = hessian(inputs[:seen])
        self._hessian = part if self._hessian is None else self._hessian + part
        self._held_out.append(inputs[seen:][sample_rows(len(inputs) - seen, self._rows)])

    @property
    def held_out(self) -> np.ndarray:
        """Inputs that are not in the Hessian, fp32 ``[n, in]``."""
        return np.concatenate(self._held_out)

    def hessian(self, factors: np.ndarray | None, rotation: int = 1) -> np.ndarray:
        """``X^T X`` of the inputs divided by ``factors``, powers of two fp32 ``[in]``, and rotated: fp64 ``[in, in]``.

        ``rotation`` is the size of blocks. A rotated Hessian is rounded to fp32, far below the damping.
        """
        assert self._hessian is not None
        total = self._hessian if factors is None else self._hessian / np.outer(factors, factors).astype(np.float64)
        return total if rotation == 1 else rotated(rotated(total, rotation).T, rotation).astype(np.float64)


def gptq_quantize(
    ops: Backend, inputs: GPTQInputs, weights: Sequence[np.ndarray], candidate: QuantizationCandidate
) -> list[Int8Weight] | None:
    """``weights`` (fp32 ``[out, in]`` each) quantized like ``candidate`` with GPTQ, or None if that gains too little.

    ``candidate`` is int8 without outlier columns.
    """
    root = inverse_hessian_cholesky(inputs.hessian(candidate.factors, candidate.rotation))
    plain, better = [], []
    for weight in weights:
        scaled = weight if candidate.factors is None else weight * candidate.factors
        scaled = rotated(scaled, candidate.rotation)
        rounded = replace(quantize_weight(scaled, candidate.scheme is Scheme.W8A8), rotation=candidate.rotation)
        plain.append(rounded)
        better.append(replace(rounded, codes=gptq_codes(scaled, rounded.scale, root)))
    calibration_ops = ops.calibration_ops()
    evaluator = ErrorEvaluator(ops, ops.array(inputs.held_out), [calibration_ops.matrix(weight) for weight in weights])
    errors = [
        max(evaluator.error(i, weight, candidate.factors) for i, weight in enumerate(matrices))
        for matrices in (plain, better)
    ]
    return better if errors[1] < (1 - GAIN) * errors[0] else None


def hessian(inputs: np.ndarray) -> np.ndarray:
    """``X^T X`` of fp32 ``[T, in]``, fp64 ``[in, in]``: fp32 products of some thousand rows, summed in fp64."""
    total = np.zeros((inputs.shape[1],) * 2)
    for start in range(0, len(inputs), ROWS):
        part = inputs[start : start + ROWS]
        total += part.T @ part
    return total


def inverse_hessian_cholesky(total: np.ndarray) -> np.ndarray:
    """The upper triangular ``U`` with ``U^T U`` the inverse of the damped Hessian, fp64 ``[in, in]`` -> fp32.

    An input that is always zero counts as independent of the others.
    """
    damping = DAMPING * float(np.diagonal(total).mean()) or 1.0
    damped = total + np.diag(np.full(len(total), damping))
    return np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)


def gptq_codes(weight: np.ndarray, scale: np.ndarray, root: np.ndarray) -> np.ndarray:
    """Codes int8 ``[out, in]``, -127 to 127, of ``weight`` fp32 ``[out, in]`` with ``scale`` ``[out]``.

    ``root`` is from :func:`inverse_hessian_cholesky`.
    """
    rest = weight / scale.astype(np.float32)[:, None]
    codes = np.empty(weight.shape, np.int8)
    inputs = weight.shape[1]
    for start in range(0, inputs, BLOCK):
        stop = min(start + BLOCK, inputs)
        block, errors = rest[:, start:stop], np.empty((len(weight), stop - start), np.float32)
        for column in range(stop - start):
            row = root[start + column, start:stop]
            rounded = np.clip(np.rint(block[:, column]), -CODE_MAX, CODE_MAX)
            codes[:, start + column] = rounded
            errors[:, column] = (block[:, column] - rounded) / row[column]
            block[:, column + 1 :] -= errors[:, column, None] * row[column + 1 :]
        rest[:, stop:] -= errors @ root[start:stop, stop:]
    return codes
