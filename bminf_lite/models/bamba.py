"""Bamba (https://huggingface.co/ibm-ai-platform/Bamba-9B-v2): Mamba 2, attention in a few layers, and LLaMA's MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import falcon_h1, llama
from ._architecture import decoder
from ._config import ConfigReader, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.mamba2 import HeadNorm

KEYS = (
    with_defaults(
        llama.KEYS,
        vocab_size=128000,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
    )
    | llama.BIASES
    | falcon_h1.MAMBA
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    # Files have the rotated half of a head among their rotary parameters, or say nothing of it.
    read = ConfigReader({key: value for key, value in config.items() if key != "partial_rotary_factor"}, KEYS)
    llama.check_heads(read)
    falcon_h1.check_activation(read)
    read.fields["state_features"] = read.fields["expand"] * read.fields["hidden_size"]
    limits, head_dim = falcon_h1.step_limits(read), falcon_h1.state_head_dim(read)
    with_attention = layers_with_attention(read)
    rotary = parse_rotary(read, part=0.5)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary)
    norm = HeadNorm(fields["norm_eps"], fields["groups"])
    mamba = falcon_h1.mamba2(fields, head_dim, norm=norm, out_bias=fields["mamba_bias"], step_limits=limits)
    gate, up, down = (f"feed_forward.{name}_proj" for name in ("gate", "up", "down"))
    mlp = llama.feed_forward(fields, inner=(gate, up), down=down)
    names = ("input_layernorm", "pre_ff_layernorm")
    return llama.model(
        fields,
        [
            llama.pre_norm(fields, attention if layer in with_attention else mamba, mlp, names=names)
            for layer in range(fields["layers"])
        ],
        names={"final_norm": "model.final_layernorm"},
    )


def layers_with_attention(read: ConfigReader) -> list[int]:
    """The layers that ``attn_layer_indices`` names; others have Mamba 2."""
    given, layers = read.config.get("attn_layer_indices"), read.fields["layers"]
    if given is None:
        return []
    if isinstance(given, list) and all(type(layer) is int and 0 <= layer < layers for layer in given):
        return given
    read.problem("attn_layer_indices", f"attn_layer_indices is {given!r}, not a list of layers from 0 to {layers - 1}")
    return []


architecture = decoder(parse)
