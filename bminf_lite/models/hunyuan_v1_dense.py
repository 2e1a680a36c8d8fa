"""Hunyuan of 2025 (https://huggingface.co/tencent): LLaMA whose queries and keys are normalised behind the rotation.

A context is extended by a larger base of the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layers.position import rope_parameters
from . import llama
from ._architecture import decoder
from ._config import ConfigReader, Fields, with_defaults
from ._decoder import DecoderConfig
from ._rotary import Rotary, parse_rotary
from .parts.attention import AttentionPart, QueryKeyNorm

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=290943,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
) | {"qkv_bias": llama.ATTENTION_BIAS, "o_bias": llama.ATTENTION_BIAS}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = rotary_of(read)
    fields = read.checked_fields()
    layer = llama.pre_norm(fields, attention(fields, rotary), llama.feed_forward(fields))
    return llama.model(fields, [layer] * fields["layers"])


def rotary_of(read: ConfigReader) -> Rotary | None:
    """The rotation; with an ``alpha`` beside the type ``dynamic`` its base is ``theta * alpha^(d / (d - 2))``."""
    try:
        found = rope_parameters(read.config)
    except ValueError as error:
        read.problem("rope_parameters", str(error))
        return None
    alpha = found.get("alpha")
    if found["rope_type"] != "dynamic" or not alpha:
        return parse_rotary(read)
    head_dim = read.fields["head_dim"]
    is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool) and 1e-9 < alpha < 1e30
    read.require(is_number, f"rope parameter alpha is {alpha!r}, not a positive number", "rope_parameters")
    read.require(head_dim > 2, f"head_dim ({head_dim}) is not above 2, as a rotation with alpha needs", "head_dim")
    theta = found["rope_theta"]
    if is_number and head_dim > 2 and isinstance(theta, (int, float)):
        found["rope_theta"] = theta * float(alpha) ** (head_dim / (head_dim - 2))
    return parse_rotary(read, parameters=found)


def attention(fields: Fields, rotary: Rotary | None) -> AttentionPart:
    """Attention whose queries and keys are normalised behind the rotation."""
    return llama.attention(
        fields,
        rotary=rotary,
        qk_norm=QueryKeyNorm.HEAD,
        q_norm="self_attn.query_layernorm",
        k_norm="self_attn.key_layernorm",
        norm_after_rope=True,
    )


architecture = decoder(parse)
