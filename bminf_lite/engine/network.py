"""Models as the engine calls them; see :mod:`bminf_lite.models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..backend.base import Backend
from ..backend.guesses import GuessPlace
from ..backend.values import Array, ForwardBatch
from ..layers.cache import KVCache


class Network(Protocol):
    """A model."""

    ops: Backend

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """Logits fp32 ``[L, vocab]`` of the batch's ``logit_rows``, or of all tokens ``[T, vocab]``."""
        ...


class DraftNetwork(Protocol):
    """A model that guesses the tokens of another one."""

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """Logits fp32 ``[B, vocab]`` of last tokens."""
        ...

    def read(self, batch: ForwardBatch, cache: KVCache) -> None:
        """Add a step's tokens to the cache."""
        ...


class ObservedNetwork(Protocol):
    """A model that lets others read its residual stream."""

    ops: Backend

    def __call__(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        all_logits: bool = False,
        observe: Callable[[int, Array], None] | None = None,
        observes_end: bool = False,
    ) -> Array:
        """As a :class:`Network`; ``observe`` is called before each layer with its number and the stream.

        If it ``observes_end``, also behind the last one, and then the stream has all tokens.
        """
        ...


class StepFeatures(Protocol):
    """What a draft head takes of a step of the model; whether it ``wants_all`` tokens behind the last layer."""

    wants_all: bool

    def observe(self, layer: int, residual: Array) -> None:
        """Read the residual stream before a layer."""
        ...


class DraftHead(Protocol):
    """A few layers that guess a model's next tokens from its residual stream."""

    def features(self) -> StepFeatures:
        """Where the features of a step go, before the model computes it."""
        ...

    def read(self, batch: ForwardBatch, cache: KVCache, features: Any) -> None:
        """Add a step's tokens to the cache, after the model has computed it."""
        ...

    def guess(self, place: GuessPlace, cache: KVCache, features: Array) -> Array:
        """Guess the token behind each sequence's; returns what stands for its features.

        Without ``features``, those of the token before are used.
        """
        ...


class SourceNetwork(Protocol):
    """A model that has an encoder."""

    ops: Backend

    def encode_to_cache(self, batch: ForwardBatch, source: KVCache) -> None:
        """Encode whole sources, and store the decoder's keys and values of them in ``source``."""
        ...
