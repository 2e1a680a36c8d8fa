"""DeepSeek-V2 and V2-Lite (https://arxiv.org/abs/2405.04434): latent attention, experts behind a softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.expert_values import GroupScore, MaskedScore, RouterSpec
from . import llama
from ._architecture import decoder
from ._config import ConfigReader, choice, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .deepseek_v3 import (
    LATENT_KEYS,
    check_latent,
    latent_attention,
    mixture_of_latents,
    query_rank,
    require_published_form,
    score_scale,
)
from .mixtral import check_top_k
from .qwen3_moe import with_num_experts

# transformers has no default for the experts of a token; published models have 6.
KEYS = with_defaults(
    LATENT_KEYS,
    vocab_size=102400,
    n_routed_experts=64,
    num_experts_per_tok=6,
    n_shared_experts=2,
    moe_intermediate_size=1407,
    norm_topk_prob=False,
) | {
    "num_groups": integer("n_group", derive=lambda _: 1),
    "top_groups": integer("topk_group", derive=lambda _: 1),
    "mlp_bias": llama.BIASES["mlp_bias"],
    "has_groups": choice("topk_method", "greedy", {"greedy": False, "group_limited_greedy": True}),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_num_experts(config, "n_routed_experts"), KEYS)
    require_published_form(read, scoring_func="softmax", norm_topk_prob=False, rope_interleave=True, moe_layer_freq=1)
    check_top_k(read)
    router, q_rank = router_of(read), query_rank(read, 1536)
    rotary = parse_rotary(read, interleaved=check_latent(read))
    scale = score_scale(read)
    fields = read.checked_fields()
    attention = latent_attention(fields, rotary, q_rank, scale)
    dense = [layer < fields["dense"] for layer in range(fields["layers"])]
    return mixture_of_latents(fields, attention, router, dense)


def router_of(read: ConfigReader) -> RouterSpec:
    """The router: a softmax, within the best groups of experts or over all."""
    fields = read.fields
    groups = (fields["num_groups"], fields["top_groups"]) if fields["has_groups"] else (1, 1)
    try:
        return RouterSpec(
            fields["experts"],
            fields["top_k"],
            scale=fields["scale"],
            num_groups=groups[0],
            top_groups=groups[1],
            group_score=GroupScore.LARGEST,
            masked=MaskedScore.ZERO,
        )
    except ValueError as error:
        read.problem("n_group", str(error))
        return RouterSpec(1, 1)


architecture = decoder(parse)
