"""Solar Open (https://huggingface.co/upstage/Solar-Open-100B): GLM-4.5's experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import glm4_moe, llama
from ._architecture import decoder
from ._config import ConfigReader, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .deepseek_v3 import require_published_form
from .mixtral import check_top_k
from .qwen3_moe import with_num_experts

KEYS = with_defaults(
    {field: key for field, key in glm4_moe.KEYS.items() if field not in ("qk_norm", "dense")},
    vocab_size=196608,
    num_hidden_layers=48,
    num_attention_heads=64,
    head_dim=128,
    moe_intermediate_size=1280,
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_num_experts(config, "n_routed_experts"), KEYS)
    require_published_form(read, first_k_dense_replace=0, use_qk_norm=False)
    check_top_k(read)
    router = glm4_moe.router_of(read)
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=1000000.0)
    fields = read.checked_fields()
    attention, experts = llama.attention(fields, rotary=rotary), glm4_moe.experts_part(fields, router)
    return llama.model(fields, [llama.pre_norm(fields, attention, experts)] * fields["layers"])


architecture = decoder(parse)
