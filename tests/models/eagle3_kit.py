"""A tiny LLaMA, EAGLE-3 heads for it with random weights, and their checkpoints in the forms that exist."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tiny_models import RandomWeights, random_tensors

from bminf_lite.backend.sampling import ROW_WORDS, SamplerState, SamplerVariant, neutral_rows
from bminf_lite.backend.values import BLOCK_SIZE
from bminf_lite.engine.draft_model import DraftedNetwork
from bminf_lite.engine.guess_arrays import GuessArrays, GuessInputs, GuessSize
from bminf_lite.layers.cache import KVCache
from bminf_lite.models import _eagle3 as eagle3

VOCAB, WIDTH, LAYERS, DRAFT_VOCAB = 97, 32, 8, 41
TARGET = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
HEAD = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB,
    "max_position_embeddings": 64, "rope_theta": 1000.0, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
OFFSETS = np.sort(np.random.default_rng(3).permutation(VOCAB)[:DRAFT_VOCAB]) - np.arange(DRAFT_VOCAB)


class FloatWeights:
    """The random tensors of a head, as its file has them."""

    def __init__(self, config: dict[str, Any], seed: int = 5):
        spec = eagle3.spec(eagle3.parse(config))
        self.tensors = random_tensors(seed, {name: p.shape for name, p in spec.parameters.items()})

    def weight(self, name: str) -> np.ndarray:
        return self.tensors[name]

    vector = weight


def save_target(folder: Path, **config: Any) -> Path:
    """A float checkpoint of the model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET | config))
    save_file(RandomWeights(TARGET | config, 2).tensors, folder / "model.safetensors")
    return folder


def save_head(
    folder: Path, config: dict[str, Any] = HEAD, layer: str = "midlayer", prefix: str = "", embedding: bool = True,
    **others: np.ndarray,
) -> Path:  # fmt: skip
    """A checkpoint of a head, with its layer under the name ``layer`` and ``others`` in place of its tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = dict(FloatWeights(eagle3.head_config(config)).tensors)
    if not embedding:
        del tensors["embed_tokens.weight"]
    named = {f"{prefix}{name.replace('layers.0', layer)}": values for name, values in tensors.items()}
    mask = np.isin(np.arange(VOCAB), OFFSETS + np.arange(DRAFT_VOCAB))
    save_file({"d2t": OFFSETS.astype(np.int64), "t2d": mask} | named | others, folder / "model.safetensors")
    return folder


def guesses_of(
    network: DraftedNetwork, cache: KVCache, newest: Sequence[int], positions: Sequence[int], count: int
) -> np.ndarray:
    """``count`` guesses behind the newest tokens of some sequences, whose cache is no larger than they need."""
    ops, most = network.ops, max(positions) + count
    tables = [table[:, : -(-most // BLOCK_SIZE)] for table in cache.tables(len(newest), most)]
    inputs = GuessInputs(GuessSize(len(newest), count, most), [table.shape[1] for table in tables])
    own = len(newest)
    inputs.tokens[:own], inputs.context_lens[:, :own] = newest, np.array(positions) + np.arange(count)[:, None]
    for target, table in zip(inputs.tables, tables, strict=True):
        target[:] = table
    table = ops.array(neutral_rows(1).view(np.int32).reshape(-1, ROW_WORDS))
    arrays = GuessArrays(
        ops, inputs, lambda rows, offsets: SamplerState(table, rows, SamplerVariant.GREEDY, offsets=offsets)
    )
    arrays.write(inputs)
    network.guess(cache, arrays.places)
    return ops.host(arrays.guesses).T[:own]
