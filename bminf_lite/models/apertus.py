"""Apertus (https://arxiv.org/abs/2509.14233): LLaMA with norms of queries and keys, and xIELU without a gate.

The activation has two slopes of its own in each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ACTIVATIONS, ConfigReader, choice, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.attention import QueryKeyNorm
from .parts.feed_forward import XieluPart

XIELU = "xielu"
KEYS = with_defaults(
    llama.KEYS,
    vocab_size=131072,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=65536,
    rms_norm_eps=1e-5,
) | {
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
    "activation": choice("hidden_act", XIELU, {XIELU: XIELU, **ACTIVATIONS}),
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""The rotation of a file that describes none."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    has_rope = config.get("rope_scaling") or config.get("rope_parameters")
    rotary = parse_rotary(read, theta=12e6, parameters=None if has_rope else ROPE)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary, qk_norm=QueryKeyNorm.HEAD)
    options: dict[str, Any] = {"gated": False, "inner": ("mlp.up_proj",)}
    mlp = llama.feed_forward(fields, **options)
    if fields["activation"] == XIELU:
        mlp = XieluPart(fields["hidden_size"], fields["intermediate_size"], XIELU, **options)
    names = ("attention_layernorm", "feedforward_layernorm")
    layer = llama.pre_norm(fields, attention, mlp, names=names)
    return llama.model(fields, [layer] * fields["layers"])


architecture = decoder(parse)
