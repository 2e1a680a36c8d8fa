"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): LLaMA with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, Fields, number
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.attention import AttentionPart

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
    llama.check_heads(read)
    return granite_model(read, [{"rotary": parse_rotary(read)}] * read.fields["layers"])


def granite_model(read: ConfigReader, layers: Sequence[Mapping[str, Any]]) -> DecoderConfig:
    """The configuration; ``layers`` has options of the attention of each layer."""
    divisor = read.value(number("logits_scaling", 1.0, low=1e-30))
    fields = read.checked_fields()
    mlp = llama.feed_forward(fields, multiplier=fields["residual_multiplier"])
    return llama.model(
        fields,
        [llama.pre_norm(fields, attention(fields, **own), mlp) for own in layers],
        input={"multiplier": fields["embedding_multiplier"]},
        output={"multiplier": 1 / divisor},
    )


def attention(fields: Fields, **others: Any) -> AttentionPart:
    """Attention with the multipliers of the family, and the ``others`` of its options."""
    return llama.attention(
        fields, score_scale=fields["score_scale"], multiplier=fields["residual_multiplier"], **others
    )


architecture = decoder(parse)
