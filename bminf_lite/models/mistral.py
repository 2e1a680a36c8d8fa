"""Mistral (https://arxiv.org/abs/2310.06825): LLaMA with sliding-window attention and four key-value groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ConfigReader, integer, with_defaults
from ._transformer import Config

KEYS = with_defaults(llama.KEYS, intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=4096 * 32)
WINDOW = integer("sliding_window", 4096)


def parse(config: Mapping[str, Any]) -> Config:
    """Mistral's configuration: every layer has the window, or none where ``sliding_window`` is null."""
    read = ConfigReader(config, KEYS)
    window = None if read.is_null(WINDOW) else read.value(WINDOW)
    return replace(llama.parse_family(read), windows=(window,) * read.fields["layers"])


architecture = replace(llama.architecture, parse=parse)
