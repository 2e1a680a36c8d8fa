"""Flint (https://huggingface.co/RecursiveSI/flint): Qwen3 MoE with sinks, sigmoid routers and a shared expert.

Layers with a window have a rotation, and the others none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backend.expert_values import RouterSpec, Score
from . import glm4_moe, llama, qwen3_moe
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, flag, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .ministral import windows_of_types
from .mixtral import check_top_k
from .parts.attention import QueryKeyNorm

KEYS = with_defaults(
    {field: key for field, key in qwen3_moe.KEYS.items() if field != "renormalise"},
    vocab_size=150144,
    num_hidden_layers=49,
    num_attention_heads=32,
    head_dim=128,
    max_position_embeddings=262144,
    num_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=512,
) | {
    "renormalise": flag("norm_topk_prob", True),
    "shared_size": integer("shared_expert_intermediate_size", 1024),
}
ALIASES = ((r"(model\.layers\.\d+\.self_attn)\.sinks", r"\1.softmax_offset"),)
"""Names that transformers has in memory, and those of the files."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    given = qwen3_moe.with_num_experts(config, "num_experts")
    if given.get("mlp_only_layers") is None:
        given = {**given, "mlp_only_layers": [0, 1]}
    read = ConfigReader(given, KEYS)
    check_top_k(read)
    dense, layers = dense_layers(read), range(read.fields["layers"])
    is_full = [layer < 2 or layer % 4 == 1 or layer == layers[-1] for layer in layers]
    windows = windows_of_types(read, 513, [FULL if full else SLIDING for full in is_full])
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    router = RouterSpec(fields["experts"], fields["top_k"], Score.SIGMOID, renormalise=fields["renormalise"])
    sizes = {**fields, "shared": 1, "expert_size": fields["expert_size"]}
    attention = llama.attention(fields, qk_norm=QueryKeyNorm.HEAD, sinks="self_attn.softmax_offset")
    names = tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down"))
    shared = llama.feed_forward(fields, inner_size=fields["shared_size"], inner=names[:2], down=names[2])
    experts = replace(glm4_moe.experts_part(sizes, router, None), shared=shared)
    mlp = llama.feed_forward(fields)
    mixers = [replace(attention, window=w, rotary=None if w is None else rotary) for w in windows]
    return llama.model(
        fields,
        [
            llama.pre_norm(fields, mixer, mlp if is_dense else experts)
            for mixer, is_dense in zip(mixers, dense, strict=True)
        ],
        aliases=ALIASES,
    )


def dense_layers(read: ConfigReader) -> list[bool]:
    """Whether each layer has one feed-forward layer; ``mlp_only_layers`` beyond the last one do not count."""
    given, layers = read.config["mlp_only_layers"], read.fields["layers"]
    if isinstance(given, list):
        read.config = {**read.config, "mlp_only_layers": [x for x in given if type(x) is not int or x < layers]}
    return qwen3_moe.dense_layers(read)


architecture = decoder(parse)
