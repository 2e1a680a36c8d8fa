"""Cohere's Command R (https://docs.cohere.com/docs/command-r): attention and feed-forward layer read one LayerNorm.

The norm has no bias, neighbouring elements of a head are rotated against each other, and the logits are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ConfigReader, flag, number, with_defaults
from ._rotary import Rotary, parse_rotary
from ._transformer import Config, NormKind, TensorNames

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=256000,
    hidden_size=8192,
    intermediate_size=22528,
    num_hidden_layers=40,
    num_attention_heads=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
) | {
    "norm_eps": number("layer_norm_eps", 1e-5, high=1.0),
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
    "logits_multiplier": number("logit_scale", 0.0625, low=1e-30),
}
NAMES = TensorNames(mlp_norm=None)


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    if read.value(flag("use_qk_norm", False)):
        read.problem("use_qk_norm", "use_qk_norm is true; LayerNorms of single heads are not supported")
    return parse_cohere(read, theta=500000.0)[0]


def parse_cohere(read: ConfigReader, theta: float) -> tuple[Config, Rotary | None]:
    """The configuration without windows, and its rotation; ``theta`` is the default of ``rope_theta``."""
    llama.check_heads(read)
    rotary = parse_rotary(read, theta, interleaved=True)
    config = llama.family_config(read, rotary)
    return replace(config, names=NAMES, parallel=True, norm_kind=NormKind.LAYER_WITHOUT_BIAS), rotary


architecture = replace(llama.architecture, parse=parse)
