"""mT5 (https://arxiv.org/abs/2010.11934): T5 1.1 for many languages, whose head is always a matrix of its own."""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from ._encoder_decoder import Config, Model, ModelBuilder, spec
from .t5 import DEFAULTS as T5_DEFAULTS
from .t5 import parse_t5

__all__ = ["Config", "Model", "ModelBuilder", "parse", "spec"]

DEFAULTS = T5_DEFAULTS | {
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}
"""What transformers takes for a key that is absent."""


def parse(config: dict[str, Any]) -> Config:
    """mT5's configuration. What it says about tying differs between versions; the published files have a head."""
    return parse_t5(ConfigReader(config, DEFAULTS), tied=False)
