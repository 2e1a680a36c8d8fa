"""CodeGen (https://arxiv.org/abs/2203.13474): GPT-J whose query, value and key are one matrix in four shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import gptj
from ._architecture import decoder
from ._config import ConfigReader
from ._decoder import DecoderConfig
from .parts.attention import AttentionPart

SHARDS = 4


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(config, gptj.KEYS)
    heads = read.fields["heads"]
    read.require(heads % SHARDS == 0, f"n_head ({heads}) is not a multiple of the {SHARDS} shards", "n_head")
    return gptj.parse_gptj(read, qkv=("attn.qkv_proj",), fused_rows=sharded_rows)


def sharded_rows(part: AttentionPart) -> np.ndarray:
    """Rows of a fused matrix that holds, shard after shard, a part of the queries, of the values and of the keys."""
    query, value, key = np.arange(3 * part.features[0]).reshape(SHARDS, 3, -1).swapaxes(0, 1)
    return np.concatenate([query.ravel(), key.ravel(), value.ravel()])


architecture = decoder(parse)
