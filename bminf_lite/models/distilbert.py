"""DistilBERT (https://arxiv.org/abs/1910.01108): half of BERT's layers, without types of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.values import Pooling
from . import _encoder as encoder
from . import bert
from ._architecture import encoder_architecture
from ._config import ACTIVATIONS, MAX_LAYERS, ConfigReader, choice, flag, integer
from ._encoder import EncoderConfig, LayerNames
from .parts.classifier import ClassifierPart

KEYS = {
    "vocab_size": integer("vocab_size", 30522),
    "hidden_size": integer("dim", 768),
    "intermediate_size": integer("hidden_dim", 3072),
    "layers": integer("n_layers", 6, high=MAX_LAYERS),
    "heads": integer("n_heads", 12),
    "positions": integer("max_position_embeddings", 512),
    "activation": choice("activation", "gelu", ACTIVATIONS),
}
NAMES = LayerNames(
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    inner=("ffn.lin1",),
    down="ffn.lin2",
    norm="output_layer_norm",
)


def parse(config: Mapping[str, Any]) -> EncoderConfig:
    read = ConfigReader(config, KEYS)
    kind = encoder.head_kind(config)
    labels = encoder.label_names(read) if kind else ()
    read.value(flag("sinusoidal_pos_embds", False))  # the table holds them too
    fields = encoder.checked_fields(read) | {"norm_eps": 1e-12}
    base, classifier = "distilbert." if kind else "", None
    if kind == "token":
        classifier = ClassifierPart(fields["hidden_size"], len(labels), "classifier", None)
    elif kind == "sequence":
        classifier = ClassifierPart(
            fields["hidden_size"], len(labels), "classifier", Pooling.FIRST, dense="pre_classifier", activation="relu"
        )
    return EncoderConfig(
        fields["vocab_size"],
        fields["hidden_size"],
        fields["positions"],
        encoder.encoder_input(fields, base),
        (encoder.post_norm_layer(fields, NAMES),) * fields["layers"],
        prefix=f"{base}transformer.layer",
        classifier=classifier,
        labels=labels,
        ignored=(*bert.IGNORED, r"vocab_(transform|layer_norm|projector)\..*"),
        aliases=encoder.base_names(base, ("embeddings", "transformer")),
    )


architecture = encoder_architecture(parse)
