"""mT5 (https://arxiv.org/abs/2010.11934): T5 1.1 for many languages, whose head is always a matrix of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import t5
from ._config import ConfigReader, with_defaults
from ._encoder_decoder import Config

KEYS = with_defaults(t5.KEYS, vocab_size=250112, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu")


def parse(config: Mapping[str, Any]) -> Config:
    """mT5's configuration. Its key about tying is ignored: it differs between versions, and all files have a head."""
    return t5.parse_t5(ConfigReader(config, KEYS), tied_head=False)


architecture = replace(t5.architecture, parse=parse)
