"""Granite 4 (https://www.ibm.com/granite/docs/models/granite): Mamba 2 and a few layers of attention, with experts.

Attention may be without a rotation. Each layer has a feed-forward layer for every token, and experts or none beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.expert_values import RouterSpec, Score
from . import falcon_h1, granitemoe, llama
from ._architecture import decoder
from ._config import FULL, ConfigReader, Fields, integer, number
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .mixtral import check_top_k
from .parts.mamba2 import HeadNorm
from .parts.part import Part
from .qwen3_next import LINEAR

KEYS = (
    granitemoe.KEYS
    | falcon_h1.MAMBA
    | {"experts": integer("num_local_experts", 8, low=0), "shared_size": integer("shared_intermediate_size", 1024)}
)
OLDER_KINDS = {"mamba": LINEAR, "attention": FULL, "full_attention": FULL, "linear_attention": LINEAR}
"""The kinds of layers, under the names of published files and newer ones."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    if read.fields["experts"]:
        check_top_k(read)
    divisor = read.value(number("logits_scaling", 1.0, low=1e-30))
    llama.check_heads(read)
    falcon_h1.check_activation(read)
    read.fields["state_features"] = read.fields["expand"] * read.fields["hidden_size"]
    limits, head_dim = falcon_h1.step_limits(read), falcon_h1.state_head_dim(read)
    kinds = kinds_of_layers(read)
    rotary = parse_rotary(read) if read.config.get("position_embedding_type") == "rope" else None
    fields = read.checked_fields()
    multiplier = fields["residual_multiplier"]
    mixers: dict[str, Part] = {
        FULL: llama.attention(fields, rotary=rotary, score_scale=fields["score_scale"], multiplier=multiplier),
        LINEAR: falcon_h1.mamba2(
            fields,
            head_dim,
            norm=HeadNorm(fields["norm_eps"], fields["groups"]),
            out_bias=fields["mamba_bias"],
            step_limits=limits,
            multiplier=multiplier,
        ),
    }
    mlp = feed_forward(fields)
    return llama.model(
        fields,
        [llama.pre_norm(fields, mixers[kind], mlp) for kind in kinds],
        input={"multiplier": fields["embedding_multiplier"]},
        output={"multiplier": 1 / divisor},
        aliases=granitemoe.ALIASES,
    )


def kinds_of_layers(read: ConfigReader) -> list[str]:
    """The mixer of each layer, by default Mamba 2 in all."""
    layers = read.fields["layers"]
    types = read.config.get("layer_types") or read.config.get("layers_block_type")
    if types is None:
        return [LINEAR] * layers
    known = isinstance(types, list) and all(isinstance(kind, str) and kind in OLDER_KINDS for kind in types)
    if known and len(types) == layers:
        return [OLDER_KINDS[kind] for kind in types]
    read.problem("layer_types", f"layer_types is {types!r}, not {layers} times one of {', '.join(OLDER_KINDS)}")
    return [LINEAR] * layers


def feed_forward(fields: Fields) -> Part:
    """The feed-forward layer for every token, beside experts if there are any."""
    shared = granitemoe.shared_layer(fields)
    assert shared is not None
    if not fields["experts"]:
        return shared
    scale = fields["residual_multiplier"]
    router = RouterSpec(fields["experts"], fields["top_k"], Score.SOFTMAX_OF_CHOSEN, scale=scale)
    return granitemoe.experts(fields, router, shared=shared)


architecture = decoder(parse)
