"""Granite with windows (https://huggingface.co/ibm-granite): attention sinks, and a window on three layers of four.

Each layer has a base of its own for its rotation, or no rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layers.position import rope_parameters
from . import granite, llama
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, with_defaults
from ._decoder import DecoderConfig
from ._rotary import Rotary, parse_rotary
from .ministral import windows_of_types

KEYS = with_defaults(
    granite.KEYS,
    vocab_size=100352,
    hidden_size=2560,
    intermediate_size=8192,
    num_hidden_layers=24,
    num_attention_heads=20,
    num_key_value_heads=4,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    return granite.granite_model(read, attention_of_layers(read))


def attention_of_layers(read: ConfigReader) -> list[dict[str, Any]]:
    """The options of the attention of each layer: sinks, a window and a rotation."""
    llama.check_heads(read)
    layers = range(read.fields["layers"])
    windows = windows_of_types(read, 128, [SLIDING if layer % 4 else FULL for layer in layers])
    return [
        {"sinks": "self_attn.sinks", "window": window, "rotary": rotary}
        for window, rotary in zip(windows, rotations(read), strict=True)
    ]


def rotations(read: ConfigReader) -> list[Rotary | None]:
    """The rotation of each layer, whose base ``layer_rope_theta`` may list; 0 is none."""
    layers, given = read.fields["layers"], read.config.get("layer_rope_theta")
    common = parse_rotary(read)
    if given is None or common is None:
        return [common] * layers
    are_numbers = isinstance(given, list) and all(type(theta) in (int, float) and theta >= 0 for theta in given)
    if not are_numbers or len(given) < layers:
        read.problem("layer_rope_theta", f"layer_rope_theta is {given!r}, not {layers} numbers of at least 0")
        return [common] * layers
    parameters = rope_parameters(read.config)
    own = {theta: parse_rotary(read, parameters=parameters | {"rope_theta": theta}) for theta in set(given) if theta}
    return [own.get(theta) for theta in given[:layers]]


architecture = decoder(parse)
