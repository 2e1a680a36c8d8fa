"""Granite 3 MoE (https://arxiv.org/abs/2408.13359): Granite with experts; the softmax is over the chosen ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..backend.expert_values import RouterSpec, Score
from . import granite, llama
from ._architecture import decoder
from ._config import ConfigReader, Fields, integer, number
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .mixtral import check_top_k
from .parts.experts import ExpertsPart
from .parts.feed_forward import FeedForwardPart

KEYS = {field: key for field, key in granite.KEYS.items() if field != "mlp_bias"} | {
    "experts": integer("num_local_experts", 8),
    "top_k": integer("num_experts_per_tok", 2),
}
ALIASES = (
    (r"(.*\.block_sparse_moe)\.experts\.gate_up_proj", r"\1.input_linear.weight"),
    (r"(.*\.block_sparse_moe)\.experts\.down_proj", r"\1.output_linear.weight"),
    (r"(.*\.block_sparse_moe)\.router\.weight", r"\1.router.layer.weight"),
)
"""Names that transformers has in memory since version 5, and those of its files."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    return parse_granite_moe(ConfigReader(config, KEYS))


def parse_granite_moe(read: ConfigReader) -> DecoderConfig:
    """The configuration of a Granite with experts, beside which a layer may have one for every token."""
    llama.check_heads(read)
    return granite_moe_model(read, [{"rotary": parse_rotary(read)}] * read.fields["layers"])


def granite_moe_model(read: ConfigReader, layers: Sequence[Mapping[str, Any]]) -> DecoderConfig:
    """The same; ``layers`` has options of the attention of each layer."""
    check_top_k(read)
    divisor = read.value(number("logits_scaling", 1.0, low=1e-30))
    fields = read.checked_fields()
    multiplier = fields["residual_multiplier"]
    router = RouterSpec(fields["experts"], fields["top_k"], Score.SOFTMAX_OF_CHOSEN, scale=multiplier)
    part = experts(fields, router, shared=shared_layer(fields))
    return llama.model(
        fields,
        [llama.pre_norm(fields, granite.attention(fields, **own), part) for own in layers],
        input={"multiplier": fields["embedding_multiplier"]},
        output={"multiplier": 1 / divisor},
        aliases=ALIASES,
    )


def shared_layer(fields: Fields) -> FeedForwardPart | None:
    """The feed-forward layer for every token, of the field ``shared_size``; None if that is 0 or absent."""
    if not fields.get("shared_size"):
        return None
    return llama.feed_forward(
        fields,
        inner_size=fields["shared_size"],
        inner=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        multiplier=fields["residual_multiplier"],
    )


def experts(fields: Fields, router: RouterSpec, **others: Any) -> ExpertsPart:
    """Experts of ``intermediate_size`` under the names of the family, and the ``others`` of their options."""
    return ExpertsPart(
        fields["hidden_size"],
        fields["intermediate_size"],
        fields["activation"],
        router,
        router_name="block_sparse_moe.router.layer",
        experts="block_sparse_moe.experts",
        fused=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        **others,
    )


architecture = decoder(parse)
