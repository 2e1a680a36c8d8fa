"""Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence/), its text model: experts beside a shared one.

The sigmoid of a router's logit multiplies the input of its expert. Some layers have no rotation; the others see the
tokens of their chunk alone. This version runs the first chunk, where they see all, and where the factor on the queries
of layers without a rotation is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.expert_values import RouterSpec, Score
from . import llama
from ._architecture import decoder
from ._config import FULL, ConfigReader, Fields, flag, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import Rotary, parse_rotary
from .mixtral import check_top_k
from .parts.attention import AttentionPart, QueryKeyNorm
from .parts.experts import ExpertsPart
from .parts.feed_forward import FeedForwardPart
from .smollm3 import rotated_layers

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=202048,
    hidden_size=5120,
    intermediate_size=8192,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096 * 32,
    rms_norm_eps=1e-5,
) | {
    "qkv_bias": llama.ATTENTION_BIAS,
    "o_bias": llama.ATTENTION_BIAS,
    "dense_size": integer("intermediate_size_mlp", 16384),
    "experts": integer("num_local_experts", 16),
    "top_k": integer("num_experts_per_tok", 1),
    "step": integer("interleave_moe_layer_step", 1),
    "qk_norm": flag("use_qk_norm", True),
    "tunes": flag("attn_temperature_tuning", True),
    "floor_scale": integer("floor_scale", 8192, low=2),
}
CHUNK = integer("attention_chunk_size", 8192)
CHUNKED = "chunked_attention"


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    if not config.get("no_rope_layers"):
        config = {**config, "no_rope_layers": None}
    read = ConfigReader(config, KEYS)
    check_top_k(read)
    llama.check_heads(read)
    sparse, rotated = sparse_layers(read), rotated_layers(read)
    rotary = parse_rotary(read, theta=500000.0, interleaved=True)
    if rotary is not None and rotary.scale != 1:
        read.problem("rope_parameters", f"a factor of {rotary.scale:g} on rotated queries and keys is not known here")
    limit_context(read, rotated)
    fields = read.checked_fields()
    return llama.model(
        fields,
        [
            llama.pre_norm(fields, attention(fields, rotary if is_rotated else None), feed_forward(fields, is_sparse))
            for is_rotated, is_sparse in zip(rotated, sparse, strict=True)
        ],
    )


def sparse_layers(read: ConfigReader) -> list[bool]:
    """Whether each layer has experts: those in ``moe_layers``, else the last of each ``interleave_moe_layer_step``."""
    layers, given = read.fields["layers"], read.config.get("moe_layers")
    if given is None:
        return [(layer + 1) % read.fields["step"] == 0 for layer in range(layers)]
    if not isinstance(given, list) or any(type(layer) is not int for layer in given):
        read.problem("moe_layers", f"moe_layers is {given!r}, not a list of the numbers of layers")
        return [True] * layers
    return [layer in given for layer in range(layers)]


def limit_context(read: ConfigReader, rotated: list[bool]) -> None:
    """Limit the context to the first chunk, and to where queries without a rotation have the factor 1.

    That factor is ``1 + attn_scale * log(1 + floor((position + 1) / floor_scale))``.
    """
    layers, types = read.fields["layers"], read.config.get("layer_types")
    if types is None:
        types = [CHUNKED if is_rotated else FULL for is_rotated in rotated]
    elif not isinstance(types, list) or len(types) != layers or any(kind not in (CHUNKED, FULL) for kind in types):
        read.problem("layer_types", f"layer_types is {types!r}, not {layers} times one of {FULL}, {CHUNKED}")
        return
    chunk, context = read.value_or_none(CHUNK), read.fields["context_length"]
    if chunk is not None and CHUNKED in types:
        context = min(context, chunk)
    if read.fields["tunes"] and not all(rotated):
        context = min(context, read.fields["floor_scale"] - 1)
    read.fields["context_length"] = context


def attention(fields: Fields, rotary: Rotary | None) -> AttentionPart:
    """Attention, in which rotated queries and keys may be normalised: a rotation does not change their norm."""
    is_normed = fields["qk_norm"] and rotary is not None
    return llama.attention(fields, rotary=rotary, qk_norm=QueryKeyNorm.PLAIN_HEAD if is_normed else QueryKeyNorm.NONE)


def feed_forward(fields: Fields, is_sparse: bool) -> FeedForwardPart | ExpertsPart:
    """One feed-forward layer, or experts beside a shared one. Those of all are stored in one tensor, ``[in, out]``."""
    if not is_sparse:
        return plain(fields, "feed_forward", fields["dense_size"])
    return ExpertsPart(
        fields["hidden_size"],
        fields["intermediate_size"],
        fields["activation"],
        RouterSpec(fields["experts"], fields["top_k"], Score.SIGMOID, scales_input=True),
        router_name="feed_forward.router",
        experts="feed_forward.experts",
        fused=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        fused_transposed=True,
        shared=plain(fields, "feed_forward.shared_expert", fields["intermediate_size"]),
    )


def plain(fields: Fields, name: str, inner_size: int) -> FeedForwardPart:
    """A gated feed-forward layer with the names ``{name}.gate_proj`` and so on."""
    gate, up, down = (f"{name}.{part}_proj" for part in ("gate", "up", "down"))
    return llama.feed_forward(fields, inner_size=inner_size, inner=(gate, up), down=down)


architecture = decoder(parse)
