"""GPT-NeoX (https://arxiv.org/abs/2204.06745) and Pythia (https://arxiv.org/abs/2304.01373).

Attention and feed-forward layer read the same residual stream, rotary positions turn the first part of each head only,
and the fused matrix holds query, key and value of one head after another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..layers.position import rope_frequencies, rope_parameters
from ._config import ConfigReader
from ._gpt import ACTIVATIONS, Config, Model, ModelBuilder, TensorNames, spec

__all__ = ["Config", "Model", "ModelBuilder", "parse", "spec"]

DEFAULTS = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "max_position_embeddings": 2048,
}
"""What transformers takes for a key that is absent."""

NAMES = TensorNames(
    embedding="gpt_neox.embed_in",
    positions="",
    layers="gpt_neox.layers",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    attention_norm="input_layernorm",
    qkv=("attention.query_key_value",),
    attention_out="attention.dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    ignored=(r".*attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
    aliases=((r"lm_head\.(.*)", r"embed_out.\1"),),
)


def parse(config: dict[str, Any]) -> Config:
    """GPT-NeoX's configuration, with the rotary keys of every version of transformers."""
    read = ConfigReader(config, DEFAULTS)
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    layers, context = read.layers(), read.integer("max_position_embeddings")
    read.require_divisible("num_attention_heads", heads, "hidden_size", hidden)
    head_dim = max(hidden // heads, 1)
    rotated, frequencies, rope_scale = rotary(read, head_dim, context)
    result = Config(
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        context_length=context,
        norm_eps=read.number("layer_norm_eps", 1e-5, high=1.0),
        activation=read.choice("hidden_act", "gelu", ACTIVATIONS),
        tied_head=read.flag("tie_word_embeddings", False),
        scales=(head_dim**-0.5,) * layers,
        names=NAMES,
        parallel=read.flag("use_parallel_residual", True),
        attention_bias=read.flag("attention_bias", True),
        rotary=frequencies,
        rotary_size=rotated,
        rope_scale=rope_scale,
        interleaved_qkv=True,
    )
    read.raise_problems()
    return result


def rotary(read: ConfigReader, head_dim: int, context: int) -> tuple[int, tuple[float, ...], float]:
    """How many elements of a head are rotated, a frequency per pair of all its elements, and the rotation's scale."""
    config = dict(read.config)
    found = config.get("rope_scaling") or config.get("rope_parameters")
    given = found.get("partial_rotary_factor") if isinstance(found, dict) else None
    part = read.number("rotary_pct", 0.25, high=1.0) if given is None else given
    rotated = int(head_dim * part) if isinstance(part, (int, float)) and 0 < part <= 1 else 0
    if rotated < 2 or rotated % 2 or head_dim % 2:
        read.problem("rotary_pct", f"rotary_pct ({part!r}) of heads of {head_dim} elements is not a number of pairs")
        return 0, (), 1.0
    if isinstance(found, dict) and given is not None:
        config["rope_scaling"] = {k: v for k, v in found.items() if k != "partial_rotary_factor"}
    config.pop("partial_rotary_factor", None)
    try:
        parameters = rope_parameters(config, read.number("rotary_emb_base", 10000.0))
        frequencies, scale = rope_frequencies(parameters, rotated, context)
    except ValueError as error:
        read.problem("rope_parameters", str(error))
        return 0, (), 1.0
    if scale != 1 and rotated < head_dim:
        read.problem("rope_parameters", f"rope_type {parameters['rope_type']!r} scales rotations, of whole heads only")
    rest = np.zeros((head_dim - rotated) // 2, np.float32)
    return rotated, tuple(map(float, np.concatenate([frequencies, rest]))), scale
