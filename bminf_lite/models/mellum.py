"""Mellum 2 (https://huggingface.co/JetBrains): Qwen3 MoE, whose layers with a window have a rotation of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama, qwen3_moe
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, integer, layer_types, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .glm4_moe_lite import dense_of_types
from .mixtral import check_top_k
from .parts.attention import QueryKeyNorm

KEYS = with_defaults(
    {field: key for field, key in qwen3_moe.KEYS.items() if field != "step"},
    vocab_size=98304,
    hidden_size=2304,
    intermediate_size=7168,
    num_hidden_layers=28,
    head_dim=128,
    max_position_embeddings=131072,
    num_experts=64,
    moe_intermediate_size=896,
    norm_topk_prob=True,
)
WINDOW = integer("sliding_window", 1024)
ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(qwen3_moe.with_num_experts(config, "num_experts"), KEYS)
    check_top_k(read)
    types, dense = layer_types(read, [FULL] * read.fields["layers"]), dense_of_types(read, 0)
    window = read.value_or_none(WINDOW)
    llama.check_heads(read)
    parameters = parameters_of(read, types)
    rotary = {kind: parse_rotary(read, parameters=own, part=1.0) for kind, own in parameters.items()}
    fields = read.checked_fields()
    attention = llama.attention(fields, qk_norm=QueryKeyNorm.HEAD)
    experts, mlp = qwen3_moe.experts_part(read, fields["expert_size"]), llama.feed_forward(fields)
    mixers = (replace(attention, rotary=rotary[t], window=window if t == SLIDING else None) for t in types)
    return llama.model(
        fields,
        [
            llama.pre_norm(fields, mixer, mlp if is_dense else experts)
            for mixer, is_dense in zip(mixers, dense, strict=True)
        ],
        ignored=(r".*rotary_emb\.inv_freq", r"mtp\..*"),  # a layer that guesses tokens
    )


def parameters_of(
    read: ConfigReader, types: list[str], default: Mapping[str, Mapping[str, Any]] = ROPE
) -> dict[str, Mapping[str, Any]]:
    """The rotary parameters of each kind of layer that the model has; ``rope_parameters`` maps kinds to their own.

    ``default`` is what a file without them has.
    """
    given = read.config.get("rope_parameters")
    given = default if given is None else given
    kinds = dict.fromkeys(types)
    if isinstance(given, Mapping) and all(isinstance(given.get(kind), Mapping) for kind in kinds):
        return {kind: given[kind] for kind in kinds}
    read.problem("rope_parameters", f"rope_parameters is {given!r}, which lacks a mapping for {' or '.join(kinds)}")
    return {kind: default[kind] for kind in kinds}


architecture = decoder(parse)
