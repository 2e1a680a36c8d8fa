"""Granite MoE with windows (https://huggingface.co/ibm-granite): experts beside a shared one, attention sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import granite_swa, granitemoe, granitemoeshared
from ._architecture import decoder
from ._config import ConfigReader
from ._decoder import DecoderConfig

KEYS = granitemoeshared.KEYS


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    return granitemoe.granite_moe_model(read, granite_swa.attention_of_layers(read))


architecture = decoder(parse)
