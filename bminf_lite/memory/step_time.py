"""Predicts the time of a decode step on a GPU from what the step reads and launches.

A step reads the weights, and the keys, values and states of each sequence, and moves logits a few times. That takes its
bytes over the bandwidth. The other terms do not depend on the bandwidth:

- a product takes a little longer than reading its weight, and each of several rows adds to that; rows come in whole
  tiles;
- an int8 cache is dequantized;
- a kernel takes a while to start and to end, and a norm delays the product that follows it;
- a mixture's experts wait for its router, latent attention has two kernels more than attention, and so has a layer that
  adds an input of its own.

The prediction knows a GPU by its memory bandwidth alone. The constants were fitted to measurements on an H200 and an
H100, which have the same multiprocessors; a GPU with fewer or slower ones takes longer for the other terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cuda.kernels.constants import MAX_FEW_TOKENS, SKINNY_HOPPER_TILES
from .cache_memory import CacheGroup

WEIGHT_SECONDS = 1.7e-14
"""Seconds that a product takes beyond reading its weight, for each byte of it."""
ROW_SECONDS = 1.1e-15
"""Seconds that each of several rows adds for each byte of the weight."""
INT8_CACHE_SECONDS = 7e-14
"""Seconds that dequantizing a byte of an int8 cache takes."""
LAUNCH_SECONDS = 0.9e-6
"""Seconds between the end of a kernel's work and the start of the next one's."""
NORM_SECONDS = 1.3e-6
"""Seconds that a vector of a norm adds to each product that applies it: the row passes through it first."""
MIXTURE_SECONDS = 8e-6
"""Seconds that a mixture takes beyond its products: the router, the choice, and both products' waits for them."""
SORT_SECONDS = 16e-6
"""Seconds that are added where more than ``MAX_FEW_TOKENS`` tokens are sorted by expert, and their results summed."""
LATENT_SECONDS = 2e-6
"""Seconds that a layer's latent attention takes beyond attention."""
LAYER_INPUT_SECONDS = 4.7e-6
"""Seconds that a layer's own input takes beyond its products: its gate and its norm."""


@dataclass(frozen=True)
class ExpertBytes:
    """The matrices of a mixture of ``num_experts`` experts, in bytes, of which a token chooses ``top_k``.

    ``nbytes`` are those of all experts. ``matrix_bytes`` leave out scales and biases, which always stay on the GPU, and
    ``expert_bytes`` are those of the two matrices of one expert, (0, 0) if not known.
    """

    nbytes: int
    num_experts: int
    top_k: int
    matrix_bytes: int = 0
    expert_bytes: tuple[int, int] = (0, 0)

    def read(self, tokens: int) -> float:
        """Bytes that a step of ``tokens`` tokens reads, if each chooses its experts at random."""
        left_out = (1 - self.top_k / self.num_experts) ** tokens
        return self.nbytes * (1 - left_out)


@dataclass(frozen=True)
class StepWork:
    """What a decode step of a model reads and launches.

    - ``matrix_bytes``: the weights that it reads, in bytes, embedding tables left out;
    - ``experts``: of these, the matrices of experts, of which it reads those that its tokens choose;
    - ``launches``: the products and attentions of all layers;
    - ``norm_vectors``: the vectors that products apply in all layers, two for a LayerNorm; those of a norm that two
      products share count twice;
    - ``logit_bytes``: bytes that are moved for the logits of a sequence;
    - ``shared``: the groups of what layers read of the caches of others, beside their own;
    - ``latents``: the layers with latent attention; ``layer_inputs``: those that add an input of their own.
    """

    matrix_bytes: int
    launches: int
    norm_vectors: int
    logit_bytes: int
    experts: tuple[ExpertBytes, ...] = ()
    shared: tuple[CacheGroup, ...] = ()
    latents: int = 0
    layer_inputs: int = 0

    def weight_bytes(self, batch: int) -> float:
        """Bytes of weights that a step of ``batch`` sequences reads, if each token chooses its experts at random."""
        return self.matrix_bytes - sum(mixture.nbytes - mixture.read(batch) for mixture in self.experts)

    def seconds(self, cache: Sequence[CacheGroup], context: int, batch: int, bandwidth: float) -> float:
        """Seconds of a step of ``batch`` sequences behind ``context`` tokens; ``bandwidth`` in bytes per second."""
        rows = tiled_rows(batch) if batch > 1 else 0
        weights = self.weight_bytes(batch)
        moved = weights + batch * self.logit_bytes
        of_experts = [(mixture.read(batch), mixture.top_k / mixture.num_experts) for mixture in self.experts]
        row_bytes = weights - sum(nbytes * (1 - chosen) for nbytes, chosen in of_experts)
        compute = weights * WEIGHT_SECONDS + row_bytes * ROW_SECONDS * rows
        for group in (*cache, *self.shared):
            nbytes = batch * group.bytes_read(context)
            moved += nbytes
            compute += nbytes * INT8_CACHE_SECONDS * group.is_int8
        launches = self.launches * LAUNCH_SECONDS + self.norm_vectors * NORM_SECONDS
        each = MIXTURE_SECONDS + SORT_SECONDS * (batch > MAX_FEW_TOKENS)
        waits = len(self.experts) * each + self.latents * LATENT_SECONDS
        waits += self.layer_inputs * LAYER_INPUT_SECONDS
        return moved / bandwidth + compute + launches + waits


def tiled_rows(rows: int) -> int:
    """``rows`` rounded up to a tile of the skinny kernel; ``rows`` itself if that exceeds the largest tile."""
    return next((8 * tiles for tiles in SKINNY_HOPPER_TILES if rows <= 8 * tiles), rows)
