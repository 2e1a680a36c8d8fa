"""OLMo 2 (https://arxiv.org/abs/2501.00656): the norms are behind the layers, and cover all queries and all keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ConfigReader, with_defaults
from ._transformer import Config, QueryKeyNorm, TensorNames

BIASES = {"qkv_bias": llama.ATTENTION_BIAS, "o_bias": llama.ATTENTION_BIAS}
KEYS = with_defaults(llama.KEYS, vocab_size=50304, rms_norm_eps=1e-5) | BIASES
NAMES = TensorNames(
    attention_norm=None,
    mlp_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def parse(config: Mapping[str, Any]) -> Config:
    return replace(llama.parse_family(ConfigReader(config, KEYS)), names=NAMES, qk_norm=QueryKeyNorm.WHOLE)


architecture = replace(llama.architecture, parse=parse)
