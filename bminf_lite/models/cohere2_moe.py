"""Cohere's Command A+ (https://huggingface.co/CohereLabs): Command A with experts beside attention in most layers.

Experts and shared experts may be averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backend.expert_values import RouterSpec, Score
from . import cohere, llama, qwen3_moe
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, choice, flag, integer, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .glm4_moe_lite import dense_of_types
from .ministral import windows_of_types
from .mixtral import check_top_k
from .parts.experts import ExpertsPart
from .parts.norms import NormKind

KEYS = with_defaults(cohere.KEYS, head_dim=128) | {
    "experts": integer("num_experts", 8),
    "top_k": integer("num_experts_per_tok", 2),
    "shared": integer("num_shared_experts", 0, low=0),
    "averages": choice("shared_expert_combination_strategy", "average", {"average": True, "sum": False}),
    "score": choice("expert_selection_fn", "softmax", {"softmax": Score.SOFTMAX_OF_CHOSEN, "sigmoid": Score.SIGMOID}),
    "renormalise": flag("norm_topk_prob", True),
    "dense_size": integer("prefix_dense_intermediate_size", derive=lambda fields: fields["intermediate_size"]),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(qwen3_moe.with_num_experts(config, "num_experts"), KEYS)
    check_top_k(read)
    kind = NormKind.LAYER_WITHOUT_BIAS
    if config.get("rms_norm_eps") is not None:
        kind, read.fields["norm_eps"] = NormKind.RMS, read.value(number("rms_norm_eps", 1e-5, high=1.0))
    first, layers = read.value(integer("first_k_dense_replace", 0, low=0)), read.fields["layers"]
    of_dense, pattern = (
        read.value(integer(name, default))
        for name, default in (("prefix_dense_sliding_window_pattern", 1), ("sliding_window_pattern", 4))
    )
    periods = [(i + 1) % of_dense for i in range(first)] + [(i + 1) % pattern for i in range(layers - first)]
    windows = windows_of_types(read, 4096, [SLIDING if place else FULL for place in periods[:layers]])
    dense = dense_of_types(read, first)
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=10000.0, interleaved=True)
    fields = read.checked_fields()
    attention, experts = llama.attention(fields), experts_part(read)
    mlp = llama.feed_forward(fields, inner_size=fields["dense_size"])
    found = []
    for window, is_dense in zip(windows, dense, strict=True):
        is_rotated = window is not None or (is_dense and of_dense == 1)
        mixer = replace(attention, window=window, rotary=rotary if is_rotated else None)
        found.append(llama.parallel(fields, mixer, mlp if is_dense else experts, kind))
    return llama.model(fields, found, kind, output={"multiplier": fields["logits_multiplier"]})


def experts_part(read: ConfigReader) -> ExpertsPart:
    """The experts beside the shared ones, if there are any."""
    fields = read.fields
    share = 0.5 if fields["shared"] and fields["averages"] else 1.0
    router = RouterSpec(
        fields["experts"],
        fields["top_k"],
        fields["score"],
        renormalise=fields["score"] is Score.SIGMOID and fields["renormalise"],
        scale=share,
        weight_type=qwen3_moe.weight_type(read),
    )
    own = ExpertsPart(fields["hidden_size"], fields["intermediate_size"], fields["activation"], router)
    if not fields["shared"]:
        return own
    gate, up, down = (f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down"))
    size = fields["shared"] * fields["intermediate_size"]
    shared = llama.feed_forward(fields, inner_size=size, inner=(gate, up), down=down, multiplier=share)
    return replace(own, shared=shared)


architecture = decoder(parse)
