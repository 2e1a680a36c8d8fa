"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): LLaMA with biases on query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ConfigReader, flag, integer, with_defaults
from ._transformer import Config

KEYS = with_defaults(
    llama.KEYS, vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768
)
WINDOW = integer("sliding_window", 4096)
LAYER_TYPES = ("full_attention", "sliding_attention")


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    windows = qwen_windows(read)
    return replace(llama.parse_family(read), windows=windows, qkv_bias=True)


def qwen_windows(read: ConfigReader) -> tuple[int | None, ...]:
    """Each layer's window, which counts only with ``use_sliding_window``.

    ``layer_types`` says which layers have it; without that key, those from ``max_window_layers`` on.
    """
    layers: int = read.fields["layers"]
    if not read.value(flag("use_sliding_window", False)) or read.is_null(WINDOW):
        return (None,) * layers
    window = read.value(WINDOW)
    types = read.config.get("layer_types")
    if types is None:
        first = read.value(integer("max_window_layers", 28, low=0))
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or not all(t in LAYER_TYPES for t in types):
        read.problem("layer_types", f"layer_types is {types!r}, not {layers} times one of {', '.join(LAYER_TYPES)}")
        return (None,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


architecture = replace(llama.architecture, parse=parse)
