"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): LLaMA with biases on query, key and value."""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from .llama import Config, Model, parse_decoder, spec

__all__ = ["Config", "Model", "parse", "spec"]


def parse(config: dict[str, Any]) -> Config:
    """Qwen2's configuration. The window counts only with ``use_sliding_window``, from ``max_window_layers`` on."""
    read = ConfigReader(config)
    window, first = qwen_window(read)
    return parse_decoder(
        read, window=window, first_windowed=first, context_length=32768, default_kv_heads=32, qkv_bias=True
    )


def qwen_window(read: ConfigReader) -> tuple[int | None, int]:
    """The window and the first layer that has it."""
    if not read.flag("use_sliding_window", False) or read.config.get("sliding_window", 4096) is None:
        return None, 0
    return read.integer("sliding_window", 4096), read.integer("max_window_layers", 28, low=0)
