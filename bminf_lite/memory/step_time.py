"""Predicts the time of a decode step on a GPU from what the step reads and launches.

A step reads the weights, and the keys and values of each sequence. The terms that are not bytes over bandwidth:

- each row beyond the first adds to a product a share of the time in which the weight is read, in whole tiles of rows;
- a kernel takes a while to start and to end, and a norm delays the product that follows it;
- logits are written and read a few times.

All shares are relative to the bandwidth, so the only fact about a GPU is how fast it reads its memory. They were fitted
to measurements on an H200, and GPUs whose int8 products are slow beside their memory are not described.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cuda.kernels.constants import SKINNY_HOPPER_TILES
from .cache_memory import CacheGroup

WEIGHT_SECONDS = 1.07
"""Seconds in which a product of one row reads its weight, of those of bytes over bandwidth."""
ROW_SECONDS = 0.0045
"""Seconds that a further row of a product takes, of those in which the weight is read."""
CACHE_SECONDS = {False: 1.1, True: 1.3}
"""Seconds in which attention reads the cache, of those of bytes over bandwidth: fp16, and int8 codes, which it has to
dequantize."""
LAUNCH_SECONDS = 1.0e-6
"""Seconds between the end of a kernel's work and the start of the next one's."""
NORM_SECONDS = 2.0e-6
"""Seconds that a vector of a norm adds: a row passes through it between two products."""


@dataclass(frozen=True)
class DecodeWork:
    """What a decode step of a model reads and launches.

    - ``matrix_bytes``: the weights that it reads, in bytes, embedding tables left out;
    - ``launches``: the products and attentions of all layers;
    - ``norm_vectors``: the vectors of all layers' norms, two for a LayerNorm;
    - ``logit_bytes``: bytes that are moved for the logits of a sequence.
    """

    matrix_bytes: int
    launches: int
    norm_vectors: int
    logit_bytes: int

    def seconds(self, cache: Sequence[CacheGroup], context: int, batch: int, bandwidth: float) -> float:
        """Seconds of a step of ``batch`` sequences behind ``context`` tokens; ``bandwidth`` in bytes per second."""
        rows = tiled_rows(batch) if batch > 1 else 0
        weights = self.matrix_bytes * (WEIGHT_SECONDS + ROW_SECONDS * rows)
        read = sum(group.token_bytes * group.tokens_read(context) * CACHE_SECONDS[group.is_int8] for group in cache)
        overheads = self.launches * LAUNCH_SECONDS + self.norm_vectors * NORM_SECONDS
        return (weights + batch * (read + self.logit_bytes)) / bandwidth + overheads


def tiled_rows(rows: int) -> int:
    """The rows that a product computes for ``rows`` rows: those of the tiles of the kernel for a few rows, if it has
    tiles for so many."""
    return next((8 * tiles for tiles in SKINNY_HOPPER_TILES if rows <= 8 * tiles), rows)
