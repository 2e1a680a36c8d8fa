"""Mamba 2 and Mamba-Codestral (https://arxiv.org/abs/2405.21060): layers of Mamba 2 alone, without attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama, nemotron_h
from ._architecture import decoder
from ._config import MAX_HEAD_DIM, MAX_LAYERS, ConfigReader, flag, integer, number, with_defaults
from ._decoder import DecoderConfig
from .falcon_h1 import check_activation, step_limits
from .parts.part import LayerParts, Sublayer

KEYS = with_defaults(
    {field: llama.KEYS[field] for field in ("vocab_size", "hidden_size", "activation", "tied_head")},
    vocab_size=32768,
) | {
    "layers": integer("num_hidden_layers", 64, high=MAX_LAYERS),
    "context_length": integer("max_position_embeddings", 262144),  # no file has it: Codestral was tested up to there
    "norm_eps": number("layer_norm_epsilon", 1e-5, high=1.0),
    "mamba_bias": flag("use_bias", False),
    "conv_bias": flag("use_conv_bias", True),
    "state_dim": integer("state_size", 128, high=4096),
    "state_heads": integer("num_heads", 128),
    "state_head_dim": integer("head_dim", 64, high=MAX_HEAD_DIM),
    "expand": integer("expand", 2),
    "groups": integer("n_groups", 8),
    "taps": integer("conv_kernel", 4, high=64),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    check_activation(read)
    read.require_divisible("state_heads", "groups")
    sizes = (read.fields[name] for name in ("expand", "hidden_size", "state_heads", "state_head_dim"))
    expand, hidden, heads, head_dim = sizes
    text = f"num_heads ({heads}) times head_dim ({head_dim}) is not expand ({expand}) times hidden_size ({hidden})"
    read.require(heads * head_dim == expand * hidden, text, "num_heads", "head_dim", "expand", "hidden_size")
    limits = step_limits(read)
    fields = read.checked_fields()
    layer = LayerParts((Sublayer(nemotron_h.mamba2(fields, limits), llama.norm(fields, "norm")),))
    return llama.model(
        fields,
        [layer] * fields["layers"],
        names={"embedding": "backbone.embeddings", "final_norm": "backbone.norm_f"},
        prefix="backbone.layers",
    )


architecture = decoder(parse)
