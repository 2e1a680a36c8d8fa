"""SmolLM3 (https://huggingface.co/blog/smollm3): LLaMA without a rotation in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, flag, integer, layer_types, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary

KEYS = (
    with_defaults(
        llama.KEYS,
        vocab_size=128256,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    | llama.BIASES
)
WINDOW = integer("sliding_window", None)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary, rotated = parse_rotary(read, theta=2e6), rotated_layers(read)
    window = read.value_or_none(WINDOW) if read.value(flag("use_sliding_window", False)) else None
    types = layer_types(read, [FULL if is_rotated or window is None else SLIDING for is_rotated in rotated])
    fields = read.checked_fields()
    attention, mlp = llama.attention(fields), llama.feed_forward(fields)
    layers = []
    for is_rotated, kind in zip(rotated, types, strict=True):
        own = replace(attention, rotary=rotary if is_rotated else None, window=window if kind == SLIDING else None)
        layers.append(llama.pre_norm(fields, own, mlp))
    return llama.model(fields, layers)


def rotated_layers(read: ConfigReader) -> list[bool]:
    """Whether each layer has a rotation: 1 in ``no_rope_layers``, else all but every ``no_rope_layer_interval``-th."""
    layers, given = read.fields["layers"], read.config.get("no_rope_layers")
    if given is None:
        interval = read.value(integer("no_rope_layer_interval", 4))
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(given, list) or len(given) < layers or any(flag not in (0, 1) for flag in given):
        read.problem("no_rope_layers", f"no_rope_layers is {given!r}, not {layers} times 1 (rotated) or 0")
        return [True] * layers
    return [flag == 1 for flag in given[:layers]]


architecture = decoder(parse)
