"""Phi-3, Phi-3.5 and Phi-4 (https://arxiv.org/abs/2404.14219): LLaMA with fused matrices and LongRoPE.

LongRoPE has two sets of frequencies, for texts up to the original context and for longer ones. This version runs the
first: the context is the original one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import ConfigReader, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=32064,
    hidden_size=3072,
    intermediate_size=8192,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_longrope(config), KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read, part=1.0)
    window = read.value_or_none(integer("sliding_window", None))
    fields = read.checked_fields()
    attention = llama.attention(fields, rotary=rotary, window=window, qkv=("self_attn.qkv_proj",))
    mlp = llama.feed_forward(fields, inner=("mlp.gate_up_proj",))
    return llama.model(fields, [llama.pre_norm(fields, attention, mlp)] * fields["layers"])


def with_longrope(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the name that LongRoPE has now; older files call it ``su`` or ``yarn``."""
    found = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        rope = found.get(key)
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in ("su", "yarn", "longrope"):
            found[key] = {k: v for k, v in rope.items() if k != "type"} | {"rope_type": "longrope"}
            found.setdefault("original_max_position_embeddings", 4096)
    return found


architecture = decoder(parse)
