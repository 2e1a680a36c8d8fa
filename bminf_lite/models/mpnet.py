"""MPNet (https://arxiv.org/abs/2004.09297), the base of all-mpnet-base-v2: RoBERTa with T5's bias by distance.

All layers share one table of biases. There are no types of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _encoder as encoder
from . import bert, roberta
from ._architecture import encoder_architecture
from ._config import ConfigReader, integer, with_defaults
from ._encoder import EncoderConfig, LayerNames
from .parts.part import RelativeBiasTable

KEYS = with_defaults(encoder.KEYS, vocab_size=30527)
BUCKETS, MAX_DISTANCE = 32, 128
NAMES = LayerNames(
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
)


def parse(config: Mapping[str, Any]) -> EncoderConfig:
    read = ConfigReader(config, KEYS)
    kind = encoder.head_kind(config)
    labels = encoder.label_names(read) if kind else ()
    first = roberta.first_position(read)
    buckets = read.value(integer("relative_attention_num_buckets", BUCKETS))
    text = f"relative_attention_num_buckets is {buckets}; transformers computes with {BUCKETS} whatever it says"
    read.require(buckets == BUCKETS, text, "relative_attention_num_buckets")
    fields = encoder.checked_fields(read)
    base = "mpnet." if kind else ""
    relative = RelativeBiasTable(
        f"{base}encoder.relative_attention_bias", buckets, fields["heads"], MAX_DISTANCE, bidirectional=True
    )
    return EncoderConfig(
        fields["vocab_size"],
        fields["hidden_size"],
        fields["positions"] - first,
        encoder.encoder_input(fields, base, first),
        (encoder.post_norm_layer(fields, NAMES, relative=relative),) * fields["layers"],
        prefix=f"{base}encoder.layer",
        relative=relative,
        classifier=bert.roberta_head(fields, kind, len(labels)) if kind else None,
        labels=labels,
        ignored=bert.IGNORED,
        aliases=encoder.base_names(base, ("embeddings", "encoder")),
    )


architecture = encoder_architecture(parse)
