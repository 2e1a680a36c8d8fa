"""Phi-1, Phi-1.5 and Phi-2 (https://arxiv.org/abs/2309.05463): both layers of a block read one LayerNorm.

A part of each head is rotated, and every matrix has a bias, the output head too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ACTIVATIONS, ConfigReader, choice, flag, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.norms import NormKind

KEYS = with_defaults(llama.KEYS, vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24) | {
    "norm_eps": number("layer_norm_eps", 1e-5, high=1.0),
    "activation": choice("hidden_act", "gelu_new", ACTIVATIONS),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read, part=0.5)
    if read.value(flag("qk_layernorm", False)):
        read.problem("qk_layernorm", "qk_layernorm is true; LayerNorms of single heads are not supported")
    fields, kind = read.checked_fields(), NormKind.LAYER
    attention = llama.attention(fields, rotary=rotary, out="self_attn.dense", qkv_bias=True, out_bias=True)
    mlp = llama.feed_forward(fields, gated=False, inner=("mlp.fc1",), down="mlp.fc2", bias=True)
    return llama.model(
        fields,
        [llama.parallel(fields, attention, mlp, kind)] * fields["layers"],
        kind,
        names={"final_norm": "model.final_layernorm"},
        output={"bias": True},
    )


architecture = decoder(parse)
