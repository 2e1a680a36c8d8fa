"""Ministral 3 (https://huggingface.co/mistralai): LLaMA with YaRN, whose queries grow beyond the original context.

This version runs the original context, where the factor on the queries is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, with_defaults
from ._decoder import DecoderConfig
from .mistral import parse_mistral

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=131072,
    intermediate_size=14336,
    num_hidden_layers=34,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=262144,
    rms_norm_eps=1e-5,
)
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = {**config, "rope_parameters": ROPE}
    return parse_mistral(ConfigReader(config, KEYS), default_window=None)


architecture = decoder(parse)
