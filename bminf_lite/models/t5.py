"""T5 (https://arxiv.org/abs/1910.10683), T5 1.1 and Flan-T5.

Scores are not scaled. The first layer of each stack has a table of relative biases for all layers, and cross-attention
has none. The first version ties head and embedding, and scales the output by ``1 / sqrt(d_model)``; 1.1 does neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import _encoder_decoder as encoder_decoder
from ._architecture import Architecture
from ._config import ACTIVATIONS, ConfigReader, choice, flag, integer

FEED_FORWARDS = (
    ACTIVATIONS | {f"gated-{name}": value for name, value in ACTIVATIONS.items()} | {"gated-gelu": "gelu_tanh"}
)
"""``feed_forward_proj`` -> its function: ``gated-gelu`` means the tanh form."""

KEYS = encoder_decoder.KEYS | {
    "activation": choice("feed_forward_proj", "relu", FEED_FORWARDS),
    "gated": choice("feed_forward_proj", "relu", {name: name.startswith("gated-") for name in FEED_FORWARDS}),
}

MAX_TOKENS = 1 << 15
"""Relative biases do not bound the length of a source or a text; this bound keeps a mistake from filling the memory."""

ENCODER = encoder_decoder.StackTensorNames(
    blocks="encoder.block",
    final_norm="encoder.final_layer_norm",
    self_norm="layer.0.layer_norm",
    qkv=("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"),
    self_out="layer.0.SelfAttention.o",
    bias="layer.0.SelfAttention.relative_attention_bias",
    mlp_norm="layer.1.layer_norm",
    mlp="layer.1.DenseReluDense",
)
NAMES = encoder_decoder.TensorNames(
    embedding="shared",
    head="lm_head",
    encoder=ENCODER,
    decoder=replace(
        ENCODER,
        blocks="decoder.block",
        final_norm="decoder.final_layer_norm",
        mlp_norm="layer.2.layer_norm",
        mlp="layer.2.DenseReluDense",
        cross=encoder_decoder.CrossTensorNames(
            norm="layer.1.layer_norm",
            q="layer.1.EncDecAttention.q",
            kv=("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
            out="layer.1.EncDecAttention.o",
        ),
    ),
    ignored=(
        r"(encoder|decoder)\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    embedding_copies=("decoder.embed_tokens.weight", "encoder.embed_tokens.weight"),
)


def parse(config: Mapping[str, Any]) -> encoder_decoder.Config:
    """T5's configuration. Newer files say whether outputs are scaled, older ones whether the head is tied.

    Newer files always say that the head is tied, and may still hold a head of its own.
    """
    read = ConfigReader(config, KEYS)
    tied = read.value(flag("scale_decoder_outputs", read.value(flag("tie_word_embeddings", True))))
    return parse_t5(read, tied)


def parse_t5(read: ConfigReader, tied_head: bool) -> encoder_decoder.Config:
    """The configuration of T5, mT5 or UMT5."""
    encoder_decoder.check_buckets(read)
    last_id = read.fields["vocab_size"] - 1
    padding = read.value(integer("pad_token_id", 0, low=0, required=False))
    start = read.value(integer("decoder_start_token_id", padding, low=0, high=last_id, required=False))
    may_be_absent = not tied_head and read.value(flag("tie_word_embeddings", True))
    fields = read.checked_fields() | {"context_length": MAX_TOKENS, "tied_head": tied_head}
    fields |= {"head_may_be_absent": may_be_absent}
    return encoder_decoder.Config(**fields, decoder_start_token_id=start, names=NAMES)


architecture = Architecture(
    parse, encoder_decoder.spec, encoder_decoder.EncoderDecoderBuilder, encoder_decoder.EncoderDecoder
)
