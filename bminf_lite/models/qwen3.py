"""Qwen3 (https://arxiv.org/abs/2505.09388): queries and keys normalised per head, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama, qwen2
from ._architecture import decoder
from ._config import ConfigReader, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.attention import QueryKeyNorm

BIASES = {"qkv_bias": llama.ATTENTION_BIAS, "o_bias": llama.ATTENTION_BIAS}
KEYS = with_defaults(qwen2.KEYS, head_dim=128) | BIASES


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    windows = qwen2.qwen_windows(read)
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary, qk_norm=QueryKeyNorm.HEAD)
    mlp = llama.feed_forward(fields)
    return llama.model(fields, [llama.pre_norm(fields, replace(attention, window=w), mlp) for w in windows])


architecture = decoder(parse)
