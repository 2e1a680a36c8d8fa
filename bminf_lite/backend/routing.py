"""The router of a mixture of experts: which experts a token is given to, and with what weights.

The definition for all model families, bit for bit: given the logits, every device chooses the same experts and finds
the same weights. So each fp32 operation here rounds on its own, sums have one order, and the exponential
(:func:`portable_exp`) consists of additions and multiplications.

1. A logit becomes a score: its softmax over all experts, or its sigmoid.
2. Experts are ranked by score, of equals the lower number first. A correction bias is added to the scores for that
   alone. With groups, only experts of the best groups take part. Without both, experts are ranked by their logits,
   because a softmax and a sigmoid are increasing.
3. The scores of the ``top_k`` experts are their weights, in the order of the ranks: renormalised to a sum of 1 if asked
   for, and multiplied by factors. Some scores are those of chosen experts alone, which are then chosen by their logits.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .expert_values import CHOSEN_BY_LOGITS, GroupScore, MaskedScore, RouterSpec, Score
from .functions import silently

WEIGHT_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes of the types that weights can be rounded to."""
LANES = 32
"""Partial sums of a softmax's denominator: expert ``e`` belongs to part ``e % LANES``."""
MAX_EXPONENT = np.float32(87)
"""Arguments of the exponential are limited to this magnitude, within which its result is a normal fp32 number."""
LOG2_E = np.float32(1.44269504088896341)
LN_2_HIGH = np.float32(0.693359375)
"""The high part of ln 2 has 10 bits, so its products with integers up to 127 are exact."""
LN_2_LOW = np.float32(-2.12194440e-4)
EXP_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
"""``(exp(r) - 1 - r) / r^2`` for ``|r| <= ln(2) / 2``, highest power first: those of the Cephes library's ``expf``."""


