"""Tiny random models on backends that watch what generation does to them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
from tiny_models import RandomWeights

from bminf_lite import models
from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import LayerCache
from bminf_lite.engine.config import EngineConfig
from bminf_lite.engine.generation import generate_tokens
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams

CONFIG = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}


class WatchedBackend(Backend):
    """A backend that may run ahead, counts its steps, and knows whether its caches live."""

    def __init__(self, max_steps_in_flight: int = 0):
        super().__init__()
        self.max_steps_in_flight = max_steps_in_flight
        self.arrays: list[weakref.ref[np.ndarray]] = []
        self.largest = 0
        self.samples = 0
        self.grown = 0
        self.interrupt: Callable[[], None] = lambda: None

    def layer_cache(self, slots: int, kv_heads: int, capacity: int, head_dim: int, *, int8: bool = False) -> LayerCache:
        self.largest = max(self.largest, capacity)
        cache = super().layer_cache(slots, kv_heads, capacity, head_dim, int8=int8)
        self.arrays += [weakref.ref(cache.keys), weakref.ref(cache.values)]
        return cache

    def grow(self, cache: LayerCache, capacity: int) -> None:
        super().grow(cache, capacity)
        self.grown += 1

    def sample(self, logits: Any, sampler: Any, batch: Any = None) -> Any:
        self.samples += 1
        self.interrupt()
        return super().sample(logits, sampler, batch)

    @property
    def memory_is_free(self) -> bool:
        """Whether caches were made, and every one is gone."""
        return bool(self.arrays) and all(array() is None for array in self.arrays)


def make_model(
    ops: Backend | None = None,
    *,
    quantized: bool = False,
    max_batch: int = 16,
    chunk: int = 2048,
    eos_ids: frozenset[int] = frozenset(),
    **config: Any,
) -> Model:
    """A model without a tokenizer. Quantized, its products are exact, so a row is the same bits in any batch."""
    full = CONFIG | config
    architecture = models.find(full)
    parsed = architecture.parse(full)
    network = architecture.Model(parsed, RandomWeights(full, 7, quantized), ops or WatchedBackend())
    engine_config = EngineConfig(parsed.context_length, parsed.vocab_size, parsed.cache_shape, max_batch, chunk)
    return Model(network, engine_config, eos_ids=eos_ids)


def run(model: Model, requests: list[Request]) -> list[Request]:
    """Run requests to their end."""
    with closing(generate_tokens(model.network, requests, model.engine_config)) as steps:
        deque(steps, maxlen=0)
    return requests


def request(index: int, prompt: list[int], eos_ids: frozenset[int] = frozenset(), **options: Any) -> Request:
    return Request(index, prompt, SamplingParams(**{"seed": 3, **options}), eos_ids)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, CONFIG["vocab_size"], length).tolist()
