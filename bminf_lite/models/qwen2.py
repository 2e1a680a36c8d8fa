"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): LLaMA with biases on query, key and value."""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from .llama import DEFAULTS as LLAMA_DEFAULTS
from .llama import Config, Model, ModelBuilder, parse_decoder, spec

__all__ = ["Config", "Model", "ModelBuilder", "parse", "spec"]

DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
"""See ``llama.DEFAULTS``."""

LAYER_TYPES = ("full_attention", "sliding_attention")


def parse(config: dict[str, Any]) -> Config:
    """Qwen2's configuration, with biases on query, key and value and none on the output."""
    read = ConfigReader(config, DEFAULTS)
    return parse_decoder(read, windows=qwen_windows(read), qkv_bias=True)


def qwen_windows(read: ConfigReader) -> tuple[int | None, ...]:
    """Each layer's window, which counts only with ``use_sliding_window``.

    ``layer_types`` says which layers have it; without that key, those from ``max_window_layers`` on.
    """
    layers = read.layers()
    window = read.config["sliding_window"]
    if not read.flag("use_sliding_window", False) or window is None:
        return (None,) * layers
    window = read.integer("sliding_window")
    types = read.config.get("layer_types")
    if types is None:
        first = read.integer("max_window_layers", low=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or not all(t in LAYER_TYPES for t in types):
        read.problem("layer_types", f"layer_types is {types!r}, not {layers} times one of {', '.join(LAYER_TYPES)}")
        return (None,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)
