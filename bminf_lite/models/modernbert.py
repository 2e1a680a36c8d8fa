"""ModernBERT (https://arxiv.org/abs/2412.13663): rotary positions, gated feed-forward layers, windows on most layers.

Layers normalise before their parts; the first one's attention reads the normalised embedding itself. Every third layer
sees whole texts, with a rotary base of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.values import Pooling
from . import _encoder as encoder
from ._architecture import encoder_architecture
from ._config import (
    ACTIVATIONS,
    FULL,
    SLIDING,
    ConfigReader,
    Fields,
    choice,
    flag,
    integer,
    layer_types,
    number,
    with_defaults,
)
from ._encoder import EncoderConfig
from ._rotary import parse_rotary
from .parts.classifier import ClassifierPart
from .parts.ends import InputPart
from .parts.feed_forward import FeedForwardPart
from .parts.norms import NormKind, NormPart
from .parts.part import LayerParts, Sublayer

KEYS = with_defaults(
    encoder.KEYS, vocab_size=50368, intermediate_size=1152, num_hidden_layers=22, max_position_embeddings=8192
) | {
    "norm_eps": number("norm_eps", 1e-5, high=1.0),
    "activation": choice("hidden_activation", "gelu", ACTIVATIONS),
    "norm_bias": flag("norm_bias", False),
    "attention_bias": flag("attention_bias", False),
    "mlp_bias": flag("mlp_bias", False),
    "local_attention": integer("local_attention", 128, low=2),
    "pooling": choice("classifier_pooling", "cls", {"cls": Pooling.FIRST, "mean": Pooling.MEAN}),
    "head_bias": flag("classifier_bias", False),
    "head_activation": choice("classifier_activation", "gelu", ACTIVATIONS),
}
THETAS = {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}
"""By type of layer, the key of the rotary base in the older spelling, and its default."""


def parse(config: Mapping[str, Any]) -> EncoderConfig:
    read = ConfigReader(config, KEYS)
    kind = encoder.head_kind(config)
    labels = encoder.label_names(read) if kind else ()
    every = read.value(integer("global_attn_every_n_layers", 3))
    types = layer_types(read, [SLIDING if i % every else FULL for i in range(read.fields["layers"])])
    read.fields["head_dim"] = max(read.fields["hidden_size"] // read.fields["heads"], 1)
    read.fields["context_length"] = read.fields["positions"]
    rotary = {name: parse_rotary(read, parameters=_rotary_parameters(read, name)) for name in THETAS}
    fields = encoder.checked_fields(read)
    base = "model." if kind else ""
    layers = []
    for i, layer_type in enumerate(types):
        window = fields["local_attention"] // 2 + 1 if layer_type == SLIDING else None
        mixer = encoder.attention(
            fields, ("attn.Wqkv",), "attn.Wo", fields["attention_bias"], rotary=rotary[layer_type], window=window
        )
        widths = fields["hidden_size"], fields["intermediate_size"]
        mlp = FeedForwardPart(*widths, fields["activation"], True, ("mlp.Wi",), "mlp.Wo", fields["mlp_bias"])
        first = _norm(fields, "attn_norm") if i else None
        layers.append(LayerParts((Sublayer(mixer, first), Sublayer(mlp, _norm(fields, "mlp_norm")))))
    sizes = fields["vocab_size"], fields["hidden_size"]
    table, norm = f"{base}embeddings.tok_embeddings", _norm(fields, f"{base}embeddings.norm")
    return EncoderConfig(
        *sizes,
        read.fields["context_length"],
        InputPart(*sizes, table, norm=norm),
        tuple(layers),
        _norm(fields, f"{base}final_norm"),
        prefix=f"{base}layers",
        classifier=_head(fields, kind, len(labels)) if kind else None,
        labels=labels,
        ignored=(r"decoder\..*",) if kind else (r"decoder\..*", r"head\..*"),
        aliases=encoder.base_names(base, ("embeddings", "layers", "final_norm")),
    )


def _rotary_parameters(read: ConfigReader, layer_type: str) -> dict[str, Any]:
    """The rotary parameters of the layers of a type."""
    key, default = THETAS[layer_type]
    found = read.config.get("rope_parameters") or {}
    own = found.get(layer_type) if isinstance(found, Mapping) else None
    scaling = read.config.get("rope_scaling")
    for name, value in (("rope_parameters", found), ("rope_parameters", own), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, Mapping):
            read.problem("rope_parameters", f"{name} is {value!r}, not a mapping")
            return {"rope_theta": default}
    return {"rope_theta": read.config.get(key, default)} | dict(scaling or {}) | dict(own or {})


def _norm(fields: Fields, name: str) -> NormPart:
    kind = NormKind.LAYER if fields["norm_bias"] else NormKind.LAYER_WITHOUT_BIAS
    return NormPart(name, fields["hidden_size"], fields["norm_eps"], kind)


def _head(fields: Fields, kind: str, labels: int) -> ClassifierPart:
    return ClassifierPart(
        fields["hidden_size"],
        labels,
        "classifier",
        fields["pooling"] if kind == "sequence" else None,
        dense="head.dense",
        dense_bias=fields["head_bias"],
        activation=fields["head_activation"],
        norm=_norm(fields, "head.norm"),
    )


architecture = encoder_architecture(parse)
