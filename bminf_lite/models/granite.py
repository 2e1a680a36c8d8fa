"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): LLaMA with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, number
from ._decoder import DecoderConfig
from ._rotary import parse_rotary

KEYS = (
    llama.KEYS
    | llama.BIASES
    | {
        "embedding_multiplier": number("embedding_multiplier", 1.0, low=1e-30),
        "residual_multiplier": number("residual_multiplier", 1.0, low=1e-30),
        "score_scale": number("attention_multiplier", 1.0, low=1e-30),
    }
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    divisor = read.value(number("logits_scaling", 1.0, low=1e-30))
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    multiplier = fields["residual_multiplier"]
    attention = llama.attention(fields, rotary=rotary, score_scale=fields["score_scale"], multiplier=multiplier)
    mlp = llama.feed_forward(fields, multiplier=multiplier)
    return llama.model(
        fields,
        [llama.pre_norm(fields, attention, mlp)] * fields["layers"],
        input={"multiplier": fields["embedding_multiplier"]},
        output={"multiplier": 1 / divisor},
    )


architecture = decoder(parse)
