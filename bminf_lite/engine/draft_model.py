"""A second, smaller model, or a head on the model itself, that guesses the next tokens of requests.

Its layers lie behind the model's in the same cache, under the same block tables, and each step runs both models on its
tokens. So the draft model knows every token that the model knows, also those of a prefix from the cache, and a rejected
draft is overwritten where the next token lies. Its guesses take steps of its own, one for each draft, between two steps
of the model. They stay on the device (:mod:`.guess_arrays`), so the host launches the step that checks them, and the
one behind it, without waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import numpy as np

from ..backend.guesses import GuessPlace
from ..backend.values import Array, ForwardBatch
from ..layers.cache import KVCache
from .drafts import Drafter
from .network import DraftHead, DraftNetwork, Network, ObservedNetwork
from .request import Request


class DraftedNetwork:
    """A model with ``num_layers`` layers, and a draft model that reads the same tokens.

    A step of the draft model takes ``draft_cost`` of the time of a step of the model.
    """

    def __init__(self, network: Network, num_layers: int, draft: DraftNetwork, draft_cost: float = 0.0):
        self.ops = network.ops
        self.network = network
        self.draft = draft
        self.draft_cost = draft_cost
        self._own, self._others = slice(num_layers), slice(num_layers, None)

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """The model's logits, see :class:`.executor.Network`."""
        self.draft.read(batch, cache.part(self._others))
        return self.network(batch, cache.part(self._own), all_logits)

    def guess(self, cache: KVCache, places: Sequence[GuessPlace]) -> None:
        """Guess the tokens behind the newest ones of ``B`` sequences, one after another.

        The step of the first place has the newest tokens, each other the guesses of the one before it. Nothing is
        copied to the host.
        """
        own = cache.part(self._others)
        for place in places:
            self.ops.guess(self.draft(place.batch, own), place.guesses, place.sampler)


class HeadedNetwork(DraftedNetwork):
    """A model with ``num_layers`` layers, and a draft head that reads its residual stream."""

    def __init__(self, network: ObservedNetwork, num_layers: int, head: DraftHead, draft_cost: float = 0.0):
        super().__init__(network, num_layers, cast(DraftNetwork, head), draft_cost)
        self.observed = network
        self.head = head

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        features = self.head.features()
        logits = self.observed(batch, cache.part(self._own), all_logits, features.observe, features.wants_all)
        self.head.read(batch, cache.part(self._others), features)
        return logits

    def guess(self, cache: KVCache, places: Sequence[GuessPlace]) -> None:
        own, features = cache.part(self._others), None
        for place in places:
            features = self.head.guess(place, own, features)


class Guesses(Protocol):
    """Computes the guesses of a draft model; see :meth:`.ModelRunner.guess`."""

    def __call__(self, requests: Sequence[Request], count: int) -> np.ndarray:
        """``count`` tokens behind the newest token of each request, whose blocks have room: int32 ``[B, count]``."""
        ...


class ModelDrafter(Drafter):
    """The drafter of a draft model: it guesses for all requests of a step at once, on the device.

    A request with a grammar needs to know its drafts. While one runs, the host waits for the guesses.
    """

    needs_newest_token = True
    guesses_on_device = True

    def __init__(self, guess: Guesses, draft_cost: float) -> None:
        self._guess = guess
        self.draft_cost = draft_cost
        self._drafts: dict[Request, list[int]] = {}

    def prepare(self, counts: Mapping[Request, int]) -> None:
        """Guess for these requests, up to as many tokens as each may have."""
        self._drafts.clear()
        if counts:
            guesses = self._guess(list(counts), max(counts.values())).tolist()
            self._drafts = dict(zip(counts, guesses, strict=True))

    def propose(self, request: Request, count: int) -> Sequence[int]:
        return self._drafts.get(request, [])[:count]

    def forget(self, request: Request) -> None:
        self._drafts.pop(request, None)
