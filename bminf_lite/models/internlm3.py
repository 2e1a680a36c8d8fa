"""InternLM3 (https://github.com/InternLM/InternLM): LLaMA with names of its own for its biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, with_defaults
from ._decoder import DecoderConfig

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=128512,
    intermediate_size=10240,
    num_hidden_layers=48,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
)
NAMES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
"""InternLM3's names, and LLaMA's, which newer files may have."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    named = {new: config[own] for own, new in NAMES.items() if own in config}
    read = ConfigReader({**config, **named}, KEYS | llama.BIASES)
    biases = read.fields["qkv_bias"], read.fields["mlp_bias"]
    read.require(biases[0] == biases[1], f"qkv_bias ({biases[0]}) is not bias ({biases[1]}), as models have it", *NAMES)
    return llama.parse_family(read)


architecture = decoder(parse)
