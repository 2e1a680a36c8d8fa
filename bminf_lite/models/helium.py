"""Helium (https://arxiv.org/abs/2410.00037): LLaMA whose heads are rotated in pairs of neighbouring elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, flag, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary

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


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=100000.0, interleaved=True)
    fields = read.checked_fields()
    attention, mlp = llama.attention(fields, rotary=rotary), llama.feed_forward(fields)
    return llama.model(fields, [llama.pre_norm(fields, attention, mlp)] * fields["layers"])


architecture = decoder(parse)
