"""ERNIE 4.5 without experts (https://github.com/PaddlePaddle/ERNIE): LLaMA that rotates neighbouring elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, flag, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary

BIAS = flag("use_bias", False)
KEYS = with_defaults(
    llama.KEYS,
    vocab_size=103424,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=18,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
) | {"qkv_bias": BIAS, "o_bias": BIAS, "mlp_bias": BIAS}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=500000.0, interleaved=True)
    fields = read.checked_fields()
    attention, mlp = llama.attention(fields, rotary=rotary), llama.feed_forward(fields)
    return llama.model(fields, [llama.pre_norm(fields, attention, mlp)] * fields["layers"])


architecture = decoder(parse)
