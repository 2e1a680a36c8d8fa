"""Mistral (https://arxiv.org/abs/2310.06825): LLaMA with sliding-window attention and eight key-value heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ConfigReader, integer, with_defaults
from ._transformer import Config

KEYS = with_defaults(llama.KEYS, intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=4096 * 32)


def parse(config: Mapping[str, Any]) -> Config:
    """Mistral's configuration: every layer has the window, or none where ``sliding_window`` is null."""
    read = ConfigReader(config, KEYS)
    windows = all_windows(read, default=4096)
    return replace(llama.parse_family(read), windows=windows)


def all_windows(read: ConfigReader, default: int | None) -> tuple[int | None, ...]:
    """The window ``sliding_window`` in every layer."""
    window, layers = read.value_or_none(integer("sliding_window", default)), read.fields["layers"]
    return tuple(window for _ in range(layers))


architecture = replace(llama.architecture, parse=parse)
