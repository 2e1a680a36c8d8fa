"""FlexOlmo (https://arxiv.org/abs/2507.07024): OLMo 2 with experts, which read the residual stream itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama, olmo2, qwen3_moe
from ._architecture import decoder
from ._config import ConfigReader, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .mixtral import check_top_k
from .parts.attention import QueryKeyNorm

KEYS = (
    with_defaults(olmo2.KEYS, vocab_size=100352, max_position_embeddings=4096, rms_norm_eps=1e-6)
    | qwen3_moe.EXPERTS
    | {"experts": integer("num_experts", 7), "top_k": integer("num_experts_per_tok", 5)}
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(qwen3_moe.with_num_experts(config, "num_experts"), KEYS)
    check_top_k(read)
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=500000.0)
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary, qk_norm=QueryKeyNorm.WHOLE)
    experts = qwen3_moe.experts_part(read, fields["intermediate_size"])
    return llama.model(fields, [olmo2.post_norm(fields, attention, experts)] * fields["layers"])


architecture = decoder(parse)
