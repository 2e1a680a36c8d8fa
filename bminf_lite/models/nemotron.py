"""Nemotron (https://arxiv.org/abs/2402.16819) and Minitron: a LayerNorm with 1 + weight, and a squared ReLU.

Half of each head is rotated, and the feed-forward layer has no gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ACTIVATIONS, ConfigReader, choice, number, with_defaults
from ._rotary import parse_rotary
from ._transformer import Config, NormKind, TensorNames

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
NAMES = TensorNames(mlp_in=("mlp.up_proj",))


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read, part=0.5)
    parsed = llama.family_config(read, rotary)
    return replace(parsed, names=NAMES, norm_kind=NormKind.LAYER, norm_offset=1.0, gated=False)


architecture = replace(llama.architecture, parse=parse)
