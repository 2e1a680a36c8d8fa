"""GLM-4.7-Flash (https://huggingface.co/zai-org/GLM-4.7-Flash): GLM-4.5's experts with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._architecture import decoder
from ._config import ConfigReader, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .deepseek_v3 import (
    CORRECTION_BIAS,
    LATENT_KEYS,
    check_latent,
    latent_attention,
    mixture_of_latents,
    query_rank,
    require_published_form,
    score_scale,
)
from .glm4_moe import router_of
from .mixtral import check_top_k
from .qwen3_moe import with_num_experts

KEYS = with_defaults(
    LATENT_KEYS,
    vocab_size=154880,
    hidden_size=2048,
    intermediate_size=10240,
    num_hidden_layers=47,
    num_attention_heads=20,
    num_key_value_heads=20,
    max_position_embeddings=202752,
    rms_norm_eps=1e-5,
    qk_nope_head_dim=192,
    v_head_dim=256,
    n_routed_experts=64,
    num_experts_per_tok=4,
    moe_intermediate_size=1536,
    routed_scaling_factor=1.8,
)
DENSE, SPARSE = "dense", "sparse"


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_num_experts(config, "n_routed_experts"), KEYS)
    require_published_form(read, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    check_top_k(read)
    dense, router, q_rank = dense_layers(read), router_of(read), query_rank(read, 768)
    rotary = parse_rotary(read, interleaved=check_latent(read))
    scale = score_scale(read)
    fields = read.checked_fields()
    attention = latent_attention(fields, rotary, q_rank, scale)
    return mixture_of_latents(fields, attention, router, dense, CORRECTION_BIAS)


def dense_layers(read: ConfigReader) -> list[bool]:
    """Whether each layer has one feed-forward layer, not experts: as ``mlp_layer_types`` says, by default the first."""
    if read.config.get("mlp_layer_types") is None:
        require_published_form(read, first_k_dense_replace=1)
    return dense_of_types(read, 1)


def dense_of_types(read: ConfigReader, default: int) -> list[bool]:
    """Whether ``mlp_layer_types`` gives each layer one feed-forward layer; by default the first ``default`` have it."""
    layers, given = read.fields["layers"], read.config.get("mlp_layer_types")
    if given is None:
        return [layer < default for layer in range(layers)]
    if not isinstance(given, list) or len(given) != layers or not all(kind in (DENSE, SPARSE) for kind in given):
        text = f"mlp_layer_types is {given!r}, not {layers} times one of {DENSE}, {SPARSE}"
        read.problem("mlp_layer_types", text)
        return [False] * layers
    return [kind == DENSE for kind in given]


architecture = decoder(parse)
