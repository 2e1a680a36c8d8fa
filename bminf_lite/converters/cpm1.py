"""CPM-1 as published (github.com/TsinghuaAI/CPM-1-Generate).

The tensors give all sizes but the number of heads, which by default is that of the published model of that size.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import model_parallel
from .model_parallel import COLUMNS, COPIES, ROWS, Merge, Shards, merge_shards, write_vocabulary

RULES = {
    "word_embeddings.weight": ROWS,
    "*.attention.query_key_value.*": Merge(0, parts=3),
    "*.attention.dense.weight": COLUMNS,
    "*.mlp.dense_h_to_4h.*": ROWS,
    "*.mlp.dense_4h_to_h.weight": COLUMNS,
    "position_embeddings.weight": COPIES,
    "*layernorm.*": COPIES,
    "*.bias": COPIES,
}
HEADS = {768: 12, 1024: 16, 2560: 32}
"""Hidden size -> heads of the published models."""

EOD = 7
"""The end of a document in the published vocabulary."""


def convert(
    source: Path, out: Path, *, vocabulary: Path, recipe: str = "w8a8", heads: int | None = None, force: bool = False
) -> None:
    """Merge the shards of ``source`` and migrate them to ``out``; see :func:`.model_parallel.convert`.

    ``vocabulary`` is the sentencepiece model ``chinese_vocab.model``.
    """
    model_parallel.convert(lambda folder: write(source, vocabulary, folder, heads), source, out, recipe, force)


def write(source: Path, vocabulary: Path, folder: Path, heads: int | None = None) -> None:
    """Write the merged checkpoint and its vocabulary into ``folder``."""

    def configure(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        for name in ("word_embeddings.weight", "position_embeddings.weight"):
            if len(shapes.get(name, ())) != 2:
                raise CheckpointError(f"{source}: has no matrix {name!r}, so it is not CPM-1")
        vocab_size, hidden = shapes["word_embeddings.weight"]
        found = heads or HEADS.get(hidden)
        if found is None:
            raise CheckpointError(f"{source}: hidden size {hidden} is of no published model; give --heads")
        return {
            "model_type": "cpm1",
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "num_hidden_layers": sum(name.endswith("query_key_value.weight") for name in shapes),
            "num_attention_heads": found,
            "max_position_embeddings": shapes["position_embeddings.weight"][0],
            "eos_token_id": EOD,
        }

    with closing(Shards(source)) as shards:
        merge_shards(shards, RULES, configure, folder)
    write_vocabulary(folder, vocabulary, "chinese_vocab.model", "CPM1Tokenizer")
