"""Hunyuan A13B (https://huggingface.co/tencent): the dense model's attention, and experts beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.expert_values import RouterSpec
from . import glm4_moe, hunyuan_v1_dense, llama
from ._architecture import decoder
from ._config import ConfigReader, integer
from ._decoder import DecoderConfig
from .qwen3_moe import with_num_experts

KEYS = hunyuan_v1_dense.KEYS | {"experts": integer("num_experts", 1)}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_num_experts(config, "num_experts"), KEYS)
    top_k = experts_of_tokens(read)
    llama.check_heads(read)
    rotary = hunyuan_v1_dense.rotary_of(read)
    fields = read.checked_fields()
    attention = hunyuan_v1_dense.attention(fields, rotary)
    sizes = {**fields, "shared": 1, "expert_size": fields["intermediate_size"]}
    experts = (
        glm4_moe.experts_part(
            sizes,
            RouterSpec(fields["experts"], count, renormalise=True),
            None,
            "mlp.shared_mlp",
            router_name="mlp.gate.wg",
        )
        for count in top_k
    )
    return llama.model(fields, [llama.pre_norm(fields, attention, part) for part in experts])


def experts_of_tokens(read: ConfigReader) -> list[int]:
    """``moe_topk``, the experts of a token: a number, or one for each layer."""
    layers, experts = read.fields["layers"], read.fields["experts"]
    name = "num_experts_per_tok" if "moe_topk" not in read.config else "moe_topk"
    found = read.config.get(name, 1)
    counts = found if isinstance(found, list) else [found] * layers
    is_valid = len(counts) >= layers and all(type(count) is int and 1 <= count <= experts for count in counts)
    text = f"{name} is {found!r}, not a number from 1 to num_experts ({experts}), nor one for each layer"
    read.require(is_valid, text, name, "num_experts", "num_hidden_layers")
    return counts[:layers]


architecture = decoder(parse)
