"""CodeGen (https://arxiv.org/abs/2203.13474): GPT-J whose query, value and key are one matrix in four shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from . import gptj, llama
from ._config import ConfigReader
from ._transformer import Config

SHARDS = 4
NAMES = replace(gptj.NAMES, qkv=("attn.qkv_proj",))


def parse(config: Mapping[str, Any]) -> Config:
    read = ConfigReader(config, gptj.KEYS)
    heads = read.fields["heads"]
    read.require(heads % SHARDS == 0, f"n_head ({heads}) is not a multiple of the {SHARDS} shards", "n_head")
    return replace(gptj.parse_gptj(read), names=NAMES, fused_rows=sharded_rows)


def sharded_rows(config: Config) -> np.ndarray:
    """Rows of a fused matrix that holds, shard after shard, a part of the queries, of the values and of the keys."""
    query, value, key = np.arange(3 * config.query_features).reshape(SHARDS, 3, -1).swapaxes(0, 1)
    return np.concatenate([query.ravel(), key.ravel(), value.ravel()])


architecture = replace(llama.architecture, parse=parse)
