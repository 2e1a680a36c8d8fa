"""BLOOM (https://arxiv.org/abs/2211.05100): ALiBi instead of positions, and a norm behind the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..layers.alibi import alibi_slopes
from . import llama
from ._config import MAX_LAYERS, ConfigReader, flag, integer, number
from ._transformer import Config, NormKind, TensorNames, grouped_rows

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
NAMES = TensorNames(
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    qkv=("self_attention.query_key_value",),
    attention_out="self_attention.dense",
    mlp_in=("mlp.dense_h_to_4h",),
    mlp_out="mlp.dense_4h_to_h",
    aliases=((r"((?:word_embeddings|word_embeddings_layernorm|h|ln_f)\..*)", r"transformer.\1"),),
)


def parse(config: Mapping[str, Any]) -> Config:
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
    return replace(
        llama.family_config(read, None),
        names=NAMES,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        norm_kind=NormKind.LAYER,
        fused_rows=grouped_rows,
        alibi_slopes=tuple(map(float, alibi_slopes(fields["heads"]))),
    )


architecture = replace(llama.architecture, parse=parse)
