"""Mistral (https://arxiv.org/abs/2310.06825): LLaMA with sliding-window attention and four key-value groups."""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from .llama import DEFAULTS as LLAMA_DEFAULTS
from .llama import Config, Model, ModelBuilder, parse_decoder, spec

__all__ = ["Config", "Model", "ModelBuilder", "parse", "spec"]

DEFAULTS = LLAMA_DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
    "sliding_window": 4096,
}
"""See ``llama.DEFAULTS``."""


def parse(config: dict[str, Any]) -> Config:
    """Mistral's configuration; an absent ``sliding_window`` means 4096, null means none."""
    read = ConfigReader(config, DEFAULTS)
    window = None if read.config["sliding_window"] is None else read.integer("sliding_window")
    return parse_decoder(read, windows=(window,) * read.layers())
