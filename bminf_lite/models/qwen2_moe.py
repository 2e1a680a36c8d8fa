"""Qwen2 MoE (https://arxiv.org/abs/2407.10671), and Qwen1.5 MoE: Qwen2 with experts, and a shared one with a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama, qwen3_moe
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, flag, integer, layer_types, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .mixtral import check_top_k

KEYS = (
    with_defaults(
        llama.KEYS,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=32768,
    )
    | qwen3_moe.EXPERTS
    | {
        "experts": integer("num_experts", 60),
        "top_k": integer("num_experts_per_tok", 4),
        "qkv_bias": flag("qkv_bias", True),
        "expert_size": integer("moe_intermediate_size", 1408),
        "shared_size": integer("shared_expert_intermediate_size", 5632),
        "step": integer("decoder_sparse_step", 1),
    }
)
WINDOW = integer("sliding_window", 4096, low=0)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(qwen3_moe.with_num_experts(config, "num_experts"), KEYS)
    check_top_k(read)
    dense, windows = qwen3_moe.dense_layers(read), windows_of(read)
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    attention, mlp = llama.attention(fields, rotary=rotary), llama.feed_forward(fields)
    names = tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down"))
    shared = llama.feed_forward(fields, inner_size=fields["shared_size"], inner=names[:2], down=names[2])
    experts = qwen3_moe.experts_part(read, fields["expert_size"], shared=shared, shared_gate="mlp.shared_expert_gate")
    return llama.model(
        fields,
        [
            llama.pre_norm(fields, replace(attention, window=window), mlp if is_dense else experts)
            for window, is_dense in zip(windows, dense, strict=True)
        ],
    )


def windows_of(read: ConfigReader) -> list[int | None]:
    """Each layer's window, which counts only with ``use_sliding_window``: by default every second below a number."""
    layers: int = read.fields["layers"]
    if not read.value(flag("use_sliding_window", False)) or read.is_null(WINDOW):
        return [None] * layers
    window, most = read.value(WINDOW), read.value(integer("max_window_layers", 28, low=0))
    default = [SLIDING if layer % 2 == 0 and layer < most else FULL for layer in range(layers)]
    return [window if kind == SLIDING else None for kind in layer_types(read, default)]


architecture = decoder(parse)
