"""Laguna (https://huggingface.co/poolside): gated attention of different widths, and experts beside a shared one.

The output of each head is multiplied by the softplus of a gate. Layers with a window have a rotation of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backend.expert_values import RouterSpec, Score
from . import glm4_moe, llama
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, integer, layer_types, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .deepseek_v3 import require_published_form
from .glm4_moe_lite import dense_of_types
from .mellum import parameters_of
from .mixtral import check_top_k
from .parts.attention import QueryKeyNorm
from .qwen3_moe import weight_type, with_num_experts

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=100352,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=40,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
) | {
    "o_bias": llama.ATTENTION_BIAS,
    "experts": integer("num_experts", 256),
    "top_k": integer("num_experts_per_tok", 8),
    "expert_size": integer("moe_intermediate_size", 512),
    "shared_size": integer("shared_expert_intermediate_size", 512),
    "scale": number("moe_routed_scaling_factor", 1.0, low=1e-30),
}
ROPE: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
"""The rotations of a file that names none."""
ALIASES = (
    (r"(model\.layers\.\d+\.mlp)\.gate\.(e_score_correction_bias)", r"\1.experts.\2"),
    (r"(model\.layers\.\d+\.mlp)\.shared_experts\.(.*)", r"\1.shared_expert.\2"),
)
"""Names that transformers has in memory, and those of the files."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_num_experts(config, "num_experts"), KEYS)
    require_published_form(read, moe_apply_router_weight_on_input=False, moe_router_logit_softcapping=0.0)
    if read.fields["o_bias"]:
        read.problem("attention_bias", "attention_bias is true; biases beside a matrix of gates are not supported")
    gating = config.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        read.problem("gating", f"gating is {gating!r}, not true, per-head or per-element")
    check_top_k(read)
    types, dense, heads = layer_types(read, [FULL] * read.fields["layers"]), dense_of_types(read, 1), heads_of(read)
    window = read.value_or_none(integer("sliding_window", 512))
    llama.check_heads(read)
    parameters = parameters_of(read, types, ROPE)
    rotary = {kind: parse_rotary(read, parameters=own, part=1.0) for kind, own in parameters.items()}
    fields = read.checked_fields()
    attention = llama.attention(
        fields,
        qk_norm=QueryKeyNorm.HEAD,
        gate="self_attn.g_proj",
        gate_function="softplus",
        gate_by_head=gating != "per-element",
    )
    router = RouterSpec(
        fields["experts"],
        fields["top_k"],
        Score.SIGMOID,
        renormalise=True,
        scale=fields["scale"],
        weight_type=weight_type(read) if fields["scale"] == 1 else "float32",
    )
    experts = glm4_moe.experts_part(
        {**fields, "shared": 1}, router, "mlp.experts.e_score_correction_bias", "mlp.shared_expert"
    )
    assert experts.shared is not None
    experts = replace(experts, shared=replace(experts.shared, inner_size=fields["shared_size"]))
    mlp, layers = llama.feed_forward(fields), []
    for kind, count, is_dense in zip(types, heads, dense, strict=True):
        own_window = window if kind == SLIDING else None
        mixer = replace(attention, heads=count, rotary=rotary[kind], window=own_window)
        layers.append(llama.pre_norm(fields, mixer, mlp if is_dense else experts))
    return llama.model(fields, layers, aliases=ALIASES)


def heads_of(read: ConfigReader) -> list[int]:
    """The query heads of each layer, which ``num_attention_heads_per_layer`` may list."""
    layers, kv_heads = read.fields["layers"], read.fields["kv_heads"]
    name = "num_attention_heads_per_layer"
    given = read.config.get(name)
    if given is None:
        return [read.fields["heads"]] * layers
    is_valid = isinstance(given, list) and len(given) == layers and all(type(x) is int and x > 0 for x in given)
    if not is_valid or any(count % kv_heads for count in given):
        read.problem(name, f"{name} is {given!r}, not {layers} multiples of num_key_value_heads ({kv_heads})")
        return [read.fields["heads"]] * layers
    return list(given)


architecture = decoder(parse)
