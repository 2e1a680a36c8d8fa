"""LFM3 (https://huggingface.co/LiquidAI): LFM2 with gates of heads, windows, and norms before and behind each part.

Layers with a window have a rotation of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import lfm2, llama
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, flag, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .mellum import parameters_of
from .parts.attention import QueryKeyNorm
from .parts.part import LayerParts, Part, Sublayer
from .parts.short_convolution import ShortConvolutionPart

KEYS = with_defaults(
    lfm2.KEYS,
    vocab_size=128000,
    hidden_size=2048,
    intermediate_size=7680,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    conv_L_cache=7,
) | {
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
    "has_gate": flag("use_attention_gate", True),
    "has_post_norms": flag("use_sandwich_norm", True),
}
ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
"""The rotations of a file that names none."""
ALIASES = ((r"(model\.layers\.\d+\.self_attn)\.g_proj\.(.*)", r"\1.gate_proj.\2"),)
"""Names that transformers has in memory, and those of the files."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    if read.fields["qkv_bias"] and read.fields["has_gate"]:
        read.problem("attention_bias", "attention_bias is true; biases beside a matrix of gates are not supported")
    kinds = kinds_of_layers(read)
    window = read.value_or_none(integer("sliding_window", 256))
    llama.check_heads(read)
    parameters = parameters_of(read, [kind for kind in kinds if kind != lfm2.CONVOLUTION], ROPE)
    rotary = {kind: parse_rotary(read, parameters=own) for kind, own in parameters.items()}
    fields = read.checked_fields() | {"activation": "silu"}
    attention = llama.attention(
        fields,
        qk_norm=QueryKeyNorm.HEAD,
        gate="self_attn.gate_proj" if fields["has_gate"] else None,
        gate_by_head=fields["has_gate"],
    )
    convolution = ShortConvolutionPart(fields["hidden_size"], fields["taps"], fields["conv_bias"])
    names = ("operator_norm", "ffn_norm", "post_operator_norm", "post_ffn_norm")
    before, before_mlp, behind, behind_mlp = (llama.norm(fields, name) for name in names)
    mlp, layers = lfm2.feed_forward(fields), []
    for kind in kinds:
        mixer: Part = convolution
        if kind != lfm2.CONVOLUTION:
            mixer = replace(attention, rotary=rotary[kind], window=window if kind == SLIDING else None)
        parts = Sublayer(mixer, before, behind), Sublayer(mlp, before_mlp, behind_mlp)
        if not fields["has_post_norms"]:
            parts = Sublayer(mixer, before), Sublayer(mlp, before_mlp)
        layers.append(LayerParts(parts))
    return llama.model(fields, layers, names={"final_norm": "model.embedding_norm"}, aliases=ALIASES)


def kinds_of_layers(read: ConfigReader) -> list[str]:
    """The mixer of each layer: as ``layer_types`` says, or a convolution in every second one."""
    layers, given = range(read.fields["layers"]), read.config.get("layer_types")
    known = (FULL, SLIDING, lfm2.CONVOLUTION)
    default = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else lfm2.CONVOLUTION for i in layers]
    if given is None:
        return default
    if not isinstance(given, list) or len(given) != len(layers) or not all(kind in known for kind in given):
        read.problem("layer_types", f"layer_types is {given!r}, not {len(layers)} times one of {', '.join(known)}")
        return default
    return given


architecture = decoder(parse)
