"""StarCoder2 (https://arxiv.org/abs/2402.19173): LayerNorm, biases, no gate in the feed-forward layer, a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ACTIVATIONS, ConfigReader, choice, flag, number, with_defaults
from ._transformer import Config, NormKind, TensorNames
from .mistral import all_windows

BIAS = flag("use_bias", True)
KEYS = with_defaults(
    llama.KEYS,
    vocab_size=49152,
    hidden_size=3072,
    intermediate_size=12288,
    num_hidden_layers=30,
    num_attention_heads=24,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
) | {
    "norm_eps": number("norm_epsilon", 1e-5, high=1.0),
    "activation": choice("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
    "qkv_bias": BIAS,
    "o_bias": BIAS,
    "mlp_bias": BIAS,
}
NAMES = TensorNames(mlp_in=("mlp.c_fc",), mlp_out="mlp.c_proj")


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    windows = all_windows(read, default=None)
    parsed = llama.parse_family(read)
    return replace(parsed, windows=windows, names=NAMES, norm_kind=NormKind.LAYER, gated=False)


architecture = replace(llama.architecture, parse=parse)
