"""Tiny random models on backends that watch what generation does to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

import numpy as np
from tiny_models import RandomWeights

from bminf_lite import models
from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.backend.cache_values import LatentCache, LayerCache, StateCache
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.placement import make_engine_config

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


class RowwiseBackend(Backend):
    """Computes float products row by row, so that the bits of a row do not depend on the other rows of a step.

    BLAS sums by shape: the last bits of a row differ with the number of rows, and where two tokens nearly tie, or a
    code of a cache is nearly halfway between two, so may the tokens that follow. Attention and w8a8 do so anyway.
    """

    def _matrix_product(self, x: Any, weight: Any) -> Any:
        product = super()._matrix_product
        is_exact = weight.scale is not None and weight.dynamic
        return product(x, weight) if is_exact else product(x[:, None], weight)[:, 0]


class WatchedBackend(RowwiseBackend):
    """A backend that may run ahead, counts its steps, and knows whether its caches live."""

    def __init__(
        self,
        max_steps_in_flight: int = 0,
        decode_sizes: tuple[int, ...] = (),
        prompt_sizes: tuple[int, ...] = (),
        source_sizes: tuple[int, ...] = (),
    ):
        super().__init__()
        self.decode_sizes = decode_sizes
        self.mixed_sizes = tuple((decodes, tokens) for tokens in prompt_sizes for decodes in (0, *decode_sizes))
        self.source_sizes = source_sizes
        self.max_steps_in_flight = max_steps_in_flight
        self.arrays: list[weakref.ref[np.ndarray]] = []
        self.samples = 0
        self.captures = 0
        self._touched = []
        self.interrupt: Callable[[], None] = lambda: None

    def layer_cache(self, *shape: int, **kind: Any) -> LayerCache:
        cache = super().layer_cache(*shape, **kind)
        self.arrays += [weakref.ref(cache.keys), weakref.ref(cache.values)]
        return cache

    def latent_cache(self, *shape: int, **kind: Any) -> LatentCache:
        cache = super().latent_cache(*shape, **kind)
        self.arrays += [weakref.ref(array) for array in cache.arrays]
        return cache

    def state_cache(self, *arguments: Any, **kind: Any) -> StateCache:
        cache = super().state_cache(*arguments, **kind)
        self.arrays += [weakref.ref(array) for array in cache.arrays]
        return cache

    def capture(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """As a graph does, forbid that a replay uses other arrays than the first run."""
        self.captures += 1
        first: list[list[int]] = []

        def replay() -> Any:
            self._touched: list[int] = []
            result = work()
            first.append(self._touched)
            assert self._touched == first[0]
            self._touched = []
            return result

        return replay

    def attention(self, qkv: Any, spec: Any, cache: LayerCache, batch: Any) -> Any:
        self._touch(batch)
        return super().attention(qkv, spec, cache, batch)

    def latent_attention(self, q: Any, kv: Any, spec: Any, expand: Any, cache: LatentCache, batch: Any) -> Any:
        self._touch(batch)
        return super().latent_attention(q, kv, spec, expand, cache, batch)

    def _touch(self, batch: Any) -> None:
        """What a mixer reads of a step."""
        arrays = (batch.tokens, batch.cu_seqlens, batch.context_lens, *batch.block_tables)
        self._touched += [x.__array_interface__["data"][0] for x in arrays]
        self._touched += [batch.max_context_len, batch.batch_size, *batch.block_tables[0].shape]
        assert int(batch.context_lens.max()) < batch.max_context_len

    def encoder_attention(self, qkv: Any, spec: Any, batch: Any) -> Any:
        arrays = (batch.tokens, batch.cu_seqlens, batch.source_tables)
        self._touched += [x.__array_interface__["data"][0] for x in arrays]
        self._touched += [batch.max_query_len, batch.batch_size, *batch.source_tables.shape]
        assert int(np.diff(batch.cu_seqlens).max()) <= batch.max_query_len
        return super().encoder_attention(qkv, spec, batch)

    def sample(self, logits: Any, sampler: Any) -> Any:
        self.samples += 1
        self.interrupt()
        return super().sample(logits, sampler)

    @property
    def memory_is_free(self) -> bool:
        """Whether caches were made, and every one is gone."""
        return bool(self.arrays) and all(array() is None for array in self.arrays)


def make_model(
    ops: Backend | None = None,
    *,
    quantized: bool = False,
    max_batch: int = 16,
    num_blocks: int | None = None,
    chunk: int = 2048,
    eos_ids: frozenset[int] = frozenset(),
    limits: Mapping[str, Any] = MappingProxyType({}),
    **config: Any,
) -> Model:
    """A model without a tokenizer. Quantized, its products are exact, so a row is the same bits in any batch."""
    full = config if "model_type" in config else CONFIG | config
    architecture = models.find(full)
    parsed = architecture.parse(full)
    network = architecture.Model(parsed, RandomWeights(full, 7, quantized), ops or WatchedBackend())
    engine_config = make_engine_config(parsed, parsed.cache_layout, None, max_batch)
    if num_blocks is not None:
        engine_config = replace(engine_config, num_blocks=(num_blocks,) * len(engine_config.num_blocks))
    return Model(network, replace(engine_config, max_num_batched_tokens=chunk, **limits), eos_ids=eos_ids)


def run(model: Model, requests: list[Request]) -> list[Request]:
    """Run requests to their end."""
    ended: SimpleQueue[Request] = SimpleQueue()

    def on_update(request: Request) -> None:
        if request.finish_reason is not None:
            ended.put(request)

    for r in requests:
        r.on_update = on_update
    model._engine.submit(requests)
    for _ in requests:
        if (error := ended.get().error) is not None:
            raise error
    return requests


def request(index: int, prompt: list[int], eos_ids: frozenset[int] = frozenset(), **options: Any) -> Request:
    return Request(index, prompt, SamplingParams(**{"seed": 3, **options}), eos_ids)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, CONFIG["vocab_size"], length).tolist()
