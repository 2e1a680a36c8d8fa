"""Gemma 4 (https://ai.google.dev/gemma/docs/core/model_card_4), its text model.

Gemma 3 with larger heads in layers without a window, of whose elements a part is rotated, a norm of values, and a
factor on the residual stream behind each layer. The small models have inputs of each layer (see
:mod:`.parts.layer_inputs`), and late layers that read the keys and values of earlier ones. In the larger ones keys and
values may have one matrix, and experts may stand beside the dense layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backend.expert_values import RouterSpec
from . import gemma2, llama
from ._architecture import decoder
from ._config import FULL, MAX_HEAD_DIM, SLIDING, ConfigReader, Fields, flag, integer, layer_types, with_defaults
from ._decoder import DecoderConfig
from ._rotary import Rotary, parse_rotary
from .parts.attention import AttentionPart, QueryKeyNorm
from .parts.branches import Branch, BranchesPart
from .parts.experts import ExpertNorms, ExpertsPart
from .parts.layer_inputs import LayerInputPart, LayerInputsPart
from .parts.norms import NormPart
from .parts.part import LayerParts, Part, Sublayer
from .parts.shared_attention import SharedAttentionPart

KEYS = with_defaults(gemma2.KEYS, vocab_size=262144, num_hidden_layers=30, max_position_embeddings=131072) | {
    "global_head_dim": integer("global_head_dim", 512, high=MAX_HEAD_DIM),
    "input_vocab": integer("vocab_size_per_layer_input", 262144),
    "input_size": integer("hidden_size_per_layer_input", 256, lambda fields: 0, low=0),
    "keys_are_values": flag("attention_k_eq_v", False),
    "shared_layers": integer("num_kv_shared_layers", 0, lambda fields: 0, low=0),
    "double_wide": flag("use_double_wide_mlp", False),
    "sparse": flag("enable_moe_block", False),
}
WINDOW = integer("sliding_window", 512)
GLOBAL_KV_HEADS = integer("num_global_key_value_heads")
LOGITS_CAP = replace(gemma2.LOGITS_CAP, default=None)
EXPERTS = {
    "experts": integer("num_experts"),
    "top_k": integer("top_k_experts"),
    "expert_size": integer("moe_intermediate_size"),
}
HEAD_KEYS = {"num_key_value_heads", "head_dim"}
"""What may differ by layer."""
STREAM_SCALE = 2.0**-6
"""The factor of the residual stream of a model with inputs of layers, and of these inputs.

Products read the stream, and what it makes of a layer's input, in fp16 and without a norm: numbers above 65,504 would
be infinite. A power of two changes no other bit.
"""
ROTARY = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
"""The rotary parameters of a ``config.json`` that has none."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    if read.fields["sparse"]:
        read.fields |= {field: read.value(key) for field, key in EXPERTS.items()}
        top_k, count = read.fields["top_k"], read.fields["experts"]
        text = f"top_k_experts is {top_k}, more than the {count} of num_experts"
        read.require(top_k <= count, text, "top_k_experts", "num_experts")
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        read.problem("use_bidirectional_attention", "use_bidirectional_attention is not null or vision: text is causal")
    layers = read.fields["layers"]
    types = layer_types(read, [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(layers)])
    types = [*types[:-1], FULL]  # as transformers has it
    heads, sources = heads_of_layers(read, types), source_layers(read, types)
    for layer, source in sources.items():
        text = f"layers {source} and {layer} have {heads[source]} and {heads[layer]} heads and elements, and one cache"
        read.require(heads[source] == heads[layer], text, "per_layer_config")
    rotary = {own: layer_rotary(read, *own) for own in dict.fromkeys(zip(types, (d for _, d in heads), strict=True))}
    window, cap = read.value(WINDOW), read.value_or_none(LOGITS_CAP)
    multiplier = gemma2.embedding_multiplier(read)
    fields = read.checked_fields()
    scale = STREAM_SCALE if fields["input_size"] else 1.0
    of_stream = {**fields, "norm_eps": fields["norm_eps"] * scale**2}
    mixers: list[Part] = []
    for layer, (kind, (kv_heads, head_dim)) in enumerate(zip(types, heads, strict=True)):
        own = attention(fields, kind, kv_heads, head_dim, rotary[kind, head_dim], window)
        mixers.append(SharedAttentionPart(own, sources[layer]) if layer in sources else own)
    return llama.model(
        of_stream,
        [layer_parts(fields, layer, mixer, layer in sources, scale) for layer, mixer in enumerate(mixers)],
        input={"multiplier": multiplier * scale, "layer_inputs": layer_inputs(fields, scale)},
        output={"softcap": cap},
        ignored=(
            r".*rotary_emb\.inv_freq",
            *(rf"model\.layers\.{layer}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*" for layer in sources),
        ),
    )


