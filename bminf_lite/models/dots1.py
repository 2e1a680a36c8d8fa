"""dots.llm1 (https://arxiv.org/abs/2506.05767): Qwen3's attention, and DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import glm4_moe, llama
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .deepseek_v3 import require_published_form
from .ministral import windows_of_types
from .mixtral import check_top_k
from .parts.attention import QueryKeyNorm
from .qwen3_moe import with_num_experts

ROUTED = ("shared", "experts", "top_k", "expert_size", "scale", "renormalise", "dense")
KEYS = with_defaults(
    llama.KEYS | {field: glm4_moe.KEYS[field] for field in ROUTED},
    vocab_size=152064,
    hidden_size=4608,
    intermediate_size=10944,
    num_hidden_layers=62,
    num_key_value_heads=32,
    n_shared_experts=None,
    n_routed_experts=None,
    num_experts_per_tok=None,
    norm_topk_prob=False,
    first_k_dense_replace=0,
) | {
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
    "num_groups": integer("n_group", derive=lambda _: 1),
    "top_groups": integer("topk_group", derive=lambda _: 1),
}
"""The numbers of experts have no default."""
WINDOW = 4096


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_num_experts(config, "n_routed_experts"), KEYS)
    if config.get("scoring_func") != "noaux_tc":  # files may have the name of the method there
        require_published_form(read, scoring_func="sigmoid")
    require_published_form(read, topk_method="noaux_tc", moe_layer_freq=1)
    check_top_k(read)
    router, layers = glm4_moe.router_of(read), range(read.fields["layers"])
    first = read.value(integer("max_window_layers", 62, low=0))
    has_windows = config.get("sliding_window", WINDOW) is not None
    types = [SLIDING if has_windows and layer >= first else FULL for layer in layers]
    windows = windows_of_types(read, WINDOW, types)
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary, qk_norm=QueryKeyNorm.HEAD)
    mlp, experts = llama.feed_forward(fields), glm4_moe.experts_part(fields, router)
    return llama.model(
        fields,
        [
            llama.pre_norm(fields, replace(attention, window=window), mlp if layer < fields["dense"] else experts)
            for layer, window in enumerate(windows)
        ],
    )


architecture = decoder(parse)
