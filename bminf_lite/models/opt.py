"""OPT (https://arxiv.org/abs/2205.01068), and Galactica, which shares its architecture.

Positions start at row 2 of their table. The model of 350 million parameters differs from the others: it normalises
after each layer, has no final norm, and its embedding is narrower than its layers, with projections between.
"""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from ._gpt import ACTIVATIONS, Config, Model, ModelBuilder, TensorNames, spec

__all__ = ["Config", "Model", "ModelBuilder", "parse", "spec"]

DEFAULTS = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
}
"""What transformers takes for a key that is absent."""

NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layers="model.decoder.layers",
    final_norm="model.decoder.final_layer_norm",
    head="lm_head",
    attention_norm="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
    project_in="model.decoder.project_in",
    project_out="model.decoder.project_out",
    aliases=((r"(decoder\..*)", r"model.\1"),),
)


def parse(config: dict[str, Any]) -> Config:
    """OPT's configuration."""
    read = ConfigReader(config, DEFAULTS)
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    layers = read.layers()
    read.require_divisible("num_attention_heads", heads, "hidden_size", hidden)
    bias = read.flag("enable_bias", True)
    norm_first = read.flag("do_layer_norm_before", True)
    result = Config(
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        embedding_size=read.integer("word_embed_proj_dim", hidden),
        intermediate_size=read.integer("ffn_dim"),
        layers=layers,
        heads=heads,
        context_length=read.integer("max_position_embeddings"),
        norm_eps=1e-5,
        activation=read.choice("activation_function", "relu", ACTIVATIONS),
        tied_head=read.flag("tie_word_embeddings", True),
        scales=(max(hidden // heads, 1) ** -0.5,) * layers,
        names=NAMES,
        first_position=2,
        norm_first=norm_first,
        final_norm=norm_first and not read.flag("_remove_final_layer_norm", False),
        affine_norms=read.flag("layer_norm_elementwise_affine", True),
        attention_bias=bias,
        mlp_bias=bias,
    )
    read.raise_problems()
    return result