@silently
def route(
    logits: np.ndarray,
    spec: RouterSpec,
    correction_bias: np.ndarray | None = None,
    expert_scale: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The experts of each token and their weights.

    ``logits`` fp32 ``[T, experts]`` -> ``topk_ids`` int32 ``[T, top_k]``, by rank, and ``topk_weights`` fp32 likewise.
    ``correction_bias`` fp32 ``[experts]`` only chooses (https://arxiv.org/abs/2408.15664); it is for scores of single
    experts, so not for ``CHOSEN_BY_LOGITS``. ``expert_scale`` fp32 ``[experts]`` multiplies the weights of an expert.

    Experts whose scores are NaN are ranked last, so that ``topk_ids`` are always numbers of different experts.
    """
    assert logits.dtype == np.float32 and logits.shape[1] == spec.num_experts
    assert correction_bias is None or spec.score not in CHOSEN_BY_LOGITS
    scores = {Score.SOFTMAX: softmax_over_experts, Score.SIGMOID: sigmoid}.get(spec.score, np.asarray)(logits)
    by_logit = correction_bias is None and not spec.has_groups
    keys = logits if by_logit else scores if correction_bias is None else scores + correction_bias
    ids = ranked(_mask_groups(ranking_keys(keys), spec) if spec.has_groups else ranking_keys(keys), spec.top_k)
    weights = np.take_along_axis(scores, ids, axis=1)
    if spec.score is Score.SOFTMAX_OF_CHOSEN:
        powers = portable_exp(weights - weights[:, :1])
        weights = powers / sum_by_rank(powers)
    if spec.score is Score.SPARSE_MIXER:
        weights = sparse_mixer(logits, ids, spec.closeness)
    if spec.renormalise:
        total = sum_by_rank(weights) + np.float32(spec.epsilon)
        weights = weights / np.where(total < np.float32(spec.min_sum), np.float32(spec.min_sum), total)
    weights = weights * np.float32(spec.scale)
    if expert_scale is not None:
        weights = weights * expert_scale[ids]
    return ids, weights.astype(WEIGHT_DTYPES[spec.weight_type]).astype(np.float32)


def ranking_keys(scores: np.ndarray) -> np.ndarray:
    """What experts are ranked by: the scores, with NaN below everything."""
    return np.where(np.isnan(scores), np.float32(-np.inf), scores)


def ranked(keys: np.ndarray, count: int) -> np.ndarray:
    """The columns of the largest keys of each row, of equals the first: ``[T, n]`` -> int32 ``[T, count]``."""
    return np.argsort(-keys, axis=1, kind="stable")[:, :count].astype(np.int32)


def _mask_groups(keys: np.ndarray, spec: RouterSpec) -> np.ndarray:
    """The keys of experts outside each token's best groups replaced by ``spec.masked``; ``[T, experts]``."""
    grouped = keys.reshape(len(keys), spec.num_groups, spec.group_size)
    largest = -np.sort(-grouped, axis=2)
    scores = largest[..., 0] + largest[..., 1] if spec.group_score is GroupScore.TOP_TWO else largest[..., 0]
    inside = np.zeros(scores.shape, bool)
    np.put_along_axis(inside, ranked(ranking_keys(scores), spec.top_groups), True, axis=1)
    masked = np.float32(-np.inf if spec.masked is MaskedScore.MINUS_INFINITY else 0)
    return np.where(inside[..., None], grouped, masked).reshape(keys.shape)


@silently
def portable_exp(x: np.ndarray) -> np.ndarray:
    """``exp(x)`` with the same bits on every device: fp32 -> fp32, within 2e-7 of its value; NaN stays NaN.

    ``x`` is limited to ``MAX_EXPONENT`` in magnitude. With ``n = rint(x log2(e))`` and ``r = x - n ln(2)``, which is
    nearly exact because ``ln(2)`` has two parts, the result is ``2^n (1 + r + r^2 p(r))``.
    """
    limited = np.where(x < -MAX_EXPONENT, -MAX_EXPONENT, np.where(x > MAX_EXPONENT, MAX_EXPONENT, x))
    n = np.rint(limited * LOG2_E)
    r = limited - n * LN_2_HIGH - n * LN_2_LOW
    p = np.full_like(r, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = p * r + coefficient
    y: np.ndarray = np.ldexp(p * (r * r) + r + np.float32(1), np.where(np.isnan(n), 0, n).astype(np.int32))
    return y


def sigmoid(x: np.ndarray) -> np.ndarray:
    """``1 / (1 + exp(-x))`` with the same bits on every device, fp32."""
    y: np.ndarray = np.float32(1) / (np.float32(1) + portable_exp(-x))
    return y


def softmax_over_experts(logits: np.ndarray) -> np.ndarray:
    """The softmax of each row with the same bits on every device: fp32 ``[T, experts]`` -> fp32 likewise."""
    powers = portable_exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: np.ndarray = powers / sum_over_experts(powers)
    return probabilities


def sparse_mixer(logits: np.ndarray, ids: np.ndarray, closeness: float) -> np.ndarray:
    """The weights of SparseMixer-v2 (https://arxiv.org/abs/2409.12136): of ``ids`` ``[T, top_k]`` by rank, fp32.

    The weight of a rank is the softmax of its logit ``l`` over the experts that no earlier rank has and whose logits
    ``x`` are close: ``(l - x) / max(|x|, l)`` is at most ``closeness``.
    """
    remaining, weights = np.ones(logits.shape, bool), np.empty(ids.shape, np.float32)
    for rank in range(ids.shape[1]):
        chosen = ids[:, rank : rank + 1]
        largest, magnitude = np.take_along_axis(logits, chosen, axis=1), np.abs(logits)
        distance = (largest - logits) / np.where(magnitude < largest, largest, magnitude)
        competes = remaining & ~(distance > np.float32(closeness))
        powers = np.where(competes, portable_exp(logits - largest), np.float32(0))
        weights[:, rank : rank + 1] = np.float32(1) / sum_over_experts(powers)
        np.put_along_axis(remaining, chosen, False, axis=1)
    return weights


def sum_over_experts(x: np.ndarray) -> np.ndarray:
    """The sum of each row in one order: fp32 ``[T, experts]`` -> fp32 ``[T, 1]``.

    Elements ``LANES`` apart are added one after another, and the ``LANES`` sums in a tree: those 16 apart, then 8, 4, 2
    and 1 apart.
    """
    rows, columns = x.shape
    padded = np.pad(x, ((0, 0), (0, -columns % LANES))).reshape(rows, -1, LANES)
    total = padded[:, 0]
    for part in range(1, padded.shape[1]):
        total = total + padded[:, part]
    while total.shape[1] > 1:
        first, second = np.split(total, 2, axis=1)
        total = first + second
    return total


def sum_by_rank(weights: np.ndarray) -> np.ndarray:
    """The sum of each row, from its first element on: fp32 ``[T, top_k]`` -> fp32 ``[T, 1]``."""
    total = weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total = total + weights[:, rank : rank + 1]
    return total
