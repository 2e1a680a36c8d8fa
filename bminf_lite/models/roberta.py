"""RoBERTa (https://arxiv.org/abs/1907.11692): BERT, whose positions start behind the row of the padding token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import bert
from ._architecture import encoder_architecture
from ._config import ConfigReader, integer, with_defaults
from ._encoder import EncoderConfig

KEYS = with_defaults(bert.KEYS, vocab_size=50265)


def parse(config: Mapping[str, Any]) -> EncoderConfig:
    read = ConfigReader(config, KEYS)
    return bert.parse_bert(read, "roberta.", first_position=first_position(read))


def first_position(read: ConfigReader) -> int:
    """The row of position 0: the one behind the padding token's, which must leave rows for positions."""
    first: int = read.value(integer("pad_token_id", 1, low=0, required=False)) + 1
    positions = read.fields["positions"]
    text = f"max_position_embeddings ({positions}) leaves no position behind row {first} of pad_token_id"
    read.require(first < positions, text, "max_position_embeddings", "pad_token_id")
    return first


architecture = encoder_architecture(parse)
