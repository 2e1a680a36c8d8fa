"""Qwen3 (https://arxiv.org/abs/2505.09388): queries and keys normalised per head, and a head size of its own."""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from .llama import Config, Model, parse_decoder, spec
from .qwen2 import qwen_window

__all__ = ["Config", "Model", "parse", "spec"]


def parse(config: dict[str, Any]) -> Config:
    """Qwen3's configuration; an absent ``head_dim`` means 128."""
    read = ConfigReader(config)
    window, first = qwen_window(read)
    bias = read.flag("attention_bias", False)
    return parse_decoder(
        read,
        window=window,
        first_windowed=first,
        context_length=32768,
        default_kv_heads=32,
        default_head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )
