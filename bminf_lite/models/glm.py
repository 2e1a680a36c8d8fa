"""GLM-4 of 2024 (https://arxiv.org/abs/2406.12793): LLaMA with a rotation of pairs in the first half of each head.

Gate and up projection are one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, Fields, flag, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.attention import AttentionPart
from .parts.feed_forward import FeedForwardPart

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=151552,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1.5625e-7,
) | {"qkv_bias": flag("attention_bias", True)}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    fields, attention, mlp = glm_parts(config)
    return llama.model(fields, [llama.pre_norm(fields, attention, mlp)] * fields["layers"])


def glm_parts(config: Mapping[str, Any]) -> tuple[Fields, AttentionPart, FeedForwardPart]:
    """The fields of the configuration, and the parts of a layer."""
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read, part=0.5, interleaved=True)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary)
    return fields, attention, llama.feed_forward(fields, inner=("mlp.gate_up_proj",))


architecture = decoder(parse)
