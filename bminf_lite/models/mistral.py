"""Mistral (https://arxiv.org/abs/2310.06825): LLaMA with sliding-window attention and eight key-value heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary

KEYS = with_defaults(llama.KEYS, intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=4096 * 32)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """Mistral's configuration: every layer has the window, or none where ``sliding_window`` is null."""
    return parse_mistral(ConfigReader(config, KEYS), default_window=4096)


def parse_mistral(read: ConfigReader, default_window: int | None) -> DecoderConfig:
    """The configuration with the window ``sliding_window`` in every layer."""
    window = read.value_or_none(integer("sliding_window", default_window))
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary, window=window)
    return llama.model(fields, [llama.pre_norm(fields, attention, llama.feed_forward(fields))] * fields["layers"])


architecture = decoder(parse)
