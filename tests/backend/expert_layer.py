"""A layer of experts whose weights are one array each, with which mixtures and kernels are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bminf_lite.backend.expert_values import ExpertActivation
from bminf_lite.backend.experts import ExpertWeights, activated, expert_linear, rounded, weighted_sum


@dataclass(frozen=True)
class ExpertLayer:
    """A feed-forward layer of experts: two products with an activation between them."""

    hidden: ExpertWeights
    down: ExpertWeights
    activation: ExpertActivation
    scales_input: bool = False
    """Whether the weights of the experts multiply their inputs, not their results (Llama 4)."""


def experts_forward(
    x: np.ndarray,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    layer: ExpertLayer,
    activation_dtype: np.dtype | type = np.float32,
) -> np.ndarray:
    """The layer of each token's experts: float ``[T, in]`` -> fp32 ``[T, out]``.

    ``topk_ids`` int32 and ``topk_weights`` fp32 are ``[T, top_k]``. Between operations values are rounded to
    ``activation_dtype``, the pairs' results included; those of a token are then added by :func:`weighted_sum`.
    """
    dtype = np.dtype(activation_dtype)
    experts, pairs = topk_ids.ravel(), np.repeat(x, topk_ids.shape[1], axis=0)
    factors = topk_weights.ravel() if layer.scales_input else None
    product = rounded(expert_linear(pairs, experts, layer.hidden, factors, dtype), dtype)
    hidden = rounded(activated(product.astype(np.float32), layer.activation), dtype)
    results = rounded(expert_linear(hidden, experts, layer.down, None, dtype), dtype)
    weights = np.ones_like(topk_weights) if layer.scales_input else topk_weights
    return weighted_sum(results.astype(np.float32).reshape(*topk_ids.shape, -1), weights)
