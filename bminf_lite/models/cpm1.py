"""CPM-1 (https://arxiv.org/abs/2012.00413): a Chinese GPT-2 of 2.6 billion parameters, under names of its own.

The tensors have the names of the published model-parallel checkpoint, its shards merged.
"""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from ._gpt import Config, Model, ModelBuilder, TensorNames, spec

__all__ = ["Config", "Model", "ModelBuilder", "parse", "spec"]

DEFAULTS = {
    "vocab_size": 30000,
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 1024,
    "layer_norm_epsilon": 1e-5,
}
"""The published model."""

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


def parse(config: dict[str, Any]) -> Config:
    """Our own ``config.json``: the keys of ``DEFAULTS``, and no others but what every checkpoint may say."""
    read = ConfigReader(config, DEFAULTS)
    read.reject_unknown_keys(DEFAULTS)
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    read.require_divisible("num_attention_heads", heads, "hidden_size", hidden)
    layers = read.layers()
    result = Config(
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=4 * hidden,
        layers=layers,
        heads=heads,
        context_length=read.integer("max_position_embeddings"),
        norm_eps=read.number("layer_norm_epsilon", 1e-5, high=1.0),
        activation="gelu_tanh",
        tied_head=True,
        scales=(max(hidden // heads, 1) ** -0.5,) * layers,
        names=NAMES,
    )
    read.raise_problems()
    return result
