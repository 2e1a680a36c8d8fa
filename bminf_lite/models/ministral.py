"""Ministral of 2024 (https://mistral.ai/news/ministraux): Mistral with a window on some of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama, mistral
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, integer, layer_types
from ._decoder import DecoderConfig
from ._rotary import parse_rotary

WINDOW = 4096


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, mistral.KEYS)
    has_windows = read.config.get("sliding_window", WINDOW) is not None
    windows = windows_of_types(read, WINDOW, [SLIDING if has_windows else FULL] * read.fields["layers"])
    return parse_windows(read, windows)


def windows_of_types(read: ConfigReader, default_window: int, default_types: list[str]) -> list[int | None]:
    """Each layer's window: ``sliding_window`` in the layers that ``layer_types`` names.

    The defaults are those of these two keys.
    """
    window: int | None = read.value_or_none(integer("sliding_window", default_window))
    return [window if kind == SLIDING else None for kind in layer_types(read, default_types)]


def parse_windows(read: ConfigReader, windows: list[int | None], theta: float = 10000.0) -> DecoderConfig:
    """A model of LLaMA's family whose layers have these ``windows``; ``theta`` is the default of ``rope_theta``."""
    llama.check_heads(read)
    rotary = parse_rotary(read, theta)
    fields = read.checked_fields()
    attention, mlp = llama.attention(fields, rotary=rotary), llama.feed_forward(fields)
    return llama.model(fields, [llama.pre_norm(fields, replace(attention, window=own), mlp) for own in windows])


architecture = decoder(parse)
