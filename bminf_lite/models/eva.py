"""EVA (https://arxiv.org/abs/2108.01547) and EVA 2 (https://arxiv.org/abs/2203.09313): Chinese dialogue models.

CPM-2 at another size. EVA 2 scales attention scores by ``1 / sqrt(d_kv)``, which ``attn_scale`` says.
"""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from .cpm2 import DEFAULTS as CPM2_DEFAULTS
from .cpm2 import Config, Model, ModelBuilder, parse_cpm, spec

__all__ = ["Config", "Model", "ModelBuilder", "parse", "spec"]

DEFAULTS = CPM2_DEFAULTS | {
    "vocab_size": 30000,
    "d_model": 2048,
    "d_ff": 5120,
    "num_heads": 32,
    "attn_scale": False,
}
"""The published model, the first version."""


def parse(config: dict[str, Any]) -> Config:
    """Our own ``config.json``: the keys of ``DEFAULTS``, and no others but what every checkpoint may say."""
    read = ConfigReader(config, DEFAULTS)
    read.reject_unknown_keys(DEFAULTS)
    return parse_cpm(read, scaled_scores=read.flag("attn_scale", False))
