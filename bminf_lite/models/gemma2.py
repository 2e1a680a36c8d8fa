"""Gemma 2 (https://arxiv.org/abs/2408.00118): four norms a layer, windows on every second one, and soft-caps.

Soft-caps limit attention scores and logits. The embedding is multiplied by the root of its size, rounded to the model's
own type as in transformers: a folder in bf16 says so in its ``dtype``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from . import llama
from ._architecture import decoder
from ._config import (
    ACTIVATIONS,
    FULL,
    SLIDING,
    ConfigReader,
    Key,
    choice,
    flag,
    integer,
    layer_types,
    number,
    with_defaults,
)
from ._decoder import DecoderConfig
from ._rotary import Rotary, parse_rotary
from .parts.attention import QueryKeyNorm
from .parts.cross_attention import in_both_directions
from .parts.part import LayerParts, Sublayer

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=256000,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
) | {
    "activation": choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
}
WINDOW = integer("sliding_window", 4096)
QUERY_SCALE = number("query_pre_attn_scalar", 256, low=1e-6)
ATTENTION_CAP = number("attn_logit_softcapping", 50.0, low=1e-3)
LOGITS_CAP = number("final_logit_softcapping", 30.0, low=1e-3)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
"""Types to which the factor of the embedding is rounded, by their names in ``config.json``."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    return parse_gemma2(config)


def parse_gemma2(config: Mapping[str, Any], post_norms: bool = True) -> DecoderConfig:
    """The configuration of a Gemma 2, whose parts may be without the norms behind them."""
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    types = layer_types(read, [FULL if i % 2 else SLIDING for i in range(read.fields["layers"])])
    rotary = parse_rotary(read)
    return parse_gemma(
        read, types, dict.fromkeys((FULL, SLIDING), rotary), ATTENTION_CAP, LOGITS_CAP, post_norms=post_norms
    )


def parse_gemma(
    read: ConfigReader,
    types: list[str],
    rotary: Mapping[str, Rotary | None],
    attention_cap: Key,
    logits_cap: Key,
    qk_norm: QueryKeyNorm = QueryKeyNorm.NONE,
    may_be_bidirectional: bool = False,
    post_norms: bool = True,
) -> DecoderConfig:
    """The configuration of a Gemma whose layers of each of the ``types`` have a rotation of their own.

    One that ``may_be_bidirectional`` sees whole texts if its configuration says so. Without ``post_norms`` a layer has
    no norms behind its parts.
    """
    is_bidirectional = read.value(flag("use_bidirectional_attention", False))
    if is_bidirectional and not may_be_bidirectional:
        read.problem("use_bidirectional_attention", "use_bidirectional_attention is true; only causal models are run")
    window, attention_softcap, logits_softcap = map(read.value_or_none, (WINDOW, attention_cap, logits_cap))
    score_scale = read.value(QUERY_SCALE) ** -0.5
    fields = read.checked_fields()
    attention = llama.attention(
        fields, score_scale=score_scale, softcap=attention_softcap, qk_norm=qk_norm, norm_offset=1.0
    )
    norms = (
        llama.norm(fields, f"{name}_layernorm", offset=1.0)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    )
    before, behind, before_mlp, behind_mlp = norms
    mlp = Sublayer(llama.feed_forward(fields), before_mlp, behind_mlp if post_norms else None)
    layers = []
    for kind in types:
        own = replace(attention, rotary=rotary[kind], window=window if kind == SLIDING else None)
        if is_bidirectional:
            half = None if own.window is None else own.window // 2 + 1  # in each direction
            own = in_both_directions(replace(own, window=half))
        layers.append(LayerParts((Sublayer(own, before, behind if post_norms else None), mlp)))
    return llama.model(
        fields, layers, offset=1.0, input={"multiplier": embedding_multiplier(read)}, output={"softcap": logits_softcap}
    )


def embedding_multiplier(read: ConfigReader) -> float:
    """The root of the embedding's size, in fp32 rounded to the ``dtype`` of the model."""
    dtype = str(read.config.get("dtype") or read.config.get("torch_dtype")).removeprefix("torch.")
    root = np.float32(read.fields["hidden_size"] ** 0.5)
    return float(root.astype(DTYPES.get(dtype, np.float32)))


architecture = decoder(parse)
