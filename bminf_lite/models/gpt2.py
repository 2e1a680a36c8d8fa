"""GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019).

Its matrices are stored ``[in, out]`` (``Conv1D`` in transformers), query, key and value as one.
"""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from ._gpt import ACTIVATIONS, Config, Model, ModelBuilder, TensorNames, spec

__all__ = ["Config", "Model", "ModelBuilder", "parse", "spec"]

DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "layer_norm_epsilon": 1e-5,
}
"""What transformers takes for a key that is absent."""

NAMES = TensorNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    head="lm_head",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    attention_out="attn.c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    transposed=True,
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    aliases=((r"((?:wte|wpe|h|ln_f)\..*)", r"transformer.\1"),),
)


def parse(config: dict[str, Any]) -> Config:
    """GPT-2's configuration. Scores are scaled by ``1 / sqrt(head_dim)``, if asked for, and by the layer's number."""
    read = ConfigReader(config, DEFAULTS)
    hidden, heads = read.integer("n_embd"), read.integer("n_head")
    layers = read.integer("n_layer", high=4096)
    read.require_divisible("n_head", heads, "n_embd", hidden)
    if read.flag("add_cross_attention", False):
        read.problem("add_cross_attention", "add_cross_attention is true; cross-attention of GPT-2 is not supported")
    scale = max(hidden // heads, 1) ** -0.5 if read.flag("scale_attn_weights", True) else 1.0
    by_layer = read.flag("scale_attn_by_inverse_layer_idx", False)
    result = Config(
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=read.integer("n_inner", 4 * hidden),
        layers=layers,
        heads=heads,
        context_length=read.integer("n_positions"),
        norm_eps=read.number("layer_norm_epsilon", 1e-5, high=1.0),
        activation=read.choice("activation_function", "gelu_new", ACTIVATIONS),
        tied_head=read.flag("tie_word_embeddings", True),
        scales=tuple(scale / (layer + 1 if by_layer else 1) for layer in range(layers)),
        names=NAMES,
    )
    read.raise_problems()
    return result
