"""StableLM (https://arxiv.org/abs/2402.17834): LLaMA with LayerNorm and a rotation of a quarter of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, flag, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.norms import NormKind

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


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read, part=0.25)
    if read.value(flag("qk_layernorm", False)):
        read.problem("qk_layernorm", "qk_layernorm is true; LayerNorms of single heads are not supported")
    fields, kind = read.checked_fields(), NormKind.LAYER
    attention, mlp = llama.attention(fields, rotary=rotary), llama.feed_forward(fields)
    form = llama.parallel if fields["parallel"] else llama.pre_norm
    return llama.model(fields, [form(fields, attention, mlp, kind)] * fields["layers"], kind)


architecture = decoder(parse)
