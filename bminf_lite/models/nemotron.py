"""Nemotron (https://arxiv.org/abs/2402.16819) and Minitron: a LayerNorm with 1 + weight, and a squared ReLU.

Half of each head is rotated, and the feed-forward layer has no gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ACTIVATIONS, ConfigReader, choice, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.norms import NormKind

KEYS = (
    with_defaults(
        llama.KEYS,
        vocab_size=256000,
        hidden_size=6144,
        intermediate_size=24576,
        num_attention_heads=48,
        max_position_embeddings=4096,
    )
    | llama.BIASES
    | {
        "norm_eps": number("norm_eps", 1e-5, high=1.0),
        "activation": choice("hidden_act", "relu2", ACTIVATIONS),
    }
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read, part=0.5)
    fields, kind = read.checked_fields(), NormKind.LAYER
    attention = llama.attention(fields, rotary=rotary)
    mlp = llama.feed_forward(fields, gated=False, inner=("mlp.up_proj",))
    layer = llama.pre_norm(fields, attention, mlp, kind, offset=1.0)
    return llama.model(fields, [layer] * fields["layers"], kind, offset=1.0)


architecture = decoder(parse)
