"""RMSNorm (https://arxiv.org/abs/1910.07467) and LayerNorm (https://arxiv.org/abs/1607.06450)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..backend.base import Backend
from ..backend.values import Array, Norm
from .loading import Weights


@dataclass(frozen=True)
class NormLayer:
    """A norm of the residual stream."""

    ops: Backend
    norm: Norm

    def __call__(self, residual: Array) -> Array:
        """fp32 ``[T, features]`` -> ``[T, features]``."""
        return self.ops.norm(residual, self.norm)


def rms_norm(
    ops: Backend, weights: Weights, name: str, eps: float, scale: float | np.ndarray = 1.0, offset: float = 0.0
) -> NormLayer:
    """``x / sqrt(mean(x^2) + eps) * (weight + offset) * scale``, with the weight ``{name}.weight`` ``[features]``.

    ``scale`` is one number, or fp32 ``[features]``.
    """
    return NormLayer(ops, Norm(ops.vector(norm_gain(weights, name, scale, offset)), eps))


def norm_gain(weights: Weights, name: str, scale: float | np.ndarray = 1.0, offset: float = 0.0) -> np.ndarray:
    """``(weight + offset) * scale`` of :func:`rms_norm`, ``[features]``."""
    weight = weights.vector(f"{name}.weight")
    if offset != 0 or np.any(scale != 1.0):
        weight = (weight.astype(np.float32) + np.float32(offset)) * np.asarray(scale, np.float32)
    return weight


def balanced_gains(query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gains ``[head_dim]`` of norms of query and key heads, fp32, with equal magnitudes for each rotary pair.

    What one loses the other gets, so scores stay the same. An int8 cache has one step for a head's keys, and the error
    of a score is that step times the query: both are then smallest together.
    """
    factors = balancing_factors(query, key)
    return query.astype(np.float32) * factors, key.astype(np.float32) / factors


def balancing_factors(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """What :func:`balanced_gains` multiplies the gain of queries by and divides that of keys by, fp32 ``[head_dim]``.

    Of pairs ``i`` and ``i + head_dim / 2`` the squares are added. A factor is within 16 times that of the median pair.
    """
    query, key = (np.asarray(gain).astype(np.float32) for gain in (query, key))
    whole = np.ones(len(query), np.float32)
    if len(query) % 2:
        return whole
    squares = [np.square(gain).reshape(2, -1).sum(axis=0) for gain in (query, key)]
    used = (squares[0] > 0) & (squares[1] > 0)
    if not used.any():
        return whole
    factors = np.ones(len(used), np.float32)
    factors[used] = (squares[1][used] / squares[0][used]) ** 0.25
    return np.tile(np.clip(factors / np.median(factors[used]), 1 / 16, 16).astype(np.float32), 2)


def layer_norm(
    ops: Backend,
    weights: Weights,
    name: str,
    eps: float,
    scale: float = 1.0,
    offset: float = 0.0,
    has_bias: bool = True,
) -> NormLayer:
    """``((x - mean(x)) / sqrt(var(x) + eps) * (weight + offset) + bias) * scale``.

    ``{name}.weight`` and ``{name}.bias`` are ``[features]``. Without a bias there are zeros in its place.
    """
    weight = weights.vector(f"{name}.weight").astype(np.float32) + np.float32(offset)
    bias = weights.vector(f"{name}.bias").astype(np.float32) if has_bias else np.zeros_like(weight)
    weight, bias = weight * np.float32(scale), bias * np.float32(scale)
    return NormLayer(ops, Norm(ops.vector(weight), eps, ops.vector(bias), center=True))
