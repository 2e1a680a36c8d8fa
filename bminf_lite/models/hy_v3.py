"""Hunyuan 3 (https://huggingface.co/tencent): Qwen3's attention, experts behind sigmoids, and shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.expert_values import RouterSpec, Score
from . import glm4_moe, llama
from ._architecture import decoder
from ._config import ConfigReader, integer, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .deepseek_v3 import require_published_form
from .glm4_moe_lite import dense_layers
from .mixtral import check_top_k
from .parts.attention import QueryKeyNorm
from .qwen3_moe import with_num_experts

KEYS = with_defaults(
    llama.KEYS | llama.BIASES,
    vocab_size=120832,
    intermediate_size=13312,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
) | {
    "experts": integer("num_experts", 192),
    "top_k": integer("num_experts_per_tok", 8),
    "shared": integer("num_shared_experts", 1),
    "expert_size": integer("moe_intermediate_size", 1536),
    "scale": number("router_scaling_factor", 2.826, low=1e-30),
}
ALIASES = (
    (r"(.*\.mlp)\.gate\.weight", r"\1.router.gate.weight"),
    (r"(.*\.mlp)\.e_score_correction_bias", r"\1.expert_bias"),
    (r"(.*\.mlp)\.shared_experts\.(.*)", r"\1.shared_mlp.\2"),
)
"""Names that transformers has in memory, and those of its files."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_num_experts(config, "num_experts"), KEYS)
    require_published_form(
        read, qk_norm=True, route_norm=True, moe_router_use_sigmoid=True, moe_router_enable_expert_bias=True
    )
    check_top_k(read)
    dense = dense_layers(read)
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=11158840.0)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary, qk_norm=QueryKeyNorm.HEAD)
    router = RouterSpec(
        fields["experts"], fields["top_k"], Score.SIGMOID, renormalise=True, epsilon=1e-20, scale=fields["scale"]
    )
    experts = glm4_moe.experts_part(fields, router, "mlp.expert_bias", "mlp.shared_mlp", router_name="mlp.router.gate")
    mlp = llama.feed_forward(fields)
    return llama.model(
        fields,
        [llama.pre_norm(fields, attention, mlp if is_dense else experts) for is_dense in dense],
        ignored=(r".*rotary_emb\.inv_freq", rf"model\.layers\.{len(dense)}\..*"),  # a layer that guesses tokens
        aliases=ALIASES,
    )


architecture = decoder(parse)
