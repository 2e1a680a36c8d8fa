"""OLMo 2 (https://arxiv.org/abs/2501.00656): the norms are behind the layers, and cover all queries and all keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, Fields, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.attention import QueryKeyNorm
from .parts.part import LayerParts, Part, Sublayer

BIASES = {"qkv_bias": llama.ATTENTION_BIAS, "o_bias": llama.ATTENTION_BIAS}
KEYS = with_defaults(llama.KEYS, vocab_size=50304, rms_norm_eps=1e-5) | BIASES


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary, qk_norm=QueryKeyNorm.WHOLE)
    return llama.model(fields, [post_norm(fields, attention)] * fields["layers"])


def post_norm(fields: Fields, mixer: Part, mlp: Part | None = None) -> LayerParts:
    """A layer that reads the residual stream itself, and normalises what its parts add to it."""
    names = ("post_attention_layernorm", "post_feedforward_layernorm")
    return LayerParts(
        tuple(
            Sublayer(part, post_norm=llama.norm(fields, name))
            for part, name in zip((mixer, mlp or llama.feed_forward(fields)), names, strict=True)
        )
    )


architecture = decoder(parse)
