"""Mistral (https://arxiv.org/abs/2310.06825): LLaMA with sliding-window attention and four key-value groups."""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from .llama import Config, Model, parse_decoder, spec

__all__ = ["Config", "Model", "parse", "spec"]


def parse(config: dict[str, Any]) -> Config:
    """Mistral's configuration; an absent ``sliding_window`` means 4096, null means none."""
    read = ConfigReader(config)
    window = None
    if config.get("sliding_window", 4096) is not None:
        window = read.integer("sliding_window", 4096)
    return parse_decoder(read, window=window, context_length=4096 * 32, default_kv_heads=8)
