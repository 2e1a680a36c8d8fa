"""CPM-1 (https://arxiv.org/abs/2012.00413): a Chinese GPT-2 of 2.6 billion parameters, under names of its own.

The tensors have the names of the published model-parallel checkpoint, its shards merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._config import MAX_LAYERS, ConfigReader, integer, number
from ._gpt import Config, TensorNames, gpt_architecture

KEYS = {
    "vocab_size": integer("vocab_size", 30000),
    "hidden_size": integer("hidden_size", 2560),
    "layers": integer("num_hidden_layers", 32, high=MAX_LAYERS),
    "heads": integer("num_attention_heads", 32),
    "context_length": integer("max_position_embeddings", 1024),
    "norm_eps": number("layer_norm_epsilon", 1e-5, high=1.0),
}
"""A ``config.json`` of this project's own; the defaults are the published model."""

NAMES = TensorNames(
    embedding="word_embeddings",
    positions="position_embeddings",
    layers="transformer.layers",
    final_norm="transformer.final_layernorm",
    head="lm_head",
    attention_norm="input_layernorm",
    qkv=("attention.query_key_value",),
    attention_out="attention.dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    read.reject_unknown_keys()
    read.require_divisible("hidden_size", "heads")
    fields = read.checked_fields()
    size = fields["hidden_size"]
    return Config(
        **fields, embedding_size=size, intermediate_size=4 * size, activation="gelu_tanh", tied_head=True, names=NAMES
    )


architecture = gpt_architecture(parse)
