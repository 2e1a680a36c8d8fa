"""Seed-OSS (https://github.com/ByteDance-Seed/seed-oss): LLaMA with biases on query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, flag, with_defaults
from ._decoder import DecoderConfig

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=155136,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=80,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=524288,
) | {
    "qkv_bias": flag("attention_bias", True),
    "o_bias": flag("attention_out_bias", False),
    "mlp_bias": flag("mlp_bias", False),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    return llama.parse_family(ConfigReader(config, KEYS))


architecture = decoder(parse)
