"""Models as the engine calls them; see :mod:`bminf_lite.models`."""

from __future__ import annotations

from typing import Protocol

from ..backend.base import Backend
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


class SourceNetwork(Protocol):
    """A model that has an encoder."""

    ops: Backend

    def encode_to_cache(self, batch: ForwardBatch, source: KVCache) -> None:
        """Encode whole sources, and store the decoder's keys and values of them in ``source``."""
        ...
