"""BLOOM (https://arxiv.org/abs/2211.05100): ALiBi instead of positions, and a norm behind the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layers.alibi import alibi_slopes
from . import llama
from ._architecture import decoder
from ._config import MAX_LAYERS, ConfigReader, flag, integer, number
from ._decoder import DecoderConfig
from .parts.attention import grouped_rows
from .parts.norms import NormKind

KEYS = {
    "vocab_size": integer("vocab_size", 250880),
    "hidden_size": integer("hidden_size", 64),
    "layers": integer("n_layer", 2, high=MAX_LAYERS),
    "heads": integer("n_head", 8),
    "context_length": integer("seq_length", 2048),
    "norm_eps": number("layer_norm_epsilon", 1e-5, high=1.0),
    "tied_head": flag("tie_word_embeddings", True),
}
OLDER_KEYS = {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    renamed = {new: config[old] for old, new in OLDER_KEYS.items() if config.get(old) is not None}
    read = ConfigReader({**config, **renamed}, KEYS)
    fields = read.fields
    if read.value(flag("apply_residual_connection_post_layernorm", False)):
        text = "apply_residual_connection_post_layernorm is true; a residual stream of norms is not supported"
        read.problem("apply_residual_connection_post_layernorm", text)
    read.require_divisible("hidden_size", "heads")
    fields["head_dim"] = max(fields["hidden_size"] // fields["heads"], 1)
    odd = f"hidden_size ({fields['hidden_size']}) gives heads of {fields['head_dim']} elements, an odd number"
    read.require(fields["head_dim"] % 2 == 0, odd, "hidden_size", "n_head")
    fields["kv_heads"], fields["intermediate_size"] = fields["heads"], 4 * fields["hidden_size"]
    fields["activation"] = "gelu_tanh"
    fields, kind = read.checked_fields() | {"activation": "gelu_tanh"}, NormKind.LAYER
    attention = llama.attention(
        fields,
        slopes=tuple(map(float, alibi_slopes(fields["heads"]))),
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        qkv_bias=True,
        out_bias=True,
        fused_rows=grouped_rows,
    )
    inner, down = ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"
    mlp = llama.feed_forward(fields, gated=False, inner=inner, down=down, bias=True)
    return llama.model(
        fields,
        [llama.pre_norm(fields, attention, mlp, kind)] * fields["layers"],
        kind,
        names={"embedding": "transformer.word_embeddings", "final_norm": "transformer.ln_f"},
        input={"norm": llama.norm(fields, "transformer.word_embeddings_layernorm", kind)},
        prefix="transformer.h",
        aliases=((r"((?:word_embeddings|word_embeddings_layernorm|h|ln_f)\..*)", r"transformer.\1"),),
    )


architecture = decoder(parse)
