"""GLM-4 of 2024 (https://arxiv.org/abs/2406.12793): LLaMA with a rotation of pairs in the first half of each head.

Gate and up projection are one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ConfigReader, flag, with_defaults
from ._rotary import parse_rotary
from ._transformer import Config, TensorNames

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
NAMES = TensorNames(mlp_in=("mlp.gate_up_proj",))


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read, part=0.5, interleaved=True)
    return replace(llama.family_config(read, rotary), names=NAMES)


architecture = replace(llama.architecture, parse=parse)
