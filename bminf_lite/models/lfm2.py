"""LFM2 (https://arxiv.org/abs/2511.23404): gated short convolutions, and attention in a few layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import llama
from ._architecture import decoder
from ._config import MAX_LAYERS, ConfigReader, Fields, flag, integer, number
from ._decoder import DecoderConfig
from ._rotary import Rotary, parse_rotary
from .parts.attention import QueryKeyNorm
from .parts.feed_forward import FeedForwardPart
from .parts.part import Part
from .parts.short_convolution import ShortConvolutionPart

KEYS = {
    "vocab_size": integer("vocab_size", 65536),
    "hidden_size": integer("hidden_size", 2560),
    "intermediate_size": integer("intermediate_size", 12288),
    "layers": integer("num_hidden_layers", 32, high=MAX_LAYERS),
    "heads": integer("num_attention_heads", 32),
    "kv_heads": integer("num_key_value_heads", 8),
    "head_dim": integer("head_dim", derive=lambda fields: max(fields["hidden_size"] // fields["heads"], 1)),
    "context_length": integer("max_position_embeddings", 128_000),
    "norm_eps": number("norm_eps", 1e-5, high=1.0),
    "tied_head": flag("tie_word_embeddings", True),
    "taps": integer("conv_L_cache", 3, high=64),
    "conv_bias": flag("conv_bias", False),
}
ATTENTION, CONVOLUTION = "full_attention", "conv"
OLDER_KEYS = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
"""Names of the first checkpoints, which precede the newer ones."""


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_newer_keys(config), KEYS)
    kinds, inner_size = kinds_of_layers(read), feed_forward_size(read)
    llama.check_heads(read)
    rotary = parse_rotary(read, theta=1e6)
    fields = read.checked_fields() | {"activation": "silu", "intermediate_size": inner_size}
    return model(fields, [(mixer, feed_forward(fields)) for mixer in mixers(fields, kinds, rotary)])


def with_newer_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``config`` with the newer names of keys that it has under older ones."""
    return {**config, **{new: config[old] for old, new in OLDER_KEYS.items() if config.get(old) is not None}}


def model(fields: Fields, layers: Iterable[tuple[Part, Part]]) -> DecoderConfig:
    """A decoder of layers with a mixer and a feed-forward each."""
    norms = "operator_norm", "ffn_norm"
    parts = [llama.pre_norm(fields, mixer, mlp, names=norms) for mixer, mlp in layers]
    return llama.model(fields, parts, names={"final_norm": "model.embedding_norm"})


def feed_forward(fields: Fields) -> FeedForwardPart:
    """The feed-forward layer for every token."""
    return llama.feed_forward(fields, inner=("feed_forward.w1", "feed_forward.w3"), down="feed_forward.w2")


def mixers(fields: Fields, kinds: Sequence[str], rotary: Rotary | None) -> list[Part]:
    """The mixer of each layer by its kind."""
    attention = llama.attention(
        fields,
        rotary=rotary,
        out="self_attn.out_proj",
        qk_norm=QueryKeyNorm.HEAD,
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
    )
    convolution = ShortConvolutionPart(fields["hidden_size"], fields["taps"], fields["conv_bias"])
    return [attention if kind == ATTENTION else convolution for kind in kinds]


def kinds_of_layers(read: ConfigReader) -> list[str]:
    """The mixer of each layer: as ``layer_types`` says, or attention in those of ``full_attn_idxs``, by default all."""
    layers, types, chosen = read.fields["layers"], read.config.get("layer_types"), read.config.get("full_attn_idxs")
    known = (ATTENTION, CONVOLUTION)
    if types is not None:
        if isinstance(types, list) and len(types) == layers and all(kind in known for kind in types):
            return types
        read.problem("layer_types", f"layer_types is {types!r}, not {layers} times one of {', '.join(known)}")
    elif chosen is not None:
        if isinstance(chosen, list) and all(type(layer) is int and 0 <= layer < layers for layer in chosen):
            return [ATTENTION if layer in chosen else CONVOLUTION for layer in range(layers)]
        read.problem("full_attn_idxs", f"full_attn_idxs is {chosen!r}, not a list of layers from 0 to {layers - 1}")
    return [ATTENTION] * layers


def feed_forward_size(read: ConfigReader) -> int:
    """The hidden units: two thirds of ``intermediate_size``, times a factor, rounded up to a multiple, unless told."""
    size: int = read.fields["intermediate_size"]
    multiple = read.value(integer("block_multiple_of", 256))
    factor = read.value_or_none(number("block_ffn_dim_multiplier", 1.0, low=1e-6, high=1e6))
    if not read.value(flag("block_auto_adjust_ff_dim", True)):
        return size
    size = int(2 * size / 3)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple


architecture = decoder(parse)
