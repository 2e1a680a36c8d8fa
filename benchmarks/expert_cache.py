"""Which experts of a mixture a GPU keeps that does not hold all: policies over recorded or drawn routing, and the best.

A token passes through the layers in order, and each layer needs the experts that its router chose. Those that are not
on the GPU are copied from the host: misses. A policy decides which of them stay, in place of which others. An expert
that does not stay is computed from a slot for copies. :func:`best_hits` is what no policy exceeds without prefetching.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

NEVER = 1 << 62
"""The next use of an expert that no later token needs."""


def uses_of(routing: np.ndarray, experts: int) -> list[list[int]]:
    """The experts that each layer of each token needs, numbered through all layers, one after another in time."""
    layers = routing.shape[1]
    numbered = routing + np.arange(layers, dtype=np.int64)[:, None] * experts
    found: list[list[int]] = numbered.reshape(-1, routing.shape[2]).tolist()
    return found


def best_hits(uses: list[list[int]], capacity: int) -> int:
    """The hits of Belady's algorithm (https://doi.org/10.1147/sj.52.0078), which knows the future.

    Of the experts on the GPU and a missed one, that goes which is needed last.
    """
    following, next_use = [[NEVER] * len(own) for own in uses], dict[int, int]()
    for time in range(len(uses) - 1, -1, -1):
        for place, expert in enumerate(uses[time]):
            following[time][place] = next_use.get(expert, NEVER)
            next_use[expert] = time
    held: dict[int, int] = {}  # the next use of each expert on the GPU
    latest: list[tuple[int, int]] = []  # (minus the next use, expert), with entries that are out of date
    hits = 0
    for own, upcoming in zip(uses, following, strict=True):
        hits += sum(expert in held for expert in own)
        for use, expert in sorted(zip(upcoming, own, strict=True), key=lambda x: x[1] not in held):  # first those held
            if expert not in held and len(held) == capacity:
                while held.get(latest[0][1]) != -latest[0][0]:
                    heapq.heappop(latest)
                if -latest[0][0] <= use:
                    continue
                del held[heapq.heappop(latest)[1]]
            held[expert] = use
            heapq.heappush(latest, (-use, expert))
    return hits


class Policy(Protocol):
    """Values experts by what was needed so far. The least valuable one goes, unless the missed one is worth no more."""

    def use(self, expert: int) -> None:
        """Note that a token needs the expert."""
        ...

    def value(self, expert: int) -> float:
        """The value, which only :meth:`use` of the same expert changes."""
        ...


@dataclass
class LeastRecent:
    """An expert is worth more the later it was last needed (LRU)."""

    values: dict[int, float] = field(default_factory=dict)
    time: int = 0

    def use(self, expert: int) -> None:
        self.time += 1
        self.values[expert] = self.time

    def value(self, expert: int) -> float:
        return self.values.get(expert, 0.0)


@dataclass
class LeastFrequent:
    """An expert is worth the number of its uses, of which one ``half_life`` uses ago counts half.

    Values are logarithms to the base 2, relative to the beginning: so those of experts that rest need no change.
    """

    half_life: float
    values: dict[int, float] = field(default_factory=dict)
    time: int = 0

    def use(self, expert: int) -> None:
        self.time += 1
        self.values[expert] = float(np.logaddexp2(self.values.get(expert, -np.inf), self.time / self.half_life))

    def value(self, expert: int) -> float:
        return self.values.get(expert, -np.inf)


@dataclass(frozen=True)
class Prefetch:
    """Before a layer, up to ``budget`` experts are copied that a prediction names and that the GPU has not.

    A prediction names as many experts as the layer needs; each is right with the probability ``accuracy``, else drawn
    at random. That of the next layer's router applied early is to be measured on a model.
    """

    accuracy: float
    budget: int
    seed: int = 0


def policy_hits(
    uses: list[list[int]], capacity: int, policy: Policy, prefetch: Prefetch | None = None, experts: int = 0
) -> tuple[int, int]:
    """The hits of a policy, a prefetched expert that is needed among them; and all copies, wrong predictions included.

    ``experts`` is their number in a layer, which predictions need.
    """
    held: set[int] = set()
    cheapest: list[tuple[float, int]] = []  # (value, expert), with entries that are out of date
    rng = np.random.default_rng(0 if prefetch is None else prefetch.seed)
    hits = copies = 0
    for own in uses:
        ahead = set[int]()
        if prefetch is not None:
            first, right = own[0] // experts * experts, rng.random(len(own)) < prefetch.accuracy
            named = [x if good else first + int(rng.integers(experts)) for x, good in zip(own, right, strict=True)]
            ahead = set([x for x in dict.fromkeys(named) if x not in held][: prefetch.budget])
        missing = [expert for expert in own if expert not in held]
        hits += len(own) - len(missing) + len(ahead.intersection(missing))
        copies += len(ahead.union(missing))
        for expert in own:
            policy.use(expert)
            if expert in held:
                heapq.heappush(cheapest, (policy.value(expert), expert))
        for expert in missing:
            if len(held) == capacity:
                while cheapest[0][1] not in held or cheapest[0][0] != policy.value(cheapest[0][1]):
                    heapq.heappop(cheapest)
                if cheapest[0][0] >= policy.value(expert):
                    continue
                held.remove(heapq.heappop(cheapest)[1])
            held.add(expert)
            heapq.heappush(cheapest, (policy.value(expert), expert))
    return hits, copies
