"""CPM-1 as published (github.com/TsinghuaAI/CPM-1-Generate), to int8.

    python tools/migrate_cpm1.py CPM-large CPM-1-int8 --vocabulary bpe_3w_new/chinese_vocab.model

``CPM-large`` is the folder with ``latest_checkpointed_iteration.txt``, or the one with the two shards. Sizes come from
the tensors; the number of heads does not, and is that of the published sizes unless ``--heads`` says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_parallel import COLUMNS, COPIES, ROWS, Merge, Shards, merge_shards, parser, run, write_vocabulary

from bminf_lite.errors import CheckpointError

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
"""The published sizes: elements of the hidden state -> heads."""

EOD = 7
"""The end of a document in the published vocabulary."""


def write(source: Path, vocabulary: Path, folder: Path, heads: int | None = None) -> None:
    """Write the merged checkpoint and its vocabulary into ``folder``."""

    def configure(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        for name in ("word_embeddings.weight", "position_embeddings.weight"):
            if len(shapes.get(name, ())) != 2:
                raise CheckpointError(f"{source}: has no matrix {name!r}, so it is not CPM-1")
        vocab_size, hidden = shapes["word_embeddings.weight"]
        found = heads or HEADS.get(hidden)
        if found is None:
            raise CheckpointError(f"{source}: has {hidden} elements per token, no published size; give --heads")
        return {
            "model_type": "cpm1",
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "num_hidden_layers": sum(name.endswith("query_key_value.weight") for name in shapes),
            "num_attention_heads": found,
            "max_position_embeddings": shapes["position_embeddings.weight"][0],
            "eos_token_id": EOD,
        }

    with Shards(source) as shards:
        merge_shards(shards, RULES, configure, folder)
    write_vocabulary(folder, vocabulary, "chinese_vocab.model", "CPM1Tokenizer")


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__
    options = parser("CPM-1", __doc__, "its sentencepiece model, chinese_vocab.model")
    options.add_argument("--heads", type=int, help="attention heads, for other than the published sizes")
    given = options.parse_args(arguments)
    return run(given, lambda folder: write(given.source, given.vocabulary, folder, given.heads))


if __name__ == "__main__":
    sys.exit(main())
