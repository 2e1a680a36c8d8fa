"""Products with the weights of experts: the definition over NumPy.

Each token of a step is multiplied by the weights of the experts that its router chose (:mod:`.routing`). A token and
one of its ``top_k`` experts are a pair; pair ``t * top_k + j`` is token ``t`` with its expert of rank ``j``. A pair's
result is a function of its token and its expert, and a token's result adds those of its pairs in the order of the
ranks. So no bit depends on the other tokens of a step.

Weights are ``[experts, out, in]``. Those of a gated layer hold the rows of the gate and then those of up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .expert_values import ExpertActivation
from .functions import ACTIVATIONS, silently
from .quantization import quantize_rows
from .rotation import rotated


@dataclass(frozen=True)
class ExpertWeights:
    """One matrix of each expert.

    ``values`` holds fp32 weights ``[experts, out, in]``, or int8 codes with ``scale`` fp32 ``[experts, out]``.
    ``dynamic``: activations are quantized too, per pair (w8a8). ``bias`` is fp32 ``[experts, out]``. ``rotation`` is
    the block of the inputs' transform, see :mod:`.rotation`.
    """

    values: np.ndarray
    scale: np.ndarray | None = None
    bias: np.ndarray | None = None
    dynamic: bool = False
    rotation: int = 1

    @property
    def num_experts(self) -> int:
        return int(self.values.shape[0])

    @property
    def out_features(self) -> int:
        return int(self.values.shape[1])

    @property
    def in_features(self) -> int:
        return int(self.values.shape[2])


def sort_by_expert(topk_ids: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of a step in the order of their experts: int32 ``[T, top_k]`` -> ``sorted_pairs``, ``expert_offsets``.

    ``sorted_pairs`` int32 ``[T * top_k]`` are the pairs' numbers; those of one expert stay in order. Expert ``e`` has
    ``sorted_pairs[expert_offsets[e]:expert_offsets[e + 1]]``; ``expert_offsets`` is int32 ``[num_experts + 1]``.
    """
    experts = topk_ids.ravel()
    counts = np.bincount(experts, minlength=num_experts)
    return np.argsort(experts, kind="stable").astype(np.int32), np.cumsum([0, *counts]).astype(np.int32)


@silently
def activated(x: np.ndarray, activation: ExpertActivation) -> np.ndarray:
    """fp32 ``[P, 2 * features]``, gate and then up, or ``[P, features]`` -> fp32 ``[P, features]``."""
    function = ACTIVATIONS[activation.function]
    if not activation.gated:
        return function(x)
    gate, up = np.split(x, 2, axis=1)
    if activation.limit is None:
        product: np.ndarray = function(gate) * up
        return product
    limit = np.float32(activation.limit)
    gate = np.where(gate > limit, limit, gate)
    up = np.where(up > limit, limit, np.where(up < -limit, -limit, up))
    power = np.exp(np.float32(-activation.alpha) * gate)
    y: np.ndarray = gate / (np.float32(1) + power) * (up + np.float32(1))
    return y


@silently
def weighted_sum(results: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """``sum_j weights[t, j] * results[t, j]`` in fp32: ``[T, top_k, out]``, ``[T, top_k]`` -> ``[T, out]``.

    From rank 0 on; each product and each sum is rounded on its own.
    """
    total: np.ndarray = weights[:, 0, None] * results[:, 0]
    for rank in range(1, weights.shape[1]):
        total = total + weights[:, rank, None] * results[:, rank]
    return total


@silently
def expert_linear(
    x: np.ndarray,
    experts: np.ndarray,
    weights: ExpertWeights,
    factors: np.ndarray | None = None,
    activation_dtype: np.dtype | type = np.float32,
) -> np.ndarray:
    """``x[p] @ weights[experts[p]].T + bias`` of each pair: float ``[P, in]``, int ``[P]`` -> fp32 ``[P, out]``.

    As in ``Backend.linear``: with int8 weights and dynamic activations, ``x`` is quantized per pair, and ``y = s_x *
    (s_w * fp32(acc))`` with the exact integer sum ``acc``; without, ``y = s_w * sum(code * x)``. The bias comes last.
    ``factors`` fp32 ``[P]`` multiply the inputs: the scales of quantized rows, else the rows, which are then rounded to
    ``activation_dtype``.
    """
    if weights.rotation > 1:
        x = rotated(x, weights.rotation)
    if weights.dynamic:
        codes, scale = quantize_rows(x)
        return expert_linear_codes(codes, scale if factors is None else scale * factors, experts, weights)
    x = x.astype(np.float32) if factors is None else x.astype(np.float32) * factors[:, None]
    x = rounded(x, np.dtype(activation_dtype)).astype(np.float32)
    y = np.empty((len(x), weights.out_features), np.float32)
    for expert, rows in rows_by_expert(experts):
        y[rows] = x[rows] @ weights.values[expert].astype(np.float32).T
        if weights.scale is not None:
            y[rows] *= weights.scale[expert]
        if weights.bias is not None:
            y[rows] += weights.bias[expert]
    return y


@silently
def expert_linear_codes(
    codes: np.ndarray, scale: np.ndarray, experts: np.ndarray, weights: ExpertWeights
) -> np.ndarray:
    """:func:`expert_linear` of quantized rows: int8 ``[P, in]`` with fp32 ``[P]`` -> fp32 ``[P, out]``."""
    assert weights.scale is not None
    y = np.empty((len(codes), weights.out_features), np.float32)
    for expert, rows in rows_by_expert(experts):
        # fp64 holds the sum of 2^39 products of codes exactly
        acc = (codes[rows].astype(np.float64) @ weights.values[expert].astype(np.float64).T).astype(np.float32)
        y[rows] = scale[rows, None] * (weights.scale[expert] * acc)
        if weights.bias is not None:
            y[rows] += weights.bias[expert]
    return y


def rows_by_expert(experts: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The experts that pairs have, and the pairs of each, in order."""
    for expert in np.unique(experts):
        yield int(expert), np.flatnonzero(experts == expert)


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``x`` in ``dtype``; too large numbers become infinities."""
    with np.errstate(over="ignore"):
        return x.astype(dtype, copy=False)
