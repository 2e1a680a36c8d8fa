"""CPM-2 as published (github.com/TsinghuaAI/CPM-2-Pretrain and CPM-2-Finetune), and the same tensors of EVA.

All sizes come from the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import model_parallel
from .model_parallel import COLUMNS, COPIES, ROWS, Merge, Shards, merge_shards, write_vocabulary

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
"""Copies of the embedding, and embeddings of roles, which no published program uses."""

FIRST_BIAS = "encoder.blocks.0.self_attn.self_attn.relative_attention_bias.weight"


@dataclass(frozen=True)
class Family:
    """The properties of a family of checkpoints that its tensors do not show.

    Decoding starts from the token ``start`` and ends with ``end``; ``config`` is added to ``config.json``.
    """

    model_type: str
    tokenizer_class: str
    start: str
    end: str
    config: Mapping[str, Any] = field(default_factory=dict)


CPM2 = Family("cpm2", "CPM2Tokenizer", "<s>", "<eod>")


def convert(
    source: Path, out: Path, *, vocabulary: Path, recipe: str = "w8a8", force: bool = False, family: Family = CPM2
) -> None:
    """Merge the shards of ``source`` and migrate them to ``out``; see :func:`.model_parallel.convert`.

    ``vocabulary`` is the word list ``vocab.txt``.
    """
    model_parallel.convert(lambda folder: write(source, vocabulary, folder, family), source, out, recipe, force)


def write(source: Path, vocabulary: Path, folder: Path, family: Family) -> None:
    """Write the merged checkpoint and its vocabulary into ``folder``."""

    def configure(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        block = FIRST_BIAS.removesuffix("self_attn.relative_attention_bias.weight")
        inner = "encoder.blocks.0.ff.dense_relu_dense.wi_0.weight"
        needed = ["word_embeds.weight", FIRST_BIAS, f"{block}self_attn.project.weight", inner]
        missing = [name for name in needed if len(shapes.get(name, ())) != 2]
        if missing:
            raise CheckpointError(f"{source}: has no matrix {missing[0]!r}, so it is neither CPM-2 nor EVA")
        vocab_size, d_model = shapes["word_embeds.weight"]
        buckets, heads = shapes[FIRST_BIAS]
        tokens = token_ids(vocabulary, [family.start, family.end])
        layers = {s: sum(n.startswith(s) and n.endswith("wo.weight") for n in shapes) for s in ("encoder", "decoder")}
        return {
            "model_type": family.model_type,
            "vocab_size": vocab_size,
            "d_model": d_model,
            "d_ff": shapes[inner][0],
            "d_kv": shapes[f"{block}self_attn.project.weight"][0] // 3 // heads,
            "num_heads": heads,
            "num_layers": layers["encoder"],
            "num_decoder_layers": layers["decoder"],
            "relative_attention_num_buckets": buckets,
            "decoder_start_token_id": tokens[family.start],
            "eos_token_id": tokens[family.end],
            **family.config,
        }

    with closing(Shards(source, IGNORED)) as shards:
        merge_shards(shards, RULES, configure, folder)
    write_vocabulary(folder, vocabulary, "vocab.txt", family.tokenizer_class)


def token_ids(vocabulary: Path, tokens: Sequence[str]) -> dict[str, int]:
    """The ids of tokens: the numbers of their lines, from 0. Raises :class:`CheckpointError` for a missing token."""
    try:
        lines = vocabulary.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{vocabulary}: cannot be read: {error}") from error
    words = {line.strip(): number for number, line in enumerate(lines)}
    missing = [token for token in tokens if token not in words]
    if missing:
        raise CheckpointError(f"{vocabulary}: has no {', '.join(missing)}; it is not the model's vocabulary")
    return {token: words[token] for token in tokens}
