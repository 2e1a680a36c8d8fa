"""Attention over NumPy, with the order of sums that every kernel follows.

The result of a query depends on its own sequence alone: not on the other queries of the step, nor on how the keys are
shared between processors. Keys are therefore taken in tiles and segments at fixed positions. Within a segment the tiles
are summed in order, relative to the largest score so far (online softmax, https://arxiv.org/abs/1805.02867); each
segment starts anew, and the segments are merged in order. So different processors may take different segments.

BLAS chooses the order of a sum by the shapes of a product. So every product here has one shape: the heads of one query
that share keys, and one tile of keys, which is filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cache_values import LayerCache
from .functions import soft_capped
from .values import BLOCK_SIZE, SEGMENT, LinearBias, RelativeBias

TILE = 128
"""Keys of a tile. Kernels for large heads have shorter tiles."""
LANES = 8
"""The weights of a tile are summed in this many parts: key ``j`` belongs to part ``j % LANES``."""
LOG2_E = np.float32(np.log2(np.e))


@dataclass
class PartialResult:
    """Attention over some keys: ``out / total`` is the weighted mean of their values.

    ``top`` is the largest score to the base 2, ``[kv_heads, rows]``, and weights are ``2**(score - top)``. ``total`` is
    the sum of the weights, of the same shape; ``out`` ``[kv_heads, rows, head_dim]`` is that of the weighted values.
    """

    top: np.ndarray
    total: np.ndarray
    out: np.ndarray


def cached(
    cache: LayerCache, table: np.ndarray, tokens: int, dtype: np.typing.DTypeLike
) -> tuple[np.ndarray, np.ndarray]:
    """The first keys and values of a sequence with block table ``[W]``, each ``[kv_heads, tokens, head_dim]``.

    int8 ones become ``scale * code``, rounded to ``dtype``.
    """
    blocks = table[: -(-tokens // BLOCK_SIZE)]

    def gathered(pool: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
        found: np.ndarray = pool[blocks].swapaxes(0, 1)
        if scales is not None:
            factors = scales[blocks].swapaxes(0, 1)[..., None].astype(np.float32)
            found = (factors * found.astype(np.float32)).astype(dtype)
        return found.reshape(found.shape[0], -1, found.shape[-1])[:, :tokens]

    return gathered(cache.keys, cache.key_scales), gathered(cache.values, cache.value_scales)


def attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    scale: float,
    context_len: int = 0,
    window: int | None = None,
    bias: RelativeBias | LinearBias | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    tile: int = TILE,
    segment: int = SEGMENT,
    weight_dtype: np.typing.DTypeLike = np.float32,
) -> np.ndarray:
    """One sequence's attention; sums are fp32, and the weights are rounded to ``weight_dtype`` before the last product.

    ``q`` is ``[n, heads, head_dim]`` at positions ``context_len..context_len+n``; ``keys`` are ``[kv_heads, total,
    head_dim]`` and ``values`` ``[kv_heads, total, size]``. A query sees all of them, or with ``causal`` those up to its
    own position, and of these the ones within the window: less than ``window`` tokens away. ``bias``, ``softcap`` and
    ``sinks``: see :class:`.values.AttentionSpec`; a sink is merged behind the last segment. ``segment`` is a multiple
    of ``tile``. Returns fp32 ``[n, heads, size]``.
    """
    assert causal or (softcap is None and not isinstance(bias, LinearBias))
    n, heads, head_dim = q.shape
    if causal and n > tile:  # queries in pieces, each with the keys up to its last position alone
        return np.concatenate(
            [
                attend(
                    q[first : first + tile], keys[:, :end], values[:, :end], scale, context_len + first, window, bias,
                    causal, softcap, sinks, tile, segment, weight_dtype,
                )
                for first in range(0, n, tile)
                for end in [context_len + first + tile]
            ]
        )  # fmt: skip
    kv_heads, total, _ = keys.shape
    group = heads // kv_heads
    rows = np.ascontiguousarray(q.reshape(n, kv_heads, group, head_dim).swapaxes(0, 1), np.float32)
    query = context_len + np.arange(n)[:, None]

    def scores_of(first: int, last: int) -> np.ndarray:
        """Scores to the base 2 of a range of keys, ``[kv_heads, rows, keys]``; -inf where a query does not see one."""
        tiles = [products(rows, _tile(keys[:, :last], at, tile).swapaxes(1, 2)) for at in range(first, last, tile)]
        found = np.concatenate(tiles, axis=-1)[..., : last - first].swapaxes(1, 2).reshape(kv_heads, -1, last - first)
        if softcap is None:
            found *= np.float32(np.float32(scale) * LOG2_E)
        else:
            found = soft_capped(found * np.float32(scale), softcap) * LOG2_E
        key = np.arange(first, last)
        if bias is not None:
            found = found + biases(bias, key - query).reshape(found.shape) * LOG2_E
        if causal or window is not None:
            seen = key <= query if causal else np.full((n, last - first), True)
            if window is not None:
                seen = seen & (key > query - window) & (key < query + window)
            np.copyto(found.reshape(kv_heads, group, n, last - first), -np.inf, where=~seen)
        return found

    merged: PartialResult | None = None
    for first in range(0, total, segment):
        last = min(first + segment, total)
        part = segment_result(scores_of(first, last), values[:, first:last], group, tile, weight_dtype)
        merged = part if merged is None else merge(merged, part)
    if merged is None:
        return np.zeros((n, heads, values.shape[-1]), np.float32)
    if sinks is not None:
        top = np.repeat(np.asarray(sinks, np.float32).reshape(kv_heads, group) * LOG2_E, n, axis=1)
        merged = merge(merged, PartialResult(top, np.ones_like(top), np.zeros_like(merged.out)))
    out = merged.out / np.where(merged.total == 0, np.float32(1), merged.total)[..., None]
    size = values.shape[-1]
    return out.reshape(kv_heads, group, n, size).transpose(2, 0, 1, 3).reshape(n, heads, size)


def biases(bias: RelativeBias | LinearBias, distance: np.ndarray) -> np.ndarray:
    """The bias of each head for distances ``key - query`` ``[n, keys]``: fp32 ``[heads, n, keys]``."""
    if isinstance(bias, LinearBias):
        return np.asarray(bias.slopes)[:, None, None] * distance.astype(np.float32)
    clipped = np.clip(distance, -bias.max_distance, bias.max_distance)
    return np.asarray(bias.values)[:, clipped + bias.max_distance]


def products(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """``[kv_heads, n, group, K]`` times ``[kv_heads, K, N]``, a product for each of the ``n`` queries."""
    found: np.ndarray = rows @ matrix[:, None]
    return found


def _tile(values: np.ndarray, first: int, tile: int) -> np.ndarray:
    """``tile`` keys or values from the ``first`` on, fp32 ``[kv_heads, tile, head_dim]``, zeros behind the last."""
    part = values[:, first : first + tile]
    found = np.zeros((part.shape[0], tile, part.shape[2]), np.float32)
    found[:, : part.shape[1]] = part
    return found


def segment_result(
    scores: np.ndarray, values: np.ndarray, group: int, tile: int, weight_dtype: np.typing.DTypeLike
) -> PartialResult:
    """The result of one segment: ``scores`` ``[kv_heads, rows, keys]``, ``values`` ``[kv_heads, keys, head_dim]``.

    The rows are those of each of ``group`` heads, all queries of the first and so on.
    """
    kv_heads, rows, count = scores.shape
    top = np.full((kv_heads, rows), -np.inf, np.float32)
    lanes = np.zeros((kv_heads, rows, LANES), np.float32)
    out = np.zeros((kv_heads, rows, values.shape[-1]), np.float32)
    for first in range(0, count, tile):
        part = scores[..., first : first + tile]
        new_top = np.maximum(top, part.max(axis=-1))
        factor, weights = weights_of(top, new_top), weights_of(part, new_top[..., None])
        num_parts = -(-part.shape[-1] // LANES)
        padded = _filled(weights, num_parts * LANES)
        lanes = lanes * factor[..., None] + padded.reshape(kv_heads, rows, num_parts, LANES).sum(axis=2)
        rounded = np.zeros((kv_heads, rows // group, group, tile), np.float32)
        by_group = weights.astype(weight_dtype, copy=False).reshape(kv_heads, group, rows // group, part.shape[-1])
        rounded[..., : part.shape[-1]] = by_group.swapaxes(1, 2)
        added = products(rounded, _tile(values, first, tile))
        out = out * factor[..., None] + added.swapaxes(1, 2).reshape(out.shape)
        top = new_top
    while lanes.shape[-1] > 1:  # neighbours first
        lanes = lanes[..., ::2] + lanes[..., 1::2]
    return PartialResult(top, lanes[..., 0], out)


def _filled(values: np.ndarray, columns: int) -> np.ndarray:
    """fp32 ``[kv_heads, rows, keys]`` with zeros behind the last key up to ``columns``: itself if it has as many."""
    if values.shape[-1] == columns:
        return values
    found = np.zeros((*values.shape[:-1], columns), np.float32)
    found[..., : values.shape[-1]] = values
    return found


def merge(left: PartialResult, right: PartialResult) -> PartialResult:
    """The result over the keys of both."""
    top = np.maximum(left.top, right.top)
    a, b = weights_of(left.top, top), weights_of(right.top, top)
    total = left.total * a + right.total * b
    return PartialResult(top, total, left.out * a[..., None] + right.out * b[..., None])


def weights_of(scores: np.ndarray, top: np.ndarray) -> np.ndarray:
    """``2**(scores - top)``, where ``top`` is the largest or more; 0 for scores of -inf, also where all of them are."""
    weights: np.ndarray = np.exp2(scores - np.where(np.isneginf(top), np.float32(0), top))
    return weights
