"""LFM2 MoE (https://arxiv.org/abs/2511.23404): LFM2 with experts in all but the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.expert_values import RouterSpec, Score
from . import lfm2, llama
from ._architecture import decoder
from ._config import ConfigReader, flag, integer, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .mixtral import check_top_k
from .parts.experts import ExpertsPart

KEYS = with_defaults(lfm2.KEYS, hidden_size=2048, intermediate_size=7168) | {
    "expert_size": integer("moe_intermediate_size", 1792),
    "experts": integer("num_experts", 32),
    "top_k": integer("num_experts_per_tok", 4),
    "dense": integer("num_dense_layers", 2, low=0),
    "has_bias": flag("use_expert_bias", True),
    "renormalise": flag("norm_topk_prob", True),
    "scale": number("routed_scaling_factor", 1.0, low=1e-30),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(lfm2.with_newer_keys(config), KEYS)
    kinds = lfm2.kinds_of_layers(read)
    check_top_k(read)
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=1e6)
    fields = read.checked_fields() | {"activation": "silu"}
    router = RouterSpec(
        fields["experts"],
        fields["top_k"],
        Score.SIGMOID,
        renormalise=fields["renormalise"],
        epsilon=1e-6,
        scale=fields["scale"],
    )
    experts = ExpertsPart(
        fields["hidden_size"],
        fields["expert_size"],
        "silu",
        router,
        router_name="feed_forward.gate",
        experts="feed_forward.experts",
        gate="w1",
        up="w3",
        down="w2",
        fused=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        correction_bias="feed_forward.expert_bias" if fields["has_bias"] else None,
    )
    dense = lfm2.feed_forward(fields)
    mixers = lfm2.mixers(fields, kinds, rotary)
    return lfm2.model(fields, [(mixer, dense if i < fields["dense"] else experts) for i, mixer in enumerate(mixers)])


architecture = decoder(parse)
