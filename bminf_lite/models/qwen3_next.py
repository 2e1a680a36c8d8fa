"""Qwen3-Next (https://arxiv.org/abs/2412.06464): gated DeltaNet in three layers of four, gated attention, and experts.

Attention has a gate for its output, and rotates a quarter of each head. Norms add 1 to their weights, except those of a
DeltaNet's heads. Beside the experts of a layer there is one for every token, with a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama, qwen3_moe
from ._architecture import decoder
from ._config import FULL, MAX_HEAD_DIM, ConfigReader, Fields, integer, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .mixtral import check_top_k
from .parts.attention import AttentionPart, QueryKeyNorm
from .parts.delta_net import DeltaNetPart
from .parts.experts import ExpertsPart
from .parts.part import Part

LINEAR = "linear_attention"
DELTA_NET = {
    "taps": integer("linear_conv_kernel_dim", 4, high=64),
    "key_dim": integer("linear_key_head_dim", 128, high=MAX_HEAD_DIM),
    "value_dim": integer("linear_value_head_dim", 128, high=MAX_HEAD_DIM),
    "key_heads": integer("linear_num_key_heads", 16),
    "value_heads": integer("linear_num_value_heads", 32),
}
"""The keys of layers with a gated DeltaNet."""
BIASES = {"qkv_bias": llama.ATTENTION_BIAS, "o_bias": llama.ATTENTION_BIAS}
KEYS = (
    with_defaults(
        llama.KEYS,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        max_position_embeddings=32768,
    )
    | BIASES
    | DELTA_NET
    | with_defaults(qwen3_moe.EXPERTS, num_experts=512, num_experts_per_tok=10, norm_topk_prob=True)
    | {
        "expert_size": integer("moe_intermediate_size", 512),
        "shared_size": integer("shared_expert_intermediate_size", 512),
        "step": integer("decoder_sparse_step", 1),
    }
)
IGNORED = (r".*rotary_emb\.inv_freq", r"mtp\..*")
"""Tensors that are not read; of ``mtp``, a layer that guesses tokens, only what the specification lists is read."""
GROUPED = {"qkvz": ("linear_attn.in_proj_qkvz",), "gates": ("linear_attn.in_proj_ba",)}
"""The projections of a DeltaNet, by key heads."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(qwen3_moe.with_num_experts(config, "num_experts"), KEYS)
    check_top_k(read)
    dense, kinds = qwen3_moe.dense_layers(read), kinds_of_layers(read)
    fields, mixers = parse_mixers(read, **GROUPED)
    experts, mlp = shared_experts(read), llama.feed_forward(fields)
    mlps: list[Part] = [mlp if is_dense else experts for is_dense in dense]
    return model(fields, [mixers[kind] for kind in kinds], mlps, (mixers[FULL], experts))


def kinds_of_layers(read: ConfigReader) -> list[str]:
    """The mixer of each layer: as ``layer_types`` says, or attention in every ``full_attention_interval``-th."""
    layers, types = read.fields["layers"], read.config.get("layer_types")
    if types is None:
        interval = read.value(integer("full_attention_interval", 4))
        return [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
    known = (LINEAR, FULL)
    if isinstance(types, list) and len(types) == layers and all(kind in known for kind in types):
        return types
    read.problem("layer_types", f"layer_types is {types!r}, not {layers} times one of {', '.join(known)}")
    return [FULL] * layers


def parse_mixers(read: ConfigReader, **names: Any) -> tuple[Fields, dict[str, Part]]:
    """The fields of a configuration, and the mixers of both kinds; ``names`` are those of a DeltaNet's projections.

    Raises ``CheckpointError`` with all problems.
    """
    llama.check_heads(read)
    read.require_divisible("value_heads", "key_heads")
    activation = read.fields["activation"]
    text = f"hidden_act is {read.config.get('hidden_act')!r}; a gated DeltaNet is run with 'silu' only"
    read.require(activation == "silu", text, "hidden_act")
    rotary = parse_rotary(read, part=0.25)
    fields = read.checked_fields()
    attention: AttentionPart = llama.attention(
        fields, rotary=rotary, qk_norm=QueryKeyNorm.HEAD, norm_offset=1.0, output_gate=True
    )
    delta_net = DeltaNetPart(
        fields["hidden_size"],
        fields["key_heads"],
        fields["value_heads"],
        fields["key_dim"],
        fields["value_dim"],
        fields["taps"],
        fields["norm_eps"],
    )
    return fields, {FULL: attention, LINEAR: replace(delta_net, **names)}


def shared_experts(read: ConfigReader) -> ExpertsPart:
    """Experts, and one for every token with a gate."""
    names = tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down"))
    fields = read.fields
    shared = llama.feed_forward(fields | {"intermediate_size": fields["shared_size"]}, inner=names[:2], down=names[2])
    return qwen3_moe.experts_part(read, fields["expert_size"], shared=shared, shared_gate="mlp.shared_expert_gate")


def model(fields: Fields, mixers: list[Part], mlps: list[Part], drafting: tuple[Part, Part]) -> DecoderConfig:
    """A decoder of these parts, whose norms add 1 to their weights; ``drafting`` are those of a layer that guesses."""
    layers = [llama.pre_norm(fields, *parts, offset=1.0) for parts in zip(mixers, mlps, strict=True)]
    names = llama.DraftingNames(
        "mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
    )
    guesses = llama.drafting(fields, llama.pre_norm(fields, *drafting, offset=1.0), names, offset=1.0)
    return llama.model(fields, layers, offset=1.0, ignored=IGNORED, drafting=guesses)


architecture = decoder(parse)
