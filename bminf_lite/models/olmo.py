"""OLMo 1 (https://arxiv.org/abs/2402.00838): LLaMA whose LayerNorms have neither a weight nor a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama, olmoe
from ._architecture import decoder
from ._config import ConfigReader, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.norms import NormKind

EPS = 1e-5
"""The epsilon of all norms, which no file states."""
KEYS = {key: value for key, value in with_defaults(llama.KEYS, vocab_size=50304).items() if key != "norm_eps"} | {
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    olmoe.reject_clipping(read)
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields, kind = read.checked_fields() | {"norm_eps": EPS}, NormKind.LAYER_WITHOUT_WEIGHT
    attention, mlp = llama.attention(fields, rotary=rotary), llama.feed_forward(fields)
    return llama.model(fields, [llama.pre_norm(fields, attention, mlp, kind)] * fields["layers"], kind)


architecture = decoder(parse)
