"""Granite MoE with a shared expert (https://huggingface.co/ibm-granite): Granite 3 MoE, and a layer for every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import granitemoe
from ._architecture import decoder
from ._config import ConfigReader, integer
from ._decoder import DecoderConfig

KEYS = granitemoe.KEYS | {"shared_size": integer("shared_intermediate_size", 0, low=0)}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    return granitemoe.parse_granite_moe(ConfigReader(config, KEYS))


architecture = decoder(parse)
