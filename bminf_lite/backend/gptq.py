"""GPTQ's arithmetic over NumPy (https://arxiv.org/abs/2210.17323): the definition for every backend.

From the Hessian ``H`` of a product's squared error come an order of its columns, by their diagonal element, the largest
first, and the upper triangular ``U`` with ``U^T U`` the inverse of the damped ``H`` in that order. Column after column
is then rounded in that order. With ``e`` the error of the rounded column ``c`` over ``U[c, c]``, each later column
``j`` becomes ``w[j] - e * U[c, j]``, in fp32, product and difference rounded. That is done at once for the columns of
the same block of ``BLOCK``. For later blocks one float product ``E U`` adds up the changes of a whole block.

Backends agree as follows. With the same ``U`` and weights, codes of the first block are equal. The float product sums
in an order of its own, so a value of a later block may lie on the other side of a tie, and then the columns behind it
differ too. ``U`` itself agrees within the error of a Cholesky decomposition in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .quantization import CODE_MAX
from .rotation import rotated
from .values import GPTQ_BLOCK as BLOCK

DAMPING = 0.01
"""Added to the Hessian's diagonal, relative to its mean, so that it can be inverted."""

ROWS = 4096
"""Rows of inputs whose product is summed in fp32."""

SMALL_TRIANGLE = 64
"""Triangular matrices of this size are inverted as others are."""


@dataclass(frozen=True)
class Root:
    """The order in which columns are rounded, and the upper triangular ``U``, fp32 ``[in, in]``, of that order."""

    order: np.ndarray
    values: np.ndarray


def hessian(inputs: np.ndarray) -> np.ndarray:
    """``X^T X`` of fp32 ``[T, in]``, fp64 ``[in, in]``: fp32 products of some thousand rows, summed in fp64."""
    total = np.zeros((inputs.shape[1],) * 2)
    for start in range(0, len(inputs), ROWS):
        part = inputs[start : start + ROWS]
        total += part.T @ part
    return total


def transformed_hessian(total: np.ndarray, factors: np.ndarray | None, rotation: int = 1) -> np.ndarray:
    """The Hessian of inputs divided by ``factors``, powers of two fp32 ``[in]``, and rotated: fp64 ``[in, in]``.

    ``rotation`` is the size of blocks. A rotated Hessian is rounded to fp32, far below the damping.
    """
    if factors is not None:
        total = total / np.outer(factors, factors).astype(np.float64)
    return total if rotation == 1 else rotated(rotated(total, rotation).T, rotation).astype(np.float64)


def act_order(diagonal: np.ndarray) -> np.ndarray:
    """The numbers of the columns by their diagonal element ``[in]``, the largest first; of equal ones the first."""
    return np.argsort(-diagonal, kind="stable")


def damping_of(diagonal: np.ndarray) -> float:
    """What is added to the diagonal ``[in]``: with it, an input that is always zero is independent of the others."""
    return DAMPING * float(diagonal.mean(dtype=np.float64)) or 1.0


def inverse_root(total: np.ndarray) -> Root:
    """The root of a Hessian, fp64 ``[in, in]``: the inverse of the upper triangular ``R`` whose ``R R^T`` is damped.

    For then ``U = R^-1`` has ``U^T U`` its inverse.
    """
    diagonal = np.diagonal(total)
    order = act_order(diagonal)
    damped = total[np.ix_(order, order)]
    damped[np.diag_indices(len(damped))] += damping_of(diagonal)
    upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return Root(order, triangular_inverse(upper).astype(np.float32))


def triangular_inverse(upper: np.ndarray) -> np.ndarray:
    """The inverse of an upper triangular matrix ``[n, n]``, by halves: products take a third of a general inverse."""
    n = len(upper)
    if n <= SMALL_TRIANGLE:
        return np.triu(np.linalg.inv(upper))
    first, last = slice(0, n // 2), slice(n // 2, n)
    found = np.zeros_like(upper)
    found[first, first] = triangular_inverse(upper[first, first])
    found[last, last] = triangular_inverse(upper[last, last])
    found[first, last] = -found[first, first] @ (upper[first, last] @ found[last, last])
    return found


def gptq_codes(weight: np.ndarray, scale: np.ndarray, root: Root) -> np.ndarray:
    """Codes int8 ``[out, in]``, -127 to 127, of ``weight`` fp32 ``[out, in]`` with ``scale`` ``[out]``."""
    # columns are rounded one after another, so they lie one after another in memory
    rest = np.asfortranarray(weight[:, root.order] / scale.astype(np.float32)[:, None])
    codes = np.empty(weight.shape, np.int8, order="F")
    inputs = weight.shape[1]
    for start in range(0, inputs, BLOCK):
        stop = min(start + BLOCK, inputs)
        block, errors = round_block(rest[:, start:stop], root.values[start:stop, start:stop])
        codes[:, root.order[start:stop]] = block
        rest.T[stop:] -= root.values[start:stop, stop:].T @ errors.T
    return np.ascontiguousarray(codes)


def round_block(block: np.ndarray, root: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 and errors fp32 ``[out, n]`` of columns ``block``, in units of their scale, which are overwritten.

    ``root`` fp32 ``[n, n]`` is their part of ``U``.
    """
    codes = np.empty(block.shape, np.int8, order="F")
    errors, changes = np.empty((2, *block.shape[::-1]), np.float32).transpose(0, 2, 1)
    for column in range(block.shape[1]):
        rounded = np.clip(np.rint(block[:, column]), -CODE_MAX, CODE_MAX)
        codes[:, column] = rounded
        errors[:, column] = (block[:, column] - rounded) / root[column, column]
        np.multiply(errors[:, column, None], root[column, column + 1 :], out=changes[:, column + 1 :])
        block[:, column + 1 :] -= changes[:, column + 1 :]
    return codes, errors
