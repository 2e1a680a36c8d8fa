"""T5 (https://arxiv.org/abs/1910.10683), T5 1.1 and Flan-T5.

Scores are not scaled. The first layer of each stack has a table of relative biases for all layers, and cross-attention
has none. The first version ties head and embedding, and scales the output by ``1 / sqrt(d_model)``; 1.1 does neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ._config import ConfigReader
from ._encoder_decoder import Config, Model, ModelBuilder, StackTensorNames, TensorNames, spec
from ._gpt import ACTIVATIONS

__all__ = ["Config", "Model", "ModelBuilder", "parse", "parse_t5", "spec"]

DEFAULTS = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "feed_forward_proj": "relu",
}
"""What transformers takes for a key that is absent."""

MAX_TOKENS = 1 << 15
"""Relative biases set no bound to a source or to a text; this one keeps mistakes from taking all memory."""

ENCODER = StackTensorNames(
    blocks="encoder.block",
    final_norm="encoder.final_layer_norm",
    self_norm="layer.0.layer_norm",
    qkv=("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"),
    self_out="layer.0.SelfAttention.o",
    bias="layer.0.SelfAttention.relative_attention_bias",
    mlp_norm="layer.1.layer_norm",
    mlp="layer.1.DenseReluDense",
)
NAMES = TensorNames(
    embedding="shared",
    head="lm_head",
    encoder=ENCODER,
    decoder=replace(
        ENCODER,
        blocks="decoder.block",
        final_norm="decoder.final_layer_norm",
        mlp_norm="layer.2.layer_norm",
        mlp="layer.2.DenseReluDense",
        cross_norm="layer.1.layer_norm",
        cross_q="layer.1.EncDecAttention.q",
        cross_kv=("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
        cross_out="layer.1.EncDecAttention.o",
    ),
    ignored=(
        r"(encoder|decoder)\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
)


def parse(config: dict[str, Any]) -> Config:
    """T5's configuration. Newer files say whether outputs are scaled, older ones whether the head is tied."""
    read = ConfigReader(config, DEFAULTS)
    tied = read.flag("scale_decoder_outputs", read.flag("tie_word_embeddings", True))
    return parse_t5(read, tied)


def parse_t5(read: ConfigReader, tied: bool, biases_per_layer: bool = False) -> Config:
    """The keys that the family shares."""
    hidden, head_dim = read.integer("d_model"), read.integer("d_kv", high=1024)
    layers, vocab = read.integer("num_layers", high=4096), read.integer("vocab_size")
    gated, activation = feed_forward(read)
    buckets, max_distance = read.relative_buckets()
    start = read.integer("decoder_start_token_id", read.integer("pad_token_id", 0, low=0), low=0, high=vocab - 1)
    result = Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=read.integer("d_ff"),
        encoder_layers=layers,
        layers=read.integer("num_decoder_layers", layers, high=4096),
        heads=read.integer("num_heads"),
        head_dim=head_dim,
        max_source_length=MAX_TOKENS,
        context_length=MAX_TOKENS,
        norm_eps=read.number("layer_norm_epsilon", 1e-6, high=1.0),
        activation=activation,
        gated=gated,
        tied_head=tied,
        buckets=buckets,
        max_distance=max_distance,
        score_scale=1.0,
        logit_scale=hidden**-0.5 if tied else 1.0,
        decoder_start_token_ids=(start,),
        names=NAMES,
        biases_per_layer=biases_per_layer,
    )
    read.raise_problems()
    return result


def feed_forward(read: ConfigReader) -> tuple[bool, str]:
    """Whether the feed-forward layer has a gate, and its function; ``gated-gelu`` means the tanh form."""
    names = ACTIVATIONS | {f"gated-{name}": value for name, value in ACTIVATIONS.items()} | {"gated-gelu": "gelu_tanh"}
    activation = read.choice("feed_forward_proj", "relu", names)
    return str(read.config.get("feed_forward_proj")).startswith("gated-"), activation
