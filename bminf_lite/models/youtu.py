"""Youtu-LLM (https://arxiv.org/abs/2512.24618): DeepSeek-V3's latent attention, without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import deepseek_v3, llama
from ._architecture import decoder
from ._config import ConfigReader, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary

LATENT = ("head_dim", "nope_dim", "value_dim", "rank", "bias", "interleaved")
KEYS = with_defaults(
    llama.KEYS | {field: deepseek_v3.LATENT_KEYS[field] for field in LATENT},
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=16,
    num_key_value_heads=16,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    rank = deepseek_v3.query_rank(read, 1536)
    rotary = parse_rotary(read, interleaved=deepseek_v3.check_latent(read))
    scale = deepseek_v3.score_scale(read)
    fields = read.checked_fields()
    attention, mlp = deepseek_v3.latent_attention(fields, rotary, rank, scale), llama.feed_forward(fields)
    return llama.model(fields, [llama.pre_norm(fields, attention, mlp)] * fields["layers"])


architecture = decoder(parse)
