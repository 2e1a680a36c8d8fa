"""Jais 2 (https://huggingface.co/inceptionai): LayerNorm, biases, and a squared ReLU without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ACTIVATIONS, ConfigReader, choice, flag, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.norms import NormKind

BIAS = flag("attention_bias", True)
KEYS = with_defaults(
    llama.KEYS,
    vocab_size=150272,
    hidden_size=3328,
    intermediate_size=26624,
    num_attention_heads=26,
    max_position_embeddings=8192,
) | {
    "norm_eps": number("layer_norm_eps", 1e-5, high=1.0),
    "activation": choice("hidden_act", "relu2", ACTIVATIONS),
    "qkv_bias": BIAS,
    "o_bias": BIAS,
    "mlp_bias": flag("mlp_bias", True),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields, kind = read.checked_fields(), NormKind.LAYER
    attention = llama.attention(fields, rotary=rotary)
    mlp = llama.feed_forward(fields, gated=False, inner=("mlp.up_proj",))
    return llama.model(fields, [llama.pre_norm(fields, attention, mlp, kind)] * fields["layers"], kind)


architecture = decoder(parse)
