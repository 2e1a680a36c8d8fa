"""The configuration of the engine for one model."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers.cache import CacheShape


@dataclass(frozen=True)
class EngineConfig:
    """The limits of a model and of the engine; lengths are in tokens.

    - ``context_length``: prompt and completion of one sequence together. For an encoder-decoder, the decoder's tokens.
    - ``max_batch``: sequences that are decoded together; each has a slot of the key-value cache.
    - ``max_num_batched_tokens``: prompt tokens of one step. A longer prompt is processed in chunks.
    - ``is_encoder_decoder``: the model has an encoder, which reads sources of up to ``max_source_length`` tokens. Its
      decoder starts with ``decoder_start_token_ids``.
    - ``cache_tokens``: tokens, shared by all slots, that the cache has room for from the start. It is set where memory
      is short, because a cache that grows in nearly full memory fragments it.
    """

    context_length: int
    vocab_size: int
    cache_shape: CacheShape
    max_batch: int = 16
    max_num_batched_tokens: int = 2048
    is_encoder_decoder: bool = False
    max_source_length: int = 0
    decoder_start_token_ids: tuple[int, ...] = ()
    cache_tokens: int = 0
