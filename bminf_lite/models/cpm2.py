"""CPM-2 (https://arxiv.org/abs/2106.10715): a Chinese T5 of 11 billion parameters with a head of its own.

As in T5, attention scores are not scaled. The tensors have the names of the published model-parallel checkpoint, its
shards merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import _encoder_decoder as encoder_decoder
from ._architecture import Architecture
from ._config import MAX_LAYERS, ConfigReader, integer, with_defaults

SIZES = {"vocab_size": 26240, "d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
KEYS = with_defaults(encoder_decoder.KEYS, **SIZES) | {
    "layers": integer("num_decoder_layers", 24, high=MAX_LAYERS),
    "context_length": integer("max_position_embeddings", 512),
}
"""A ``config.json`` of this project's own; the defaults are the published model."""

ENCODER = encoder_decoder.StackTensorNames(
    blocks="encoder.blocks",
    final_norm="encoder.final_layernorm",
    self_norm="self_attn.layer_norm",
    qkv=("self_attn.self_attn.project",),
    self_out="self_attn.self_attn.dense",
    bias="self_attn.self_attn.relative_attention_bias",
    mlp_norm="ff.layer_norm",
    mlp="ff.dense_relu_dense",
)
NAMES = encoder_decoder.TensorNames(
    embedding="word_embeds",
    head="lm_head",
    encoder=ENCODER,
    decoder=replace(
        ENCODER,
        blocks="decoder.blocks",
        final_norm="decoder.final_layernorm",
        cross=encoder_decoder.CrossTensorNames(
            norm="cross_attn.layer_norm",
            q="cross_attn.cross_attn.project_q",
            kv=("cross_attn.cross_attn.project_kv",),
            out="cross_attn.cross_attn.dense",
        ),
    ),
    ignored=(r"(encoder|decoder)\.word_embeds\.weight",),
)


def parse(config: Mapping[str, Any]) -> encoder_decoder.Config:
    return parse_cpm(ConfigReader(config, KEYS))


def parse_cpm(read: ConfigReader) -> encoder_decoder.Config:
    """The configuration of CPM-2 or EVA, whose unknown keys are problems."""
    read.reject_unknown_keys()
    encoder_decoder.check_buckets(read)
    start = read.value(integer("decoder_start_token_id", 1, low=0, high=read.fields["vocab_size"] - 1))
    fields = read.checked_fields() | {"activation": "gelu_tanh", "gated": True, "tied_head": False}
    return encoder_decoder.Config(**fields, decoder_start_token_id=start, names=NAMES)


architecture = Architecture(
    parse, encoder_decoder.spec, encoder_decoder.EncoderDecoderBuilder, encoder_decoder.EncoderDecoder
)
