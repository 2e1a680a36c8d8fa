"""T5's bias on attention scores (https://arxiv.org/abs/1910.10683): a number per head and bucket of distances.

Short distances have a bucket each, longer ones share buckets that grow with the logarithm of the distance. The fp32
steps are those of transformers, so that a distance at the border of two buckets falls into the same one.
"""

from __future__ import annotations

import math

import numpy as np

from ..backend.base import Backend
from ..backend.communicator import shard
from ..backend.values import RelativeBias
from .loading import Weights


def load_relative_bias(
    ops: Backend, weights: Weights, name: str, bidirectional: bool, max_distance: int
) -> RelativeBias:
    """The bias whose table is ``{name}.weight`` ``[buckets, heads]``, by distance instead of bucket.

    Of several ranks, each has its part of the heads.
    """
    table = np.asarray(weights.vector(f"{name}.weight"), np.float32)
    table = table[:, shard(table.shape[1], ops.communicator)]
    distances = np.arange(-max_distance, max_distance + 1)
    values = table[relative_position_bucket(distances, bidirectional, len(table), max_distance)]
    return RelativeBias(ops.array(np.ascontiguousarray(values.T)), max_distance)


def relative_position_bucket(distances: np.ndarray, bidirectional: bool, buckets: int, max_distance: int) -> np.ndarray:
    """The bucket of each distance ``key - query`` in tokens, int ``[n]``.

    ``bidirectional``: the second half of the buckets is for keys after the query. Otherwise those count as distance 0.
    """
    first = np.zeros_like(distances)
    if bidirectional:
        buckets //= 2
        first[distances > 0] = buckets
        distances = np.abs(distances)
    else:
        distances = np.maximum(-distances, 0)
    exact = buckets // 2
    ratio = np.maximum(distances, exact).astype(np.float32) / np.float32(exact)
    steps = np.log(ratio) / np.float32(math.log(max_distance / exact)) * np.float32(buckets - exact)
    far = np.minimum(exact + steps.astype(np.int64), buckets - 1)
    return first + np.where(distances < exact, distances, far)
