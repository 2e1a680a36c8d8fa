"""Code World Model (https://arxiv.org/abs/2510.02387): LLaMA 3 with a window on three layers of four."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, with_defaults
from ._decoder import DecoderConfig
from .ministral import parse_windows, windows_of_types

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=128256,
    hidden_size=6144,
    intermediate_size=21504,
    num_hidden_layers=64,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
) | {"mlp_bias": llama.BIASES["mlp_bias"]}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = {**config, "rope_parameters": ROPE}
    read = ConfigReader(config, KEYS)
    types = [SLIDING if layer % 4 else FULL for layer in range(read.fields["layers"])]
    return parse_windows(read, windows_of_types(read, 8192, types), theta=1000000.0)


architecture = decoder(parse)
