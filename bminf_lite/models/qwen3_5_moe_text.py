"""Qwen3.5 MoE and Qwen3.6 MoE (https://huggingface.co/Qwen), their text models: Qwen3.5 with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import qwen3_5_text, qwen3_moe, qwen3_next
from ._architecture import decoder
from ._config import FULL, ConfigReader, integer, with_defaults
from ._decoder import DecoderConfig
from .mixtral import check_top_k

KEYS = with_defaults(
    {key: value for key, value in qwen3_5_text.KEYS.items() if key != "intermediate_size"},
    hidden_size=2048,
    num_hidden_layers=40,
    num_key_value_heads=2,
) | {
    "experts": integer("num_experts", 256),
    "top_k": integer("num_experts_per_tok", 8),
    "expert_size": integer("moe_intermediate_size", 512),
    "shared_size": integer("shared_expert_intermediate_size", 512),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(qwen3_moe.with_num_experts(config, "num_experts"), KEYS)
    check_top_k(read)
    read.fields["renormalise"] = True
    kinds = qwen3_next.kinds_of_layers(read)
    fields, mixers = qwen3_next.parse_mixers(read)
    experts = qwen3_next.shared_experts(read)
    return qwen3_next.model(fields, [mixers[kind] for kind in kinds], [experts] * len(kinds), (mixers[FULL], experts))


architecture = decoder(parse)
