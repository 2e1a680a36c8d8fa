"""OPT (https://arxiv.org/abs/2205.01068), and Galactica, which shares its architecture.

Positions start at row 2 of their table. The model of 350 million parameters differs from the others: it normalises
after each layer, has no final norm, and its embedding is narrower than its layers, with projections between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._config import ACTIVATIONS, MAX_LAYERS, ConfigReader, choice, flag, integer
from ._gpt import Config, TensorNames, gpt_architecture

KEYS = {
    "vocab_size": integer("vocab_size", 50272),
    "hidden_size": integer("hidden_size", 768),
    "embedding_size": integer("word_embed_proj_dim", derive=lambda fields: fields["hidden_size"]),
    "layers": integer("num_hidden_layers", 12, high=MAX_LAYERS),
    "intermediate_size": integer("ffn_dim", 3072),
    "context_length": integer("max_position_embeddings", 2048),
    "heads": integer("num_attention_heads", 12),
    "activation": choice("activation_function", "relu", ACTIVATIONS),
    "tied_head": flag("tie_word_embeddings", True),
    "norm_first": flag("do_layer_norm_before", True),
    "affine_norms": flag("layer_norm_elementwise_affine", True),
    "attention_bias": flag("enable_bias", True),
    "mlp_bias": flag("enable_bias", True),
}
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


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, KEYS)
    read.require_divisible("hidden_size", "heads")
    final_norm = read.fields["norm_first"] and not read.value(flag("_remove_final_layer_norm", False))
    return Config(**read.checked_fields(), norm_eps=1e-5, final_norm=final_norm, first_position=2, names=NAMES)


architecture = gpt_architecture(parse)
