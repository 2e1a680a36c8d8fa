"""CPM-1 (https://arxiv.org/abs/2012.00413): a Chinese GPT-2 of 2.6 billion parameters, under names of its own.

The tensors have the names of the published model-parallel checkpoint, its shards merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import MAX_LAYERS, ConfigReader, integer, number
from ._decoder import DecoderConfig
from .parts.ends import PositionsPart
from .parts.norms import NormKind

KEYS = {
    "vocab_size": integer("vocab_size", 30000),
    "hidden_size": integer("hidden_size", 2560),
    "layers": integer("num_hidden_layers", 32, high=MAX_LAYERS),
    "heads": integer("num_attention_heads", 32),
    "context_length": integer("max_position_embeddings", 1024),
    "norm_eps": number("layer_norm_epsilon", 1e-5, high=1.0),
}
"""A ``config.json`` of this project's own; the defaults are the published model."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    read.reject_unknown_keys()
    read.require_divisible("hidden_size", "heads")
    fields, kind = read.checked_fields(), NormKind.LAYER
    fields |= {"kv_heads": fields["heads"], "head_dim": fields["hidden_size"] // fields["heads"], "tied_head": True}
    fields |= {"intermediate_size": 4 * fields["hidden_size"], "activation": "gelu_tanh"}
    qkv, out = ("attention.query_key_value",), "attention.dense"
    attention = llama.attention(fields, qkv=qkv, out=out, qkv_bias=True, out_bias=True)
    inner, down = ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"
    mlp = llama.feed_forward(fields, gated=False, inner=inner, down=down, bias=True)
    return llama.model(
        fields,
        [llama.pre_norm(fields, attention, mlp, kind)] * fields["layers"],
        kind,
        names={"embedding": "word_embeddings", "final_norm": "transformer.final_layernorm"},
        input={"positions": PositionsPart("position_embeddings", fields["context_length"])},
        prefix="transformer.layers",
        ignored=(),
    )


architecture = decoder(parse)
