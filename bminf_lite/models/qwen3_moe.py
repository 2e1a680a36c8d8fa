"""Qwen3 MoE (https://arxiv.org/abs/2505.09388): Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backend.expert_values import WEIGHT_TYPES, RouterSpec
from . import llama
from ._architecture import decoder
from ._config import ConfigReader, Fields, flag, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .mixtral import check_top_k
from .parts.attention import QueryKeyNorm
from .parts.experts import ExpertsPart

EXPERTS = {
    "experts": integer("num_experts", 128),
    "top_k": integer("num_experts_per_tok", 8),
    "renormalise": flag("norm_topk_prob", False),
}
KEYS = (
    with_defaults(
        llama.KEYS,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_key_value_heads=4,
        max_position_embeddings=32768,
    )
    | {"qkv_bias": llama.ATTENTION_BIAS, "o_bias": llama.ATTENTION_BIAS}
    | EXPERTS
    | {
        "expert_size": integer("moe_intermediate_size", 768),
        "step": integer("decoder_sparse_step", 1),
    }
)
WINDOW = integer("sliding_window", 4096)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_num_experts(config, "num_experts"), KEYS)
    check_top_k(read)
    dense = dense_layers(read)
    window = read.value_or_none(WINDOW) if read.value(flag("use_sliding_window", False)) else None
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary, window=window, qk_norm=QueryKeyNorm.HEAD)
    experts, mlp = experts_part(read, fields["expert_size"]), llama.feed_forward(fields)
    return llama.model(fields, [llama.pre_norm(fields, attention, mlp if d else experts) for d in dense])


def with_num_experts(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """``config`` with the number of experts under ``name``; transformers 5 writes ``num_local_experts``."""
    given = config.get("num_local_experts")
    return config if given is None else {name: given, **config}


def dense_layers(read: ConfigReader) -> list[bool]:
    """Whether each layer has one feed-forward layer, not experts: as ``mlp_only_layers`` says, or between the steps."""
    layers, given = read.fields["layers"], read.config.get("mlp_only_layers") or []
    if not isinstance(given, list) or not all(type(layer) is int and 0 <= layer < layers for layer in given):
        read.problem("mlp_only_layers", f"mlp_only_layers is {given!r}, not a list of layers from 0 to {layers - 1}")
        given = []
    return [layer in given or (layer + 1) % read.fields["step"] != 0 for layer in range(layers)]


def experts_part(read: ConfigReader, inner_size: int, **others: Any) -> ExpertsPart:
    """Experts with LLaMA's names and ``others`` of their options; their weights have the model's ``dtype``."""
    fields: Fields = read.fields
    router = RouterSpec(
        fields["experts"],
        fields["top_k"],
        renormalise=fields["renormalise"],
        weight_type=weight_type(read),
    )
    return replace(ExpertsPart(fields["hidden_size"], inner_size, fields["activation"], router), **others)


def weight_type(read: ConfigReader) -> str:
    """The model's ``dtype``, to which the weights of experts are rounded."""
    dtype = str(read.config.get("dtype") or read.config.get("torch_dtype")).removeprefix("torch.")
    return dtype if dtype in WEIGHT_TYPES else "float32"


architecture = decoder(parse)
