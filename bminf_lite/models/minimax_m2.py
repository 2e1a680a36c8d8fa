"""MiniMax-M2 (https://github.com/MiniMax-AI/MiniMax-M2): experts behind a sigmoid router with a bias that only chooses.

Queries and keys are each normalised over all heads together, and a part of each head is rotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.expert_values import RouterSpec, Score
from . import llama, mixtral
from ._architecture import decoder
from ._config import ConfigReader, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .parts.attention import QueryKeyNorm

KEYS = with_defaults(
    mixtral.KEYS,
    vocab_size=200064,
    hidden_size=3072,
    intermediate_size=1536,
    num_hidden_layers=62,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=196608,
    rms_norm_eps=1e-6,
    num_local_experts=256,
    num_experts_per_tok=8,
)
ROTATED = integer("rotary_dim")
"""The rotated elements of a head in published files."""
ALIASES = (
    *mixtral.ALIASES,
    (r"(model\.layers\.\d+)\.mlp\.(e_score_correction_bias)", r"\1.block_sparse_moe.\2"),
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    mixtral.check_top_k(read)
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=5e6, part=rotated_part(read))
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary, qk_norm=QueryKeyNorm.WHOLE)
    router = RouterSpec(fields["experts"], fields["top_k"], Score.SIGMOID, renormalise=True)
    experts = mixtral.experts_part(fields, router, correction_bias="block_sparse_moe.e_score_correction_bias")
    layer = llama.pre_norm(fields, attention, experts)
    return llama.model(fields, [layer] * fields["layers"], aliases=ALIASES)


def rotated_part(read: ConfigReader) -> float:
    """The share of a head that is rotated where ``partial_rotary_factor`` does not say it."""
    rotated = read.value_or_none(ROTATED)
    return 1.0 if rotated is None else rotated / read.fields["head_dim"]


architecture = decoder(parse)
