"""BERT (https://arxiv.org/abs/1810.04805), and the MiniLM, BGE, E5 and GTE models of its form.

Layers normalise behind their parts, positions are learned, and the texts of a pair have a vector each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.values import Pooling
from . import _encoder as encoder
from ._architecture import encoder_architecture
from ._config import ConfigReader, Fields, integer
from ._encoder import EncoderConfig, LayerNames
from .parts.classifier import ClassifierPart

KEYS = encoder.KEYS | {"token_types": integer("type_vocab_size", 2)}
IGNORED = (
    r"(.*\.)?embeddings\.(position_ids|token_type_ids)",
    r"(.*\.)?pooler\..*",
    r"cls\..*",
    r"lm_head\..*",
)
"""What files hold beside an encoder: buffers, BERT's pooler, and heads of their training."""
GAMMA = ((r"(.*LayerNorm)\.gamma", r"\1.weight"), (r"(.*LayerNorm)\.beta", r"\1.bias"))
"""Names of norms in files that were converted from TensorFlow."""


def parse(config: Mapping[str, Any]) -> EncoderConfig:
    read = ConfigReader(config, KEYS)
    return parse_bert(read, "bert.", first_position=0)


def parse_bert(read: ConfigReader, base: str, first_position: int) -> EncoderConfig:
    """The configuration of BERT or RoBERTa, whose files with a head have the prefix ``base``."""
    kind = encoder.head_kind(read.config)
    labels = encoder.label_names(read) if kind else ()
    fields = encoder.checked_fields(read)
    base = base if kind else ""
    head = None if kind is None else bert_head if first_position == 0 else roberta_head
    return EncoderConfig(
        fields["vocab_size"],
        fields["hidden_size"],
        fields["positions"] - first_position,
        encoder.encoder_input(fields, base, first_position, fields["token_types"]),
        (encoder.post_norm_layer(fields, LayerNames()),) * fields["layers"],
        prefix=f"{base}encoder.layer",
        classifier=None if head is None or kind is None else head(fields, kind, len(labels)),
        labels=labels,
        ignored=IGNORED[:1] + IGNORED[2:] if head is bert_head and kind == "sequence" else IGNORED,
        aliases=(*GAMMA, *encoder.base_names(base, ("embeddings", "encoder", *(("pooler",) if kind else ())))),
    )


def bert_head(fields: Fields, kind: str, labels: int) -> ClassifierPart:
    """The head of a BERT: of a text it reads the pooler's vector."""
    if kind == "token":
        return ClassifierPart(fields["hidden_size"], labels, "classifier", None)
    return ClassifierPart(fields["hidden_size"], labels, "classifier", Pooling.FIRST, dense="bert.pooler.dense")


def roberta_head(fields: Fields, kind: str, labels: int) -> ClassifierPart:
    """The head of a RoBERTa or an MPNet, with a layer of its own for texts."""
    if kind == "token":
        return ClassifierPart(fields["hidden_size"], labels, "classifier", None)
    out, dense = "classifier.out_proj", "classifier.dense"
    return ClassifierPart(fields["hidden_size"], labels, out, Pooling.FIRST, dense=dense)


architecture = encoder_architecture(parse)
