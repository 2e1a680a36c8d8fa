"""The formulas in the operations of :mod:`.operations`, over NumPy.

They compute in fp32. A norm and a softmax compute in fp64 on request, so that gradients can be checked. A NaN or an
infinity appears in the result without a warning of NumPy, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from .values import Norm, Rope, Xielu

F = TypeVar("F", bound=Callable[..., object])


def silently(function: F) -> F:
    """A decorator for functions in which NumPy does not warn of overflows and invalid values."""
    return np.errstate(all="ignore")(function)


@silently
def normalise(x: np.ndarray, norm: Norm, dtype: type = np.float32) -> np.ndarray:
    """``norm`` of ``[..., features]`` over the last axis, in ``dtype``."""
    x = x.astype(dtype, copy=False)
    mean, inverse = norm_statistics(x, norm.eps, norm.center)
    y: np.ndarray = (x - mean[..., None] if norm.center else x) * norm.weight * inverse[..., None]
    return y if norm.bias is None else y + norm.bias


def norm_statistics(x: np.ndarray, eps: float, center: bool) -> tuple[np.ndarray, np.ndarray]:
    """What a norm subtracts and what it multiplies by: ``[..., features]`` -> two of ``[...]``, of the same dtype.

    The mean, 0 without ``center``; and ``1 / sqrt(mean((x - mean)^2) + eps)``.
    """
    mean = x.mean(axis=-1) if center else np.zeros(x.shape[:-1], x.dtype)
    centered = x - mean[..., None] if center else x
    inverse = x.dtype.type(1) / np.sqrt(np.mean(centered * centered, axis=-1) + x.dtype.type(eps))
    return mean, inverse


@silently
def rotate(x: np.ndarray, positions: np.ndarray, rope: Rope | None) -> np.ndarray:
    """Rotary embedding of ``[T, heads, head_dim]`` fp32 at ``positions`` ``[T]``."""
    if rope is None:
        return x
    angles = positions.astype(np.float32)[:, None, None] * rope.frequencies
    cos, sin = np.cos(angles) * np.float32(rope.scale), np.sin(angles) * np.float32(rope.scale)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@silently
def soft_capped(x: np.ndarray, cap: float) -> np.ndarray:
    """``cap * tanh(x / cap)`` in fp32: nearly ``x`` where that is small, and always within the cap."""
    y: np.ndarray = np.tanh(x / np.float32(cap)) * np.float32(cap)
    return y


def product_by_row(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """``x @ matrix``, computed row by row: BLAS chooses the order of a sum by all shapes, the number of rows too."""
    found: np.ndarray = (x[:, None] @ matrix)[:, 0]
    return found


def stored(result: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    """``result``, copied into ``out`` if given."""
    if out is None:
        return result
    out[...] = result
    return out


@silently
def softmax(scores: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Softmax over the last axis in the scores' dtype.

    Where ``mask`` is false the result is exactly 0, also for a whole row.
    """
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), np.float32(0), top))
    total = weights.sum(axis=-1, keepdims=True)
    probabilities: np.ndarray = weights / np.where(total == 0, np.float32(1), total)
    return probabilities


@silently
def silu(x: np.ndarray) -> np.ndarray:
    """``x * sigmoid(x)`` in fp32."""
    divisor = np.exp(-x)
    divisor += np.float32(1)
    y: np.ndarray = x / divisor
    return y


@silently
def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """GELU's tanh form (https://arxiv.org/abs/1606.08415) in fp32."""
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    y: np.ndarray = np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))
    return y


ERFC_COEFFICIENTS = (
    -1.265511516,
    0.999970165,
    0.375623333,
    0.075997904,
    -0.031715727,
    -0.40881453,
    0.781948341,
    -1.892294622,
    2.789923472,
    -1.735114363,
    -0.198524433,
    0.907453326,
    -0.488992617,
    0.090051267,
)
"""A fit: ``erfc(z) = t exp(p(t) - z^2)`` with ``t = 1 / (1 + z / 2)`` for ``z >= 0``, within 2e-9 of its value."""


@silently
def gelu(x: np.ndarray) -> np.ndarray:
    """``x * P(N(0, 1) <= x)`` (https://arxiv.org/abs/1606.08415), computed in fp64 and returned in fp32."""
    z = np.abs(x.astype(np.float64)) / np.sqrt(2)
    t = 1 / (1 + z / 2)
    tail = t / 2 * np.exp(np.polynomial.polynomial.polyval(t, ERFC_COEFFICIENTS) - z * z)
    y: np.ndarray = (x * np.where(x < 0, tail, 1 - tail)).astype(np.float32)
    return y


def relu(x: np.ndarray) -> np.ndarray:
    """``max(x, 0)``."""
    y: np.ndarray = np.maximum(x, np.float32(0))
    return y


def relu_squared(x: np.ndarray) -> np.ndarray:
    """``max(x, 0)^2`` (https://arxiv.org/abs/2109.08668)."""
    y: np.ndarray = np.square(relu(x))
    return y


@silently
def softplus(x: np.ndarray) -> np.ndarray:
    """``log(1 + exp(x))`` in fp32."""
    y: np.ndarray = np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))
    return y


@silently
def xielu(x: np.ndarray, values: Xielu) -> np.ndarray:
    """The activation of ``values`` in fp32, whose operations round one by one."""
    positive, negative, beta, eps = map(np.float32, (values.positive, values.negative, values.beta, values.eps))
    slope = np.where(x > 0, positive * x * x, (np.expm1(np.minimum(x, eps)) - x) * negative)
    y: np.ndarray = slope + beta * x
    return y


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh, "relu": relu, "gelu": gelu, "relu_squared": relu_squared}
