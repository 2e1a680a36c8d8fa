"""Falcon (https://arxiv.org/abs/2311.16867): few key-value heads, in one matrix with the queries.

Attention and feed-forward layer of a block read the same residual stream, in some models the same norm of it. Some
models have ALiBi instead of a rotation. transformers rounds its biases to bf16, which makes them steps beyond 256
tokens; here only the slopes are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes

from ..layers.alibi import alibi_slopes
from . import llama
from ._architecture import decoder
from ._config import ACTIVATIONS, MAX_LAYERS, ConfigReader, choice, flag, integer, number
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.attention import grouped_rows
from .parts.norms import NormKind

KEYS = {
    "vocab_size": integer("vocab_size", 65024),
    "hidden_size": integer("hidden_size", 4544),
    "layers": integer("num_hidden_layers", 32, high=MAX_LAYERS),
    "heads": integer("num_attention_heads", 71),
    "kv_heads": integer("num_kv_heads", derive=lambda fields: fields["heads"]),
    "intermediate_size": integer("ffn_hidden_size", derive=lambda fields: 4 * fields["hidden_size"]),
    "context_length": integer("max_position_embeddings", 2048),
    "norm_eps": number("layer_norm_epsilon", 1e-5, high=1.0),
    "activation": choice("activation", "gelu", ACTIVATIONS),
    "tied_head": flag("tie_word_embeddings", True),
    "parallel": flag("parallel_attn", True),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    if config.get("n_embed") is not None:
        config = {**config, "hidden_size": config["n_embed"]}
    read = ConfigReader(config, KEYS)
    fields = read.fields
    new, has_bias = read.value(flag("new_decoder_architecture", False)), read.value(flag("bias", False))
    norms = read.value(integer("num_ln_in_parallel_attn", 2 if new else 1, low=1, high=2, required=False)) or 1
    if config.get("num_ln_in_parallel_attn") is None:
        norms = 2 if new else 1
    if not new:
        fields["kv_heads"] = 1 if read.value(flag("multi_query", True)) else fields["heads"]
    fields["parallel"] = fields["parallel"] or new
    read.require_divisible("hidden_size", "heads")
    read.require_divisible("heads", "kv_heads")
    fields["head_dim"] = max(fields["hidden_size"] // fields["heads"], 1)
    odd = f"hidden_size ({fields['hidden_size']}) gives heads of {fields['head_dim']} elements, an odd number"
    read.require(fields["head_dim"] % 2 == 0, odd, "hidden_size", "num_attention_heads")
    has_alibi = read.value(flag("alibi", False))
    rotary = None if has_alibi else parse_rotary(read)
    fields, kind = read.checked_fields(), NormKind.LAYER
    slopes: tuple[float, ...] = ()
    if has_alibi:
        rounded = alibi_slopes(fields["heads"]).astype(ml_dtypes.bfloat16)
        slopes = tuple(float(slope) * fields["head_dim"] ** -0.5 for slope in rounded)  # they are scaled like scores
    attention = llama.attention(
        fields,
        rotary=rotary,
        slopes=slopes,
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        qkv_bias=has_bias,
        out_bias=has_bias,
        fused_rows=grouped_rows,
    )
    inner, down = ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"
    mlp = llama.feed_forward(fields, gated=False, inner=inner, down=down, bias=has_bias)
    if not fields["parallel"]:
        layer = llama.pre_norm(fields, attention, mlp, kind)
    elif new and norms == 2:
        layer = llama.parallel(fields, attention, mlp, kind, ("ln_attn", "ln_mlp"))
    else:
        layer = llama.parallel(fields, attention, mlp, kind)
    names = {"embedding": "transformer.word_embeddings", "final_norm": "transformer.ln_f"}
    return llama.model(fields, [layer] * fields["layers"], kind, names=names, prefix="transformer.h")


architecture = decoder(parse)
