"""ERNIE 4.5 (https://github.com/PaddlePaddle/ERNIE): shared experts, and a bias that only chooses behind a softmax.

Heads are rotated in pairs of neighbouring elements. Some layers at the start, the end or between have no experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.expert_values import RouterSpec
from . import llama
from ._architecture import decoder
from ._config import ConfigReader, Fields, flag, integer, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .mixtral import check_top_k
from .parts.experts import ExpertsPart
from .qwen3_moe import weight_type

BIAS = flag("use_bias", False)
KEYS = with_defaults(
    llama.KEYS,
    vocab_size=103424,
    hidden_size=2560,
    intermediate_size=12288,
    num_hidden_layers=28,
    num_attention_heads=20,
    num_key_value_heads=4,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
) | {
    "qkv_bias": BIAS,
    "o_bias": BIAS,
    "mlp_bias": BIAS,
    "expert_size": integer("moe_intermediate_size", 1536),
    "top_k": integer("moe_k", 6),
    "experts": integer("moe_num_experts", 64),
    "shared": integer("moe_num_shared_experts", 2, low=0),
    "first": integer("moe_layer_start_index", 1, low=0),
    "last": integer("moe_layer_end_index", -1, low=-1),
    "interval": integer("moe_layer_interval", 1),
    "min_sum": number("moe_norm_min", 1e-12),
}

ALIASES = ((r"(.*)\.mlp\.gate\.(moe_statics\..*)", r"\1.mlp.\2"),)
"""The name that transformers has in memory, and that of its files."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    check_top_k(read)
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=500000.0, interleaved=True)
    fields = read.checked_fields()
    attention, mlp = llama.attention(fields, rotary=rotary), llama.feed_forward(fields)
    experts = experts_part(fields, weight_type(read))
    return llama.model(
        fields,
        [llama.pre_norm(fields, attention, experts if has_experts else mlp) for has_experts in sparse_layers(fields)],
        output={"bias": fields["mlp_bias"]},
        ignored=(r".*rotary_emb\.inv_freq", r".*mtp.*"),  # layers that draft
        aliases=ALIASES,
    )


def sparse_layers(fields: Fields) -> list[bool]:
    """Whether each layer has experts."""
    layers, interval = range(fields["layers"]), fields["interval"]
    last = len(layers) - 1 if fields["last"] == -1 else fields["last"]
    return [fields["first"] <= layer <= last and (layer + 1) % interval == 0 for layer in layers]


def experts_part(fields: Fields, weight_type: str) -> ExpertsPart:
    """The experts, and the shared ones as one feed-forward layer, if there are any."""
    shared = None
    if fields["shared"]:
        gate, up, down = (f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down"))
        inner_size = fields["shared"] * fields["expert_size"]
        shared = llama.feed_forward(fields, inner_size=inner_size, inner=(gate, up), down=down)
    router = RouterSpec(
        fields["experts"], fields["top_k"], renormalise=True, min_sum=fields["min_sum"], weight_type=weight_type
    )
    return ExpertsPart(
        fields["hidden_size"],
        fields["expert_size"],
        fields["activation"],
        router,
        correction_bias="mlp.moe_statics.e_score_correction_bias",
        correction_bias_is_row=True,
        shared=shared,
    )


architecture = decoder(parse)
