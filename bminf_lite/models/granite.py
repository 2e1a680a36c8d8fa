"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): LLaMA with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ConfigReader, number
from ._transformer import Config

KEYS = (
    llama.KEYS
    | llama.BIASES
    | {
        "embedding_multiplier": number("embedding_multiplier", 1.0, low=1e-30),
        "residual_multiplier": number("residual_multiplier", 1.0, low=1e-30),
        "score_scale": number("attention_multiplier", 1.0, low=1e-30),
    }
)


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    divisor = read.value(number("logits_scaling", 1.0, low=1e-30))
    return replace(llama.parse_family(read), logits_multiplier=1 / divisor)


architecture = replace(llama.architecture, parse=parse)
