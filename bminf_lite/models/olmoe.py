"""OLMoE (https://arxiv.org/abs/2409.02060): a mixture of small experts.

Queries and keys are each normalised over all heads together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama, qwen3_moe
from ._architecture import decoder
from ._config import ConfigReader, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .mixtral import check_top_k
from .parts.attention import QueryKeyNorm

KEYS = (
    with_defaults(
        llama.KEYS,
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    | {"qkv_bias": llama.ATTENTION_BIAS, "o_bias": llama.ATTENTION_BIAS}
    | qwen3_moe.EXPERTS
    | {"experts": integer("num_experts", 64)}
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    check_top_k(read)
    reject_clipping(read)
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary, qk_norm=QueryKeyNorm.WHOLE)
    experts = qwen3_moe.experts_part(read, fields["intermediate_size"])
    return llama.model(fields, [llama.pre_norm(fields, attention, experts)] * fields["layers"])


def reject_clipping(read: ConfigReader) -> None:
    """Record a problem with a model that limits queries, keys and values."""
    limit = read.config.get("clip_qkv")
    if limit is not None:
        read.problem("clip_qkv", f"clip_qkv is {limit!r}; clipped queries, keys and values are not supported")


architecture = decoder(parse)