def heads_of_layers(read: ConfigReader, types: list[str]) -> list[tuple[int, int]]:
    """The number of heads of keys and values of each layer, and their size.

    ``per_layer_config`` maps layers to what differs in them. Without it, layers without a window have other heads.
    """
    fields = read.fields
    plain = fields["kv_heads"], fields["head_dim"]
    given = read.config.get("per_layer_config")
    if given is None:
        count = read.value_or_none(GLOBAL_KV_HEADS) if fields["keys_are_values"] else None
        whole = fields["kv_heads"] if count is None else count, fields["global_head_dim"]
        found = [whole if kind == FULL else plain for kind in types]
    else:
        named = {int(layer): x for layer, x in given.items()} if _is_layers(given) else {}
        own = [named.get(layer, {}) for layer in range(len(types))]
        if not (_is_layers(given) and all(map(_is_heads, own))):
            names = ", ".join(sorted(HEAD_KEYS))
            text = f"per_layer_config is {given!r}, not a mapping of layers to numbers under {names}"
            read.problem("per_layer_config", text)
            return [plain] * len(types)
        found = [(x.get("num_key_value_heads", plain[0]), x.get("head_dim", plain[1])) for x in own]
    for kv_heads, head_dim in dict.fromkeys(found):
        fits = 0 < kv_heads <= fields["heads"] and fields["heads"] % kv_heads == 0
        text = f"{fields['heads']} heads are not a multiple of {kv_heads} heads of keys and values"
        read.require(fits, text, "num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
        text = f"heads of {head_dim} elements; the size must be even, and from 2 to {MAX_HEAD_DIM}"
        read.require(2 <= head_dim <= MAX_HEAD_DIM and head_dim % 2 == 0, text, "head_dim", "global_head_dim")
    return found


def _is_layers(given: Any) -> bool:
    """Whether it maps numbers of layers, which may begin with zeros."""
    return isinstance(given, Mapping) and all(str(layer).isdecimal() for layer in given)


def _is_heads(given: Any) -> bool:
    return isinstance(given, Mapping) and given.keys() <= HEAD_KEYS and all(type(n) is int for n in given.values())


def source_layers(read: ConfigReader, types: list[str]) -> dict[int, int]:
    """For each of the last layers, which share keys and values, the last layer of its type that stores them."""
    first = len(types) - read.fields["shared_layers"]
    storing = {kind: layer for layer, kind in enumerate(types[: max(first, 0)])}
    shared = range(max(first, 0), len(types))
    if any(types[layer] not in storing for layer in shared):
        text = f"num_kv_shared_layers is {read.fields['shared_layers']}: no earlier layer of their types stores keys"
        read.problem("num_kv_shared_layers", text)
        return {}
    return {layer: storing[types[layer]] for layer in shared}


def layer_rotary(read: ConfigReader, kind: str, head_dim: int) -> Rotary | None:
    """The rotation of the layers of a kind."""
    given = read.config.get("rope_parameters")
    of_kinds: Any = ROTARY if given is None else given
    own = of_kinds.get(kind) if isinstance(of_kinds, Mapping) else None
    if not isinstance(own, Mapping):
        read.problem("rope_parameters", f"rope_parameters is {given!r}, not a mapping of types of layers to mappings")
        return None
    return parse_rotary(read, parameters=own, head_dim=head_dim)


# -- the parts, from the fields of a configuration --------------------------------------------------------------------


def attention(
    fields: Fields, kind: str, kv_heads: int, head_dim: int, rotary: Rotary | None, window: int
) -> AttentionPart:
    """Attention whose values are the keys before their norm, in layers without a window of some models."""
    keys = ("self_attn.q_proj", "self_attn.k_proj")
    values = keys[1] if fields["keys_are_values"] and kind == FULL else "self_attn.v_proj"
    return llama.attention(
        fields,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=rotary,
        window=window if kind == SLIDING else None,
        qkv=(*keys, values),
        qk_norm=QueryKeyNorm.HEAD,
        value_norm=True,
        score_scale=1.0,
    )


def layer_parts(fields: Fields, layer: int, mixer: Part, is_shared: bool, scale: float) -> LayerParts:
    """Attention, the dense layer, beside which experts may stand, and the layer's input, each with its norms.

    ``scale`` is the factor that the residual stream has.
    """

    def reading(name: str) -> NormPart:
        return replace(llama.norm(fields, name), eps=fields["norm_eps"] * scale**2)

    def norm(name: str, factor: float = scale) -> NormPart:
        return replace(llama.norm(fields, name), factor=factor)

    before, behind = reading("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
    width = fields["intermediate_size"] * (2 if fields["double_wide"] and is_shared else 1)
    dense = llama.feed_forward(fields, inner_size=width)
    sublayers = [Sublayer(mixer, reading("input_layernorm"), norm("post_attention_layernorm"))]
    if fields["sparse"]:
        branches = (
            Branch(dense, before, norm("post_feedforward_layernorm_1", 1.0)),
            Branch(
                experts(fields, reading("pre_feedforward_layernorm_2")), None, norm("post_feedforward_layernorm_2", 1.0)
            ),
        )
        sublayers.append(Sublayer(BranchesPart(branches), None, behind))
    else:
        sublayers.append(Sublayer(dense, before, behind))
    if fields["input_size"]:
        sizes = fields["hidden_size"], fields["input_size"]
        part = LayerInputPart(*sizes, layer, fields["activation"], multiplier=1 / scale)
        behind_input = replace(norm("post_per_layer_input_norm"), eps=fields["norm_eps"] * scale**2)
        sublayers.append(Sublayer(part, None, behind_input))
    return LayerParts(tuple(sublayers), scale="layer_scalar")


def experts(fields: Fields, norm: NormPart) -> ExpertsPart:
    """Experts with factors on their results, whose router has a norm of its own."""
    root = fields["hidden_size"] ** -0.5
    return ExpertsPart(
        fields["hidden_size"],
        fields["expert_size"],
        fields["activation"],
        RouterSpec(fields["experts"], fields["top_k"], renormalise=True),
        router_name="router.proj",
        experts="experts",
        fused=("experts.gate_up_proj", "experts.down_proj"),
        input_norms=ExpertNorms(norm, "router.scale", root),
        expert_scales="router.per_expert_scale",
    )


def layer_inputs(fields: Fields, scale: float) -> LayerInputsPart | None:
    """The inputs of all layers, None for a model without. ``scale`` is their factor, and the residual stream's."""
    size = fields["input_size"]
    if not size:
        return None
    norm = NormPart("model.per_layer_projection_norm", size, fields["norm_eps"])
    return LayerInputsPart(
        fields["input_vocab"],
        fields["layers"],
        size,
        norm,
        project_scale=fields["hidden_size"] ** -0.5 / scale,
        table_scale=size**0.5,
        scale=2**-0.5 * scale,
    )


architecture = decoder(parse)
