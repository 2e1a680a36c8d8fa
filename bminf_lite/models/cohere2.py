"""Cohere's Command R7B and Command A (https://arxiv.org/abs/2504.00698): Command R with windows on most layers.

The layers without a window have no rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ConfigReader, integer
from ._transformer import FULL, SLIDING, Config, layer_types
from .cohere import KEYS, parse_cohere

WINDOW = integer("sliding_window", 4096)


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    pattern = read.value(integer("sliding_window_pattern", 4))
    types = layer_types(read, [SLIDING if (i + 1) % pattern else FULL for i in range(read.fields["layers"])])
    window = read.value_or_none(WINDOW)
    parsed, rotary = parse_cohere(read, theta=10000.0)
    windows = tuple(window if kind == SLIDING else None for kind in types)
    return replace(parsed, windows=windows, rotary=tuple(rotary if w is not None else None for w in windows))


architecture = replace(llama.architecture, parse=parse)
