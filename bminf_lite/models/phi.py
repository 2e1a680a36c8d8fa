"""Phi-1, Phi-1.5 and Phi-2 (https://arxiv.org/abs/2309.05463): both layers of a block read one LayerNorm.

A part of each head is rotated, and every matrix has a bias, the output head too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ACTIVATIONS, ConfigReader, choice, flag, number, with_defaults
from ._rotary import parse_rotary
from ._transformer import Config, NormKind, TensorNames

KEYS = with_defaults(llama.KEYS, vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24) | {
    "norm_eps": number("layer_norm_eps", 1e-5, high=1.0),
    "activation": choice("hidden_act", "gelu_new", ACTIVATIONS),
}
NAMES = TensorNames(
    final_norm="model.final_layernorm",
    attention_out="self_attn.dense",
    mlp_in=("mlp.fc1",),
    mlp_out="mlp.fc2",
    mlp_norm=None,
)


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read, part=0.5)
    if read.value(flag("qk_layernorm", False)):
        read.problem("qk_layernorm", "qk_layernorm is true; LayerNorms of single heads are not supported")
    return replace(
        llama.family_config(read, rotary),
        names=NAMES,
        norm_kind=NormKind.LAYER,
        gated=False,
        parallel=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


architecture = replace(llama.architecture, parse=parse)
