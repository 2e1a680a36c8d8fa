"""EVA and EVA 2 as published (github.com/thu-coai/EVA), to int8.

    python tools/migrate_eva.py eva2.0 EVA-2-int8 --vocabulary bpe_dialog_new/vocab.txt --attn-scale
    python tools/migrate_eva.py eva EVA-int8 --vocabulary bpe_dialog_new/vocab.txt

The first argument is the folder with ``latest_checkpointed_iteration.txt``, or the one with the shards. EVA 2 divides
attention scores by the root of a head's size, and nothing in the tensors tells: ``--attn-scale`` says so. The decoder
of both begins with ``<s_0>``, and an utterance ends with ``<sep>``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from migrate_cpm2 import write as write_encoder_decoder
from model_parallel import parser, run


def write(source: Path, vocabulary: Path, folder: Path, attn_scale: bool) -> None:
    """Write the merged checkpoint and its vocabulary into ``folder``."""
    write_encoder_decoder(source, vocabulary, folder, "eva", "EVATokenizer", "<s_0>", "<sep>", attn_scale=attn_scale)


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__
    options = parser("EVA", __doc__, "its word list, vocab.txt")
    options.add_argument("--attn-scale", action="store_true", help="the checkpoint is EVA 2")
    given = options.parse_args(arguments)
    return run(given, lambda folder: write(given.source, given.vocabulary, folder, given.attn_scale))


if __name__ == "__main__":
    sys.exit(main())
