"""Qwen3 (https://arxiv.org/abs/2505.09388): queries and keys normalised per head, and a head size of its own."""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from .llama import Config, Model, ModelBuilder, parse_decoder, spec
from .qwen2 import DEFAULTS as QWEN2_DEFAULTS
from .qwen2 import qwen_windows

__all__ = ["Config", "Model", "ModelBuilder", "parse", "spec"]

DEFAULTS = QWEN2_DEFAULTS | {"head_dim": 128}
"""See ``llama.DEFAULTS``."""


def parse(config: dict[str, Any]) -> Config:
    """Qwen3's configuration, where the head size does not follow from the hidden size."""
    read = ConfigReader(config, DEFAULTS)
    bias = read.flag("attention_bias", False)
    return parse_decoder(read, windows=qwen_windows(read), qkv_bias=bias, o_bias=bias, qk_norm=True)
