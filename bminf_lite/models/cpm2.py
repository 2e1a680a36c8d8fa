"""CPM-2 (https://arxiv.org/abs/2106.10715): a Chinese T5 of 11 billion parameters with a head of its own.

As in T5, attention scores are not scaled. The tensors have the names of the published model-parallel checkpoint, its
shards merged.
"""

from __future__ import annotations

from typing import Any

from ._config import ConfigReader
from ._encoder_decoder import CPM_NAMES, Config, Model, ModelBuilder, spec

__all__ = ["Config", "Model", "ModelBuilder", "parse", "parse_cpm", "spec"]

DEFAULTS = {
    "vocab_size": 26240,
    "d_model": 4096,
    "d_ff": 10240,
    "d_kv": 64,
    "num_heads": 64,
    "num_layers": 24,
    "num_decoder_layers": 24,
    "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "max_position_embeddings": 512,
    "decoder_start_token_id": 1,
}
"""The published model."""


def parse(config: dict[str, Any]) -> Config:
    """Our own ``config.json``: the keys of ``DEFAULTS``, and no others but what every checkpoint may say."""
    read = ConfigReader(config, DEFAULTS)
    read.reject_unknown_keys(DEFAULTS)
    return parse_cpm(read, scaled_scores=False)


def parse_cpm(read: ConfigReader, scaled_scores: bool) -> Config:
    """What CPM-2 and EVA share. ``max_position_embeddings`` bounds the source and the decoded text."""
    head_dim, vocab = read.integer("d_kv", high=1024), read.integer("vocab_size")
    context = read.integer("max_position_embeddings")
    buckets, max_distance = read.relative_buckets()
    result = Config(
        vocab_size=vocab,
        hidden_size=read.integer("d_model"),
        intermediate_size=read.integer("d_ff"),
        encoder_layers=read.integer("num_layers", high=4096),
        layers=read.integer("num_decoder_layers", high=4096),
        heads=read.integer("num_heads"),
        head_dim=head_dim,
        max_source_length=context,
        context_length=context,
        norm_eps=read.number("layer_norm_epsilon", 1e-6, high=1.0),
        activation="gelu_tanh",
        gated=True,
        tied_head=False,
        buckets=buckets,
        max_distance=max_distance,
        score_scale=head_dim**-0.5 if scaled_scores else 1.0,
        logit_scale=1.0,
        decoder_start_token_ids=(read.integer("decoder_start_token_id", low=0, high=vocab - 1),),
        names=CPM_NAMES,
    )
    read.raise_problems()
    return result
