"""Attention to latent rows over NumPy: how queries absorb the keys' matrix, and how rows are stored and read.

With the matrices ``K_h`` ``[nope_dim, rank]`` and ``V_h`` ``[value_dim, rank]`` of head ``h``, the score of a query
``q`` for a token with the latent ``c`` is ``q . (K_h c) = (K_h^T q) . c``, and the mean of the values ``V_h c`` is
``V_h`` times the mean of the latents. Prompts and decoded tokens are both computed in this form, so a token has the
same bits however a prompt is cut. Sums over keys have the order of :mod:`.attention`, in which the latent rows are one
head of keys that all query heads share, and their first ``rank`` elements are its values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cache_values import LatentCache
from .functions import normalise, rotate
from .quantization import HostWeight, Int8Weight, quantize_heads
from .rotation import rotated
from .values import BLOCK_SIZE, LatentSpec, PositionScale


@dataclass(frozen=True)
class NumpyLatentWeight:
    """The matrices of all heads: ``keys`` fp32 ``[heads, nope_dim, rank]``, ``values`` ``[heads, rank, value_dim]``."""

    keys: np.ndarray
    values: np.ndarray


def float_matrix(matrix: HostWeight) -> np.ndarray:
    """A matrix fp32 ``[out, in]``. An int8 one becomes ``scale * code``, without the transform of its inputs."""
    if isinstance(matrix, Int8Weight):
        return rotated(matrix.dequantize(), matrix.rotation)
    return np.asarray(matrix).astype(np.float32)


def split_heads(matrix: np.ndarray, spec: LatentSpec) -> tuple[np.ndarray, np.ndarray]:
    """``[heads * (nope_dim + value_dim), rank]``, a head's keys before its values, as ``[heads, …, rank]`` of each."""
    by_head = matrix.reshape(spec.heads, spec.nope_dim + spec.value_dim, spec.rank)
    return by_head[:, : spec.nope_dim], by_head[:, spec.nope_dim :]


def by_token_and_head(x: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """``[T, heads, K]`` times ``[heads, K, N]``: a product of one shape for each token and head, fp32."""
    found: np.ndarray = (x[:, :, None].astype(np.float32) @ matrices)[:, :, 0]
    return found


def position_factors(scale: PositionScale | None, positions: np.ndarray) -> np.ndarray:
    """The factor on the queries at ``positions`` ``[T]``: fp32 ``[T]``."""
    if scale is None:
        return np.ones(len(positions), np.float32)
    passed = (positions // scale.original).astype(np.float32)
    factors: np.ndarray = np.float32(1) + np.float32(scale.beta) * np.log(np.float32(1) + passed)
    return factors


def latent_queries(q: np.ndarray, keys: np.ndarray, spec: LatentSpec, positions: np.ndarray) -> np.ndarray:
    """Queries that meet latent rows: ``[T, spec.query_features]`` -> fp32 ``[T, heads, row_dim]``, not rounded."""
    heads = q.astype(np.float32).reshape(len(q), spec.heads, spec.nope_dim + spec.rope_dim)
    content, rest = heads[..., : spec.nope_dim], heads[..., spec.nope_dim :]
    found = np.concatenate([by_token_and_head(content, keys), rotate(rest, positions, spec.rope)], axis=-1)
    found *= position_factors(spec.position_scale, positions)[:, None, None]
    return found


def latent_rows(kv: np.ndarray, spec: LatentSpec, positions: np.ndarray) -> np.ndarray:
    """The rows of tokens, fp32 ``[T, row_dim]``: the latent normalised, the key rotated."""
    kv = kv.astype(np.float32)
    latent, key = kv[:, : spec.rank], kv[:, spec.rank :]
    return np.concatenate([normalise(latent, spec.norm), rotate(key[:, None], positions, spec.rope)[:, 0]], axis=-1)


def store_rows(cache: LatentCache, table: np.ndarray, first: int, rows: np.ndarray, rank: int) -> None:
    """Store the rows ``[n, row_dim]`` of a sequence with block table ``[W]``: its tokens from ``first`` on."""
    position = np.arange(first, first + len(rows))
    block, place = table[position // BLOCK_SIZE], position % BLOCK_SIZE
    if cache.scales is None:
        cache.rows[block, place] = rows
        return
    for number, part in enumerate((slice(0, rank), slice(rank, None))):
        cache.rows[block, place, part], cache.scales[block, place, number] = quantize_heads(rows[:, part])


def cached_rows(
    cache: LatentCache, table: np.ndarray, tokens: int, rank: int, dtype: np.typing.DTypeLike
) -> np.ndarray:
    """The first ``tokens`` rows of a sequence with block table ``[W]``: ``[tokens, row_dim]``.

    int8 ones become ``scale * code``, rounded to ``dtype``.
    """
    blocks = table[: -(-tokens // BLOCK_SIZE)]
    found: np.ndarray = cache.rows[blocks].reshape(-1, cache.rows.shape[-1])[:tokens]
    if cache.scales is None:
        return found
    scales = cache.scales[blocks].reshape(-1, 2)[:tokens].astype(np.float32)
    factors = np.repeat(scales, (rank, found.shape[1] - rank), axis=1)
    return (factors * found.astype(np.float32)).astype(dtype)
