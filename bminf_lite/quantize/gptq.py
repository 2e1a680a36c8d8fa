"""GPTQ (https://arxiv.org/abs/2210.17323): rounding that makes up for its own errors, where that helps.

A weight's columns are rounded one after another, and what rounding one of them does to the product is taken back by
changing those that are not rounded yet. How columns stand in for each other is in the Hessian of the product's squared
error, ``X^T X`` over the calibration's inputs. Scales stay what they are; only codes change, by one as a rule.

The Hessian comes from the first three quarters of the inputs. The others, which it has not seen, say whether the codes
are better than rounded ones; if not by :data:`GAIN`, those are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..backend.base import Backend
from ..backend.quantization import CODE_MAX, Int8Weight
from .calibration import spread_rows
from .errors import Judge, Version

BLOCK = 128
"""Columns whose errors are taken back together: within a block at once, in what follows by one product."""

DAMPING = 0.01
"""What is added to the Hessian's diagonal, relative to its mean, so that it can be inverted."""

ROWS = 4096

GAIN = 0.05
"""How much smaller the error must become, relative to what rounding gives."""


def compensated(
    ops: Backend, inputs: np.ndarray, weights: Sequence[np.ndarray], version: Version
) -> list[Int8Weight] | None:
    """``weights`` (fp32 ``[out, in]`` each) in ``version`` with such codes, or None where the gain is too small.

    ``inputs`` is fp32 ``[T, in]``; ``version`` is int8 without outlier columns.
    """
    seen = len(inputs) * 3 // 4
    root = inverse_root(hessian(divided(inputs[:seen], version)))
    plain = [version.of(weight) for weight in weights]
    better = []
    for weight, rounded in zip(weights, plain, strict=True):
        assert isinstance(rounded, Int8Weight)
        factors = np.float32(1) if version.factors is None else version.factors
        better.append(replace(rounded, codes=compensated_codes(weight * factors, rounded.scale, root)))
    held_out = inputs[seen:][spread_rows(len(inputs) - seen, ROWS)]
    judge = Judge(ops, held_out, weights)
    errors = [
        max(judge.error(i, weight, divided(held_out, version)) for i, weight in enumerate(matrices))
        for matrices in (plain, better)
    ]
    return better if errors[1] < (1 - GAIN) * errors[0] else None


def divided(inputs: np.ndarray, version: Version) -> np.ndarray:
    """The inputs as the smoothed product gets them."""
    return inputs if version.factors is None else inputs / version.factors


def hessian(inputs: np.ndarray) -> np.ndarray:
    """``X^T X`` of fp32 ``[T, in]``, fp64 ``[in, in]``: fp32 products of some thousand rows, summed in fp64."""
    total = np.zeros((inputs.shape[1],) * 2)
    for start in range(0, len(inputs), ROWS):
        part = inputs[start : start + ROWS]
        total += part.T @ part
    return total


def inverse_root(total: np.ndarray) -> np.ndarray:
    """The upper triangular ``U`` with ``U^T U`` the inverse of the damped Hessian, fp64 ``[in, in]`` -> fp32.

    An input that is always zero counts as independent of the others.
    """
    diagonal = np.diagonal(total)
    damping = DAMPING * float(diagonal.mean()) or 1.0
    damped = total + np.diag(np.full(len(total), damping))
    return np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)


def compensated_codes(weight: np.ndarray, scale: np.ndarray, root: np.ndarray) -> np.ndarray:
    """Codes int8 ``[out, in]`` of ``weight`` fp32 ``[out, in]`` with ``scale`` ``[out]`` and ``inverse_root``'s result.

    Codes lie in -127 to 127, as everywhere.
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
