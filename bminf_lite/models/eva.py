"""EVA (https://arxiv.org/abs/2108.01547) and EVA 2 (https://arxiv.org/abs/2203.09313): Chinese dialogue models.

CPM-2 at another size. EVA 2 scales attention scores by ``1 / sqrt(d_kv)``, which ``attn_scale`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import cpm2
from ._config import ConfigReader, flag, with_defaults
from ._encoder_decoder import Config

KEYS = with_defaults(cpm2.KEYS, vocab_size=30000, d_model=2048, d_ff=5120, num_heads=32) | {
    "scaled_scores": flag("attn_scale", False)
}
"""The defaults are the published model, the first version."""


def parse(config: Mapping[str, Any]) -> Config:
    return cpm2.parse_cpm(ConfigReader(config, KEYS))


architecture = replace(cpm2.architecture, parse=parse)
