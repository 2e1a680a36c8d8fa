"""Predicts the time of a decode step on a GPU from what the step reads and launches.

A step reads the weights, and the keys and values of each sequence. The terms that are not bytes over bandwidth:

- with several rows, each row adds a share of the time in which the weight is read; rows come in whole tiles;
- a kernel takes a while to start and to end, and a norm delays the product that follows it;
- logits are written and read a few times.

The prediction knows a GPU by its memory bandwidth alone. The constants were fitted to measurements on an H200; they do
not describe GPUs whose int8 products are slow beside their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cuda.kernels.constants import SKINNY_HOPPER_TILES
from .cache_memory import CacheGroup

WEIGHT_FACTOR = 1.07
"""The time of a product of one row, relative to its weight's bytes over bandwidth."""
ROW_FACTOR = 0.0045
"""What a further row adds to that factor."""
CACHE_FACTOR = {False: 1.1, True: 1.3}
"""The time of attention relative to the cache's bytes over bandwidth; True for an int8 cache, which it dequantizes."""
LAUNCH_SECONDS = 0.95e-6
"""Seconds between the end of a kernel's work and the start of the next one's."""
NORM_SECONDS = 1.3e-6
"""Seconds that a vector of a norm adds to each product that applies it: the row passes through it first."""


@dataclass(frozen=True)
class DecodeWork:
    """What a decode step of a model reads and launches.

    - ``matrix_bytes``: the weights that it reads, in bytes, embedding tables left out;
    - ``launches``: the products and attentions of all layers;
    - ``norm_vectors``: the vectors that products apply in all layers, two for a LayerNorm; those of a norm that two
      products share count twice;
    - ``logit_bytes``: bytes that are moved for the logits of a sequence.
    """

    matrix_bytes: int
    launches: int
    norm_vectors: int
    logit_bytes: int

    def seconds(self, cache: Sequence[CacheGroup], context: int, batch: int, bandwidth: float) -> float:
        """Seconds of a step of ``batch`` sequences behind ``context`` tokens; ``bandwidth`` in bytes per second."""
        rows = tiled_rows(batch) if batch > 1 else 0
        weights = self.matrix_bytes * (WEIGHT_FACTOR + ROW_FACTOR * rows)
        read = sum(group.token_bytes * group.tokens_read(context) * CACHE_FACTOR[group.is_int8] for group in cache)
        overheads = self.launches * LAUNCH_SECONDS + self.norm_vectors * NORM_SECONDS
        return (weights + batch * (read + self.logit_bytes)) / bandwidth + overheads


def tiled_rows(rows: int) -> int:
    """``rows`` rounded up to a tile of the skinny kernel; ``rows`` itself if that exceeds the largest tile."""
    return next((8 * tiles for tiles in SKINNY_HOPPER_TILES if rows <= 8 * tiles), rows)
