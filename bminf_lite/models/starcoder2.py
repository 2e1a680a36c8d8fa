"""StarCoder2 (https://arxiv.org/abs/2402.19173): LayerNorm, biases, no gate in the feed-forward layer, a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ACTIVATIONS, ConfigReader, choice, flag, integer, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.norms import NormKind

BIAS = flag("use_bias", True)
KEYS = with_defaults(
    llama.KEYS,
    vocab_size=49152,
    hidden_size=3072,
    intermediate_size=12288,
    num_hidden_layers=30,
    num_attention_heads=24,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
) | {
    "norm_eps": number("norm_epsilon", 1e-5, high=1.0),
    "activation": choice("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
    "qkv_bias": BIAS,
    "o_bias": BIAS,
    "mlp_bias": BIAS,
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    window = read.value_or_none(integer("sliding_window", None))
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields, kind = read.checked_fields(), NormKind.LAYER
    attention = llama.attention(fields, rotary=rotary, window=window)
    mlp = llama.feed_forward(fields, gated=False, inner=("mlp.c_fc",), down="mlp.c_proj")
    return llama.model(fields, [llama.pre_norm(fields, attention, mlp, kind)] * fields["layers"], kind)


architecture = decoder(parse)
