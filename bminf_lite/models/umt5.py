"""UMT5 (https://openreview.net/forum?id=kXwdL1cWOAi): mT5 with a table of relative biases in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import mt5, t5
from ._config import ConfigReader, flag
from ._encoder_decoder import Config


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, mt5.KEYS)
    tied_head = read.value(flag("tie_word_embeddings", True))
    return replace(t5.parse_t5(read, tied_head), biases_per_layer=True)


architecture = replace(t5.architecture, parse=parse)
