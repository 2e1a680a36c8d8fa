"""K-EXAONE (https://arxiv.org/abs/2601.01739): EXAONE 4's attention behind norms, and DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import exaone4, glm4_moe, llama
from ._architecture import decoder
from ._config import ConfigReader, integer, with_defaults
from ._decoder import DecoderConfig
from .deepseek_v3 import require_published_form
from .glm4_moe_lite import dense_of_types
from .mixtral import check_top_k
from .qwen3_moe import with_num_experts

KEYS = exaone4.KEYS | with_defaults(
    {field: glm4_moe.KEYS[field] for field in ("top_k", "expert_size", "num_groups", "top_groups", "renormalise")}
    | {field: glm4_moe.KEYS[field] for field in ("scale", "dense")},
    moe_intermediate_size=1024,
    routed_scaling_factor=2.5,
)
KEYS = KEYS | {"experts": integer("num_experts", 64), "shared": integer("num_shared_experts", 1)}
ALIASES = ((r"(.*\.mlp)\.gate\.(e_score_correction_bias)", r"\1.\2"),)
"""The name that transformers has in memory, and that of its files."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_num_experts(config, "num_experts"), KEYS)
    require_published_form(read, scoring_func="sigmoid", topk_method="noaux_tc")
    check_top_k(read)
    router, dense = glm4_moe.router_of(read), dense_of_types(read, read.fields["dense"])
    fields, mixers = exaone4.parse_mixers(read)
    mlp, experts = llama.feed_forward(fields), glm4_moe.experts_part(fields, router, "mlp.e_score_correction_bias")
    return llama.model(
        fields,
        [
            llama.pre_norm(fields, mixer, mlp if is_dense else experts)
            for mixer, is_dense in zip(mixers, dense, strict=True)
        ],
        ignored=(r".*rotary_emb\.inv_freq", r"mtp\..*"),  # layers that guess tokens
        aliases=ALIASES,
    )


architecture = decoder(parse)
