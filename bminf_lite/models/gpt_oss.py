"""gpt-oss (https://arxiv.org/abs/2508.10925): attention sinks, windows on every second layer, experts with biases.

The gate and up of an expert are limited before their product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backend.expert_values import ExpertActivation, RouterSpec, Score
from . import llama
from ._architecture import decoder
from ._config import FULL, SLIDING, ConfigReader, Fields, flag, integer, layer_types, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .mixtral import check_top_k
from .parts.experts import ExpertsPart

BIAS = flag("attention_bias", True)
KEYS = with_defaults(
    llama.KEYS,
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
) | {
    "qkv_bias": BIAS,
    "o_bias": BIAS,
    "experts": integer("num_local_experts", 128),
    "top_k": integer("num_experts_per_tok", 4),
    "alpha": number("swiglu_alpha", 1.702),
    "limit": number("swiglu_limit", 7.0, low=1e-6),
}
WINDOW = integer("sliding_window", 128)
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotation of a file that names none."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    check_top_k(read)
    llama.check_heads(read)
    windows = windows_of(read)
    is_named = config.get("rope_scaling") or config.get("rope_parameters") is not None
    rotary = parse_rotary(read, theta=150000.0, parameters=None if is_named else ROPE | theta_of(config))
    fields = read.checked_fields()
    attention, experts = llama.attention(fields, rotary=rotary, sinks="self_attn.sinks"), experts_part(fields)
    layers = [llama.pre_norm(fields, replace(attention, window=window), experts) for window in windows]
    return llama.model(fields, layers)


def theta_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The base of the rotation, if the file names it alone."""
    return {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}


def windows_of(read: ConfigReader) -> list[int | None]:
    """Each layer's window: by default every second layer, from the first on, has one."""
    layers, window = read.fields["layers"], read.value_or_none(WINDOW)
    types = layer_types(read, [FULL if layer % 2 else SLIDING for layer in range(layers)])
    if SLIDING in types and window is None:
        read.problem("sliding_window", "sliding_window is null, and some layers have windows")
    return [window if kind == SLIDING else None for kind in types]


def experts_part(fields: Fields) -> ExpertsPart:
    """The experts; those of all are stored in one tensor, ``[in, out]``, with gate and up in turn."""
    return ExpertsPart(
        fields["hidden_size"],
        fields["intermediate_size"],
        ExpertActivation(limit=fields["limit"], alpha=fields["alpha"]),
        RouterSpec(fields["experts"], fields["top_k"], Score.SOFTMAX_OF_CHOSEN),
        router_name="mlp.router",
        fused_transposed=True,
        fused_alternate=True,
        bias=True,
    )


architecture = decoder(parse)
