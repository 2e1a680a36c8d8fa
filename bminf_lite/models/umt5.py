"""UMT5 (https://openreview.net/forum?id=kXwdL1cWOAi): mT5 with a table of relative biases in every layer."""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from ._encoder_decoder import Config, Model, ModelBuilder, spec
from .mt5 import DEFAULTS
from .t5 import parse_t5

__all__ = ["Config", "Model", "ModelBuilder", "parse", "spec"]


def parse(config: dict[str, Any]) -> Config:
    """UMT5's configuration."""
    read = ConfigReader(config, DEFAULTS)
    return parse_t5(read, read.flag("tie_word_embeddings", True), biases_per_layer=True)
