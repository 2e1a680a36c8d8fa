"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral with a mixture of experts in each layer.

The router's softmax over all experts is renormalised over the chosen ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.expert_values import RouterSpec
from . import llama
from ._architecture import decoder
from ._config import ConfigReader, Fields, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.experts import ExpertsPart

KEYS = with_defaults(
    llama.KEYS,
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=4096 * 32,
    rms_norm_eps=1e-5,
) | {"experts": integer("num_local_experts", 8), "top_k": integer("num_experts_per_tok", 2)}
WINDOW = integer("sliding_window", None)
ALIASES = ((r"(model\.layers\.\d+)\.mlp\.((?:gate|experts)\..*)", r"\1.block_sparse_moe.\2"),)
"""Names that transformers has used since version 5."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    check_top_k(read)
    window = read.value_or_none(WINDOW)
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=1e6)
    fields = read.checked_fields()
    experts = experts_part(fields, RouterSpec(fields["experts"], fields["top_k"], renormalise=True))
    attention = llama.attention(fields, rotary=rotary, window=window)
    layer = llama.pre_norm(fields, attention, experts)
    return llama.model(fields, [layer] * fields["layers"], aliases=ALIASES)


def experts_part(fields: Fields, router: RouterSpec, correction_bias: str | None = None) -> ExpertsPart:
    """Experts with Mixtral's names."""
    return ExpertsPart(
        fields["hidden_size"],
        fields["intermediate_size"],
        fields["activation"],
        router,
        router_name="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
        fused=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
        correction_bias=correction_bias,
    )


def check_top_k(read: ConfigReader) -> None:
    """Record a problem if a token chooses more experts than there are."""
    experts, top_k = (read.keys[field].name for field in ("experts", "top_k"))
    text = f"{top_k} ({read.fields['top_k']}) exceeds {experts} ({read.fields['experts']})"
    read.require(read.fields["top_k"] <= read.fields["experts"], text, experts, top_k)


architecture = decoder(parse)
