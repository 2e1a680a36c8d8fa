"""CPM-2 as published (github.com/TsinghuaAI/CPM-2-Pretrain and CPM-2-Finetune), to int8.

    python tools/migrate_cpm2.py CPM-2 CPM-2-int8 --vocabulary bpe_cn_en/vocab.txt

``CPM-2`` is the folder with ``latest_checkpointed_iteration.txt``, or the one with the shards
``mp_rank_XX_model_states.pt``. All sizes come from the tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_parallel import COLUMNS, COPIES, ROWS, Merge, Shards, merge_shards, parser, run, write_vocabulary

from bminf_lite.errors import CheckpointError

RULES = {
    "word_embeds.weight": ROWS,
    "lm_head.weight": ROWS,
    "*.self_attn.project.weight": Merge(0, parts=3),
    "*.cross_attn.project_q.weight": ROWS,
    "*.cross_attn.project_kv.weight": Merge(0, parts=2),
    "*.self_attn.dense.weight": COLUMNS,
    "*.cross_attn.dense.weight": COLUMNS,
    "*.relative_attention_bias.weight": COLUMNS,
    "*.dense_relu_dense.wi_?.weight": ROWS,
    "*.dense_relu_dense.wo.weight": COLUMNS,
    "*.layer_norm.weight": COPIES,
    "*.final_layernorm.weight": COPIES,
}
IGNORED = ("encoder.word_embeds.weight", "decoder.word_embeds.weight", "*role_embeds.weight")
"""Other names of the embedding, and embeddings of roles, which no published program gives to the model."""

FIRST_BIAS = "encoder.blocks.0.self_attn.self_attn.relative_attention_bias.weight"


def write(
    source: Path,
    vocabulary: Path,
    folder: Path,
    model_type: str = "cpm2",
    tokenizer: str = "CPM2Tokenizer",
    start: str = "<s>",
    end: str = "<eod>",
    **config: Any,
) -> None:
    """Write the merged checkpoint and its vocabulary into ``folder``.

    The decoder begins with the token ``start`` and ends with ``end``; ``config`` goes into ``config.json``.
    """

    def configure(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        block = FIRST_BIAS.removesuffix("self_attn.relative_attention_bias.weight")
        inner = "encoder.blocks.0.ff.dense_relu_dense.wi_0.weight"
        needed = ["word_embeds.weight", FIRST_BIAS, f"{block}self_attn.project.weight", inner]
        missing = [name for name in needed if len(shapes.get(name, ())) != 2]
        if missing:
            raise CheckpointError(f"{source}: has no matrix {missing[0]!r}, so it is neither CPM-2 nor EVA")
        vocab_size, d_model = shapes["word_embeds.weight"]
        buckets, heads = shapes[FIRST_BIAS]
        tokens = token_ids(vocabulary, [start, end])
        layers = {s: sum(n.startswith(s) and n.endswith("wo.weight") for n in shapes) for s in ("encoder", "decoder")}
        return {
            "model_type": model_type,
            "vocab_size": vocab_size,
            "d_model": d_model,
            "d_ff": shapes[inner][0],
            "d_kv": shapes[f"{block}self_attn.project.weight"][0] // 3 // heads,
            "num_heads": heads,
            "num_layers": layers["encoder"],
            "num_decoder_layers": layers["decoder"],
            "relative_attention_num_buckets": buckets,
            "decoder_start_token_id": tokens[start],
            "eos_token_id": tokens[end],
            **config,
        }

    with Shards(source, IGNORED) as shards:
        merge_shards(shards, RULES, configure, folder)
    write_vocabulary(folder, vocabulary, "vocab.txt", tokenizer)


def token_ids(vocabulary: Path, tokens: Sequence[str]) -> dict[str, int]:
    """The ids of tokens: the numbers of their lines, from 0 on. Raises :class:`CheckpointError` for a missing one."""
    try:
        lines = vocabulary.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{vocabulary}: cannot be read: {error}") from error
    words = {line.strip(): number for number, line in enumerate(lines)}
    missing = [token for token in tokens if token not in words]
    if missing:
        raise CheckpointError(f"{vocabulary}: has no {', '.join(missing)}; it is not the model's vocabulary")
    return {token: words[token] for token in tokens}


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__
    given = parser("CPM-2", __doc__, "its word list, vocab.txt").parse_args(arguments)
    return run(given, lambda folder: write(given.source, given.vocabulary, folder))


if __name__ == "__main__":
    sys.exit(main())
