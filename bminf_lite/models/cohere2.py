"""Cohere's Command R7B and Command A (https://arxiv.org/abs/2504.00698): Command R with windows on most layers.

The layers without a window have no rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, integer, layer_types
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .cohere import KEYS, cohere_model

WINDOW = integer("sliding_window", 4096)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    pattern = read.value(integer("sliding_window_pattern", 4))
    types = layer_types(read, [SLIDING if (i + 1) % pattern else FULL for i in range(read.fields["layers"])])
    window = read.value_or_none(WINDOW)
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=10000.0, interleaved=True)
    windows = [window if kind == SLIDING else None for kind in types]
    return cohere_model(read, [(w, rotary if w is not None else None) for w in windows])


architecture = decoder(parse)
