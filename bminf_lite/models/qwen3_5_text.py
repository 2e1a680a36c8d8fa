"""Qwen3.5 and Qwen3.6 (https://huggingface.co/Qwen), their text models: Qwen3-Next without experts.

The projections of a gated DeltaNet are matrices of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama, qwen3_next
from ._architecture import decoder
from ._config import FULL, ConfigReader, with_defaults
from ._decoder import DecoderConfig

KEYS = (
    with_defaults(
        llama.KEYS,
        vocab_size=248320,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=32768,
    )
    | qwen3_next.BIASES
    | qwen3_next.DELTA_NET
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, KEYS)
    kinds = qwen3_next.kinds_of_layers(read)
    fields, mixers = qwen3_next.parse_mixers(read)
    mlp = llama.feed_forward(fields)
    return qwen3_next.model(fields, [mixers[kind] for kind in kinds], [mlp] * len(kinds), (mixers[FULL], mlp))


architecture = decoder(parse)
