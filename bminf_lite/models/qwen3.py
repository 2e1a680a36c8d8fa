"""Qwen3 (https://arxiv.org/abs/2505.09388): queries and keys normalised per head, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama, qwen2
from ._config import ConfigReader, with_defaults
from ._transformer import Config, QueryKeyNorm

BIASES = {"qkv_bias": llama.ATTENTION_BIAS, "o_bias": llama.ATTENTION_BIAS}
KEYS = with_defaults(qwen2.KEYS, head_dim=128) | BIASES


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    windows = qwen2.qwen_windows(read)
    return replace(llama.parse_family(read), windows=windows, qk_norm=QueryKeyNorm.HEAD)


architecture = replace(llama.architecture, parse=parse)
