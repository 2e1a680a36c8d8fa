"""The configuration of the engine for one model."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers.cache import CacheLayout
from .speculative import NGRAM, SpeculativeConfig


@dataclass(frozen=True)
class EngineConfig:
    """The limits of a model and of the engine; lengths are in tokens.

    - ``context_length``: prompt and completion of one sequence together. For an encoder-decoder, the decoder's tokens.
    - ``num_blocks``: blocks of the key-value cache for each group of ``cache_layout``, the null block included;
      ``num_source_blocks``: those of the sources of an encoder-decoder.
    - ``max_num_seqs``: sequences that take part in one step.
    - ``max_num_batched_tokens``: tokens of a step; a longer prompt is cut into pieces. A step has room for one prompt
      token at least.
    - ``max_num_mixed_tokens``: prompt tokens of a step that also decodes sequences whose tokens are streamed. It
      bounds the time between two tokens of a stream while others' prompts are processed. If more prompts wait than
      streams, it is multiplied by prompts per stream, rounded up.
    - ``num_draft_tokens``: drafts of a request that a step checks, at most; 0 for none. ``cache_layout`` is that of
      steps without drafts. ``speculative`` says where the drafts come from.
    - ``max_num_draft_rows``: rows of a step that checks drafts, at most: the newest tokens of its requests, and drafts.
    - ``num_adapter_slots``: adapters that the requests of a step may have beside each other; 0 for a model without.
    - ``max_logit_rows``: prompt tokens of a step whose logits are computed, for log-probabilities of prompts.
    - ``max_queue``: requests that may wait.
    - ``prefix_cache``: whether blocks of earlier prompts are reused.
    - ``generates``: the model has logits of a next token. Others make vectors of whole texts alone.
    - ``max_captured_text_tokens``: tokens of the largest captured batch of texts that become vectors.
    - ``num_layers``: those of the model that decode, for messages.
    - ``is_encoder_decoder``: the model has an encoder, which reads sources of up to ``max_source_length`` tokens. Its
      decoder starts with ``decoder_start_token_ids``.
    """

    context_length: int
    vocab_size: int
    cache_layout: CacheLayout
    num_blocks: tuple[int, ...]
    num_source_blocks: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_mixed_tokens: int = 256
    num_draft_tokens: int = 0
    speculative: SpeculativeConfig = NGRAM
    max_num_draft_rows: int = 64
    num_adapter_slots: int = 0
    max_logit_rows: int = 256
    max_queue: int = 65536
    prefix_cache: bool = True
    is_encoder_decoder: bool = False
    max_source_length: int = 0
    decoder_start_token_ids: tuple[int, ...] = ()
    generates: bool = True
    num_layers: int = 0
    max_captured_text_tokens: int = 512
