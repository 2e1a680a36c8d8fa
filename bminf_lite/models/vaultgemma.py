"""VaultGemma (https://arxiv.org/abs/2510.15001): Gemma 2 without the norms behind the parts of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._architecture import decoder
from ._decoder import DecoderConfig
from .gemma2 import parse_gemma2


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    return parse_gemma2(config, post_norms=False)


architecture = decoder(parse)
