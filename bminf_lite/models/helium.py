"""Helium (https://arxiv.org/abs/2410.00037): LLaMA whose heads are rotated in pairs of neighbouring elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ConfigReader, flag, with_defaults
from ._rotary import parse_rotary
from ._transformer import Config

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=48000,
    hidden_size=2560,
    intermediate_size=7040,
    num_hidden_layers=24,
    num_attention_heads=20,
    num_key_value_heads=20,
    head_dim=128,
    max_position_embeddings=4096,
    rms_norm_eps=1e-8,
) | {"qkv_bias": llama.ATTENTION_BIAS, "mlp_bias": flag("mlp_bias", False)}


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    return llama.family_config(read, parse_rotary(read, theta=100000.0, interleaved=True))


architecture = replace(llama.architecture, parse=parse)
