"""Static factors per channel for keys, for the sake of an int8 cache.

The cache has one scale per token and head (``quantize_heads``), so an element that is always large costs the others
their precision, also behind the transform of heads (``rotated_heads``). A factor per element divides the keys and
multiplies the queries, which leaves every score as it is. It is folded into the rows of the two matrices, so it costs
nothing. Elements that rotary positions rotate against each other have the same factor. Factors are powers of two: the
float model keeps every bit, and of int8 matrices only scales change. They are static because a token's codes must not
depend on what else is in the cache.

For each head, ``factor = (a / median(a))^e`` with ``a`` the largest magnitude of the element (of a pair, the root of
the sum of squares), and ``e`` the one of :data:`EXPONENTS` with the smallest mean square error of scores.
"""

from __future__ import annotations

import numpy as np

from ..backend.quantization import quantize_heads
from ..backend.rotation import rotated_heads
from ..checkpoint.weight_rewrite import WeightRewrite
from ..models.spec import KeyHeads, Spec
from .smoothing import along

EXPONENTS = (0.25, 0.5, 0.75, 1.0)
GAIN = 0.1
"""The least relative reduction of the error: a smaller one may be chance."""
MAX_SHIFT = 6
"""Factors lie between ``2**-MAX_SHIFT`` and ``2**MAX_SHIFT``, so queries stay far from fp16's limits."""


def key_factors(keys: np.ndarray, queries: np.ndarray, heads: KeyHeads) -> np.ndarray:
    """What divides the keys, fp32 ``[kv_heads, head_dim]``.

    ``keys`` fp32 ``[T, kv_heads * head_dim]`` and ``queries`` fp32 ``[T, kv_heads * group * head_dim]`` are those of
    the same tokens, before their rotation.
    """
    head_dim = len(heads.pairs)
    k = keys.reshape(len(keys), -1, head_dim)
    q = queries.reshape(len(queries), -1, heads.group, head_dim)
    pairs = np.eye(max(heads.pairs) + 1, dtype=np.float32)[list(heads.pairs)]  # [head_dim, pairs]
    size = np.sqrt(((k * k) @ pairs).max(axis=0))
    weight = np.mean((q * q) @ pairs, axis=(0, 2))
    return np.stack([_of_head(k[:, h], size[h], weight[h], pairs) for h in range(k.shape[1])])


def _of_head(k: np.ndarray, size: np.ndarray, weight: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """The factors of a head, fp32 ``[head_dim]``, from its keys fp32 ``[T, head_dim]``.

    ``size`` and ``weight`` fp32 ``[pairs]`` are the largest magnitude of each pair of elements in keys, and the mean
    square in queries.
    """
    best = np.ones(k.shape[1], np.float32)
    used = size > 0
    if not used.any():
        return best
    least = (1 - GAIN) * _score_error(k, best, pairs @ weight)
    shift = np.zeros(len(size))
    shift[used] = np.log2(size[used] / np.median(size[used]))
    for exponent in EXPONENTS:
        factors = np.exp2(np.clip(np.rint(exponent * shift), -MAX_SHIFT, MAX_SHIFT)).astype(np.float32)
        error = _score_error(k, pairs @ factors, pairs @ weight)
        if error < least:
            best, least = pairs @ factors, error
    return best


def _score_error(k: np.ndarray, factors: np.ndarray, weight: np.ndarray) -> float:
    """The mean square error of scores, up to a constant, of keys divided by ``factors`` in int8."""
    turned = rotated_heads(k / factors)
    codes, scale = quantize_heads(turned)
    error = rotated_heads(scale.astype(np.float32)[:, None] * codes - turned) * factors
    return float(np.mean((error * error) @ weight))


def fold_key_factors(spec: Spec, heads: KeyHeads, factors: np.ndarray) -> dict[str, WeightRewrite]:
    """The rewrite of each tensor of the two matrices, for ``factors`` fp32 ``[kv_heads, head_dim]``."""
    of_queries = np.repeat(factors, heads.group, axis=0).reshape(-1)
    rewrites = {name: along(spec.parameters[name], 0, 1 / factors.reshape(-1)) for name in heads.key}
    return rewrites | {name: along(spec.parameters[name], 0, of_queries) for name in heads.query}
