"""Phi-3.5-MoE (https://arxiv.org/abs/2404.14219): Mixtral with LayerNorms, biases, LongRoPE and SparseMixer's router.

A token has two experts, each with the weight of a softmax of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backend.expert_values import RouterSpec, Score
from ..layers.position import rope_parameters
from . import llama, mixtral
from ._architecture import decoder
from ._config import ConfigReader, flag, integer, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import Rotary, parse_rotary
from .parts.norms import NormKind

KEYS = with_defaults(mixtral.KEYS, vocab_size=32064, intermediate_size=6400, num_local_experts=16) | {
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
    "head_bias": flag("lm_head_bias", False),
    "jitter": number("router_jitter_noise", 0.01),
}
ALIASES = (
    (r"(model\.layers\.\d+)\.mlp\.router\.(.*)", r"\1.block_sparse_moe.gate.\2"),
    (r"(model\.layers\.\d+)\.mlp\.(experts\..*)", r"\1.block_sparse_moe.\2"),
)
"""Names that transformers has used since version 5."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    mixtral.check_top_k(read)
    top_k = read.fields["top_k"]
    read.require(
        top_k == 2, f"num_experts_per_tok is {top_k}, not 2, the experts of such a router", "num_experts_per_tok"
    )
    window = read.value_or_none(mixtral.WINDOW)
    llama.check_heads(read)
    rotary = rotary_of(read)
    fields, kind = read.checked_fields(), NormKind.LAYER
    router = RouterSpec(fields["experts"], top_k, Score.SPARSE_MIXER, closeness=2 * fields["jitter"])
    attention = llama.attention(fields, rotary=rotary, window=window)
    layer = llama.pre_norm(fields, attention, mixtral.experts_part(fields, router), kind)
    output = {"bias": fields["head_bias"]}
    return llama.model(fields, [layer] * fields["layers"], kind, output=output, aliases=ALIASES)


def rotary_of(read: ConfigReader) -> Rotary | None:
    """The rotation; with a scaling, ``short_mscale`` is the factor on cosine and sine in the original context."""
    found = parse_rotary(read, theta=1e6)
    if found is None:
        return None
    parameters = rope_parameters(read.config)
    if parameters["rope_type"] == "default":
        return found
    scales: list[Any] = [parameters.get(name) for name in ("short_mscale", "long_mscale")]
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and 1e-9 < x < 1e30 for x in scales):
        read.problem("rope_parameters", f"short_mscale and long_mscale are {scales}, not two positive numbers")
        return found
    if scales[0] != scales[1]:
        original = integer("original_max_position_embeddings").convert(
            parameters.get("original_max_position_embeddings", read.fields["context_length"])
        )
        read.require(
            original is not None, "original_max_position_embeddings is not a number of tokens", "rope_parameters"
        )
        read.fields["context_length"] = min(read.fields["context_length"], original or 1)
    return replace(found, scale=scales[0])


architecture = decoder(parse)
