"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): LLaMA with biases on query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, flag, integer, layer_types, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary

KEYS = with_defaults(
    llama.KEYS, vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768
)
WINDOW = integer("sliding_window", 4096)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    windows = qwen_windows(read)
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    attention, mlp = llama.attention(fields, rotary=rotary, qkv_bias=True), llama.feed_forward(fields)
    return llama.model(fields, [llama.pre_norm(fields, replace(attention, window=w), mlp) for w in windows])


def qwen_windows(read: ConfigReader) -> tuple[int | None, ...]:
    """Each layer's window, which counts only with ``use_sliding_window``.

    ``layer_types`` says which layers have it; without that key, those from ``max_window_layers`` on.
    """
    layers: int = read.fields["layers"]
    if not read.value(flag("use_sliding_window", False)) or read.is_null(WINDOW):
        return (None,) * layers
    window, first = read.value(WINDOW), layers
    if read.config.get("layer_types") is None:
        first = read.value(integer("max_window_layers", 28, low=0))
    types = layer_types(read, [SLIDING if layer >= first else FULL for layer in range(layers)])
    return tuple(window if kind == SLIDING else None for kind in types)


architecture = decoder(parse)
