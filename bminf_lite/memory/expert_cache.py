"""Which experts of a mixture a GPU holds that has no room for all of them: the policy, defined over NumPy.

All experts lie in host memory. The layers of a model share the slots of a pool in GPU memory, each of which has room
for one expert. Before a layer is computed, the experts that its tokens chose and that are in no slot are copied into
slots: these are the misses. Each takes the place of the expert that was chosen least of late, in whatever layer, but
never of one that the same tokens chose in this layer. So all that a layer needs is there if the pool has a slot for
each of its experts.

An expert is worth ``EXPERT_CHOICE`` for each token that chose it. When a layer has seen another ``EXPERT_HALF_LIFE``
tokens, what its experts are worth is halved and rounded down. Of slots with experts that are worth the same, the first
goes first, and slots without an expert go before all others. Kernels do the same (``experts/fetch.cu``): which experts
are copied, and where to, is a function of the choices so far.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cuda.kernels.constants import EXPERT_CHOICE, EXPERT_HALF_LIFE

ZIPF = 1.2
"""The exponent of Zipf's law, by which plans draw experts."""
SIMULATED_LAYERS, SIMULATED_TOKENS = 4, 400
"""The layers that :func:`expected_hits` simulates at least, if there are as many, and about the tokens it counts."""
SIMULATED_FETCHES = 3600
"""Layers times steps that are simulated at most, twice; with 60 layers the rate is within 0.005 of that of 400."""


class ExpertPool:
    """``num_slots`` slots for the experts of layers that have ``experts`` each.

    Experts are numbered through all layers. ``slots`` int32 are the slots of the experts, and ``owners`` int32 the
    experts of the slots, both -1 for none. ``counts`` int32 is what each expert is worth, ``clocks`` int32 the tokens
    that each layer has seen since its counts were halved. ``hits`` and ``misses`` count experts that a layer's tokens
    chose.
    """

    def __init__(self, num_slots: int, experts: Sequence[int]) -> None:
        assert num_slots >= max(experts), "a pool has a slot for each expert of a layer"
        self.starts = np.cumsum([0, *experts])
        self.slots = np.full(self.starts[-1], -1, np.int32)
        self.owners = np.full(num_slots, -1, np.int32)
        self.counts = np.zeros(self.starts[-1], np.int32)
        self.clocks = np.zeros(len(experts), np.int32)
        self.hits = self.misses = 0

    def fetch(self, layer: int, topk_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Make room for the experts int32 ``[T, top_k]`` of a layer's tokens.

        Returns which of the layer's experts are copied, in ascending order, and into which slots; both int32 ``[n]``.
        """
        own, first = slice(self.starts[layer], self.starts[layer + 1]), self.starts[layer]
        chosen = np.bincount(topk_ids.ravel(), minlength=own.stop - own.start)
        halvings, self.clocks[layer] = divmod(self.clocks[layer] + len(topk_ids), EXPERT_HALF_LIFE)
        self.counts[own] = (self.counts[own] >> min(halvings, 31)) + chosen * EXPERT_CHOICE
        missing = np.flatnonzero((chosen > 0) & (self.slots[own] < 0)).astype(np.int32)
        self.misses += len(missing)
        self.hits += int(np.count_nonzero(chosen)) - len(missing)
        if not len(missing):
            return missing, missing
        worth = np.where(self.owners < 0, -1, self.counts[self.owners]).astype(np.int64)
        needed = self.slots[own][(chosen > 0) & (self.slots[own] >= 0)]
        worth[needed] = np.iinfo(np.int64).max
        victims = np.argsort(worth, kind="stable")[: len(missing)].astype(np.int32)
        left = self.owners[victims]
        self.slots[left[left >= 0]] = -1
        self.owners[victims], self.slots[first + missing] = first + missing, victims
        return missing, victims


def zipf_routing(
    rng: np.random.Generator, tokens: int, layers: int, experts: int, top_k: int, exponent: float = ZIPF
) -> np.ndarray:
    """Experts int32 ``[tokens, layers, top_k]``, drawn without replacement: the one of rank ``r`` of a layer with a
    probability in proportion to ``r ** -exponent``. Each layer has its own order of ranks.
    """
    logits = -exponent * np.log(np.arange(1, experts + 1))
    orders = np.stack([rng.permutation(experts) for _ in range(layers)])
    noise = rng.gumbel(size=(tokens, layers, experts))  # the largest sums are such a draw
    ranks = np.argpartition(-(logits + noise), top_k - 1, axis=-1)[..., :top_k]
    return np.take_along_axis(orders[None], ranks, axis=2).astype(np.int32)


@dataclass(frozen=True)
class ExpectedHits:
    """What a layer's tokens need on average: different experts, and of these the ones that are copied."""

    needed: float
    misses: float

    @property
    def rate(self) -> float:
        """The share that is found."""
        return 1 - self.misses / self.needed


@functools.lru_cache(64)
def expected_hits(
    num_slots: int, layers: int, experts: int, top_k: int, batch: int, exponent: float = ZIPF
) -> ExpectedHits:
    """What a layer needs and copies in steps of ``batch`` tokens. Each draws its experts by Zipf's law, independently.

    The policy is simulated for a few layers with their share of the slots. As many steps as are counted fill the slots
    before. More layers are simulated where their share would be little more than the experts of one layer, and for
    large steps, whose layers share many slots of experts that soon go.
    """
    simulated = min(layers, max(SIMULATED_LAYERS * batch, -(-2 * experts * layers // num_slots)))
    pool = ExpertPool(max(num_slots * simulated // layers, experts), [experts] * simulated)
    steps = max(min(SIMULATED_TOKENS // batch, SIMULATED_FETCHES // simulated), 2)
    tokens = 2 * steps * min(batch, SIMULATED_TOKENS)
    routing = zipf_routing(np.random.default_rng(0), tokens, simulated, experts, top_k, exponent)
    before = (0, 0)
    for step, chosen in enumerate(np.split(routing, 2 * steps)):
        if step == steps:
            before = pool.hits, pool.misses
        for layer in range(simulated):
            pool.fetch(layer, chosen[:, layer])
    misses, count = pool.misses - before[1], steps * simulated
    return ExpectedHits((pool.hits - before[0] + misses) / count, misses / count)
