"""Cohere's Command R (https://docs.cohere.com/docs/command-r): attention and feed-forward layer read one LayerNorm.

The norm has no bias, neighbouring elements of a head are rotated against each other, and the logits are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, flag, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import Rotary, parse_rotary
from .parts.norms import NormKind

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


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    if read.value(flag("use_qk_norm", False)):
        read.problem("use_qk_norm", "use_qk_norm is true; LayerNorms of single heads are not supported")
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=500000.0, interleaved=True)
    return cohere_model(read, [(None, rotary)] * read.fields["layers"])


def cohere_model(read: ConfigReader, layers: Sequence[tuple[int | None, Rotary | None]]) -> DecoderConfig:
    """The configuration; ``layers`` has the window and the rotation of each layer."""
    fields, kind = read.checked_fields(), NormKind.LAYER_WITHOUT_BIAS
    attention, mlp = llama.attention(fields), llama.feed_forward(fields)
    return llama.model(
        fields,
        [llama.parallel(fields, replace(attention, window=w, rotary=r), mlp, kind) for w, r in layers],
        kind,
        output={"multiplier": fields["logits_multiplier"]},
    )


architecture = decoder(parse)
