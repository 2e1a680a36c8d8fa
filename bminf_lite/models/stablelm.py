"""StableLM (https://arxiv.org/abs/2402.17834): LLaMA with LayerNorm and a rotation of a quarter of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._config import ConfigReader, flag, number, with_defaults
from ._rotary import parse_rotary
from ._transformer import Config, NormKind, TensorNames

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=50304,
    intermediate_size=6912,
    hidden_size=2560,
    num_key_value_heads=32,
    max_position_embeddings=4096,
) | {
    "norm_eps": number("layer_norm_eps", 1e-5, high=1.0),
    "qkv_bias": flag("use_qkv_bias", False),
    "parallel": flag("use_parallel_residual", False),
}


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read, part=0.25)
    if read.value(flag("qk_layernorm", False)):
        read.problem("qk_layernorm", "qk_layernorm is true; LayerNorms of single heads are not supported")
    names = TensorNames(mlp_norm=None if read.fields["parallel"] else "post_attention_layernorm")
    return replace(llama.family_config(read, rotary), names=names, norm_kind=NormKind.LAYER)


architecture = replace(llama.architecture, parse=parse)
