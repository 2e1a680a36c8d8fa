"""Trinity (https://huggingface.co/arcee-ai), Arcee's mixture of experts: gated attention, and four norms a layer.

Three layers of four have a window and a rotation, the others neither. The output of attention is multiplied by the
sigmoid of a matrix of its own. The router's bias only chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backend.expert_values import RouterSpec, Score
from . import glm4_moe, llama
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, flag, integer, layer_types, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .deepseek_v3 import require_published_form
from .mixtral import check_top_k
from .parts.attention import QueryKeyNorm
from .parts.part import LayerParts, Sublayer

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=200192,
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=16,
    head_dim=128,
    max_position_embeddings=16384,
    rms_norm_eps=1e-5,
) | {
    "experts": integer("num_experts", 64),
    "top_k": integer("num_experts_per_tok", 6),
    "shared": integer("num_shared_experts", 2),
    "expert_size": integer("moe_intermediate_size", 1408),
    "dense": integer("num_dense_layers", 1, low=0),
    "scale": number("route_scale", 1.0, low=1e-30),
    "is_scaled": flag("mup_enabled", False),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    require_published_form(read, score_func="sigmoid", route_norm=True, n_group=1, topk_group=1)
    if read.value(llama.ATTENTION_BIAS):
        read.problem("attention_bias", "attention_bias is true; biases beside a matrix of gates are not supported")
    check_top_k(read)
    layers, period = read.fields["layers"], read.value(integer("global_attn_every_n_layers", 4))
    types = layer_types(read, [SLIDING if (layer + 1) % period else FULL for layer in range(layers)])
    window = read.value_or_none(integer("sliding_window", 1024))
    llama.check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    attention = llama.attention(fields, qk_norm=QueryKeyNorm.HEAD, gate="self_attn.gate_proj")
    mixers = {FULL: attention, SLIDING: replace(attention, rotary=rotary, window=window)}
    router = RouterSpec(
        fields["experts"], fields["top_k"], Score.SIGMOID, renormalise=True, epsilon=1e-20, scale=fields["scale"]
    )
    experts = glm4_moe.experts_part(fields, router, "mlp.expert_bias", router_name="mlp.router.gate")
    mlp = llama.feed_forward(fields)
    names = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    before, behind, before_mlp, behind_mlp = (llama.norm(fields, name) for name in names)
    return llama.model(
        fields,
        [
            LayerParts(
                (
                    Sublayer(mixers[kind], before, behind),
                    Sublayer(mlp if layer < fields["dense"] else experts, before_mlp, behind_mlp),
                )
            )
            for layer, kind in enumerate(types)
        ],
        input={"multiplier": fields["hidden_size"] ** 0.5 if fields["is_scaled"] else 1.0},
    )


architecture = decoder(parse)
