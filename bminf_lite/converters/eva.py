"""EVA and EVA 2 as published (github.com/thu-coai/EVA). Their tensors are those of CPM-2."""

from __future__ import annotations

from pathlib import Path

from . import cpm2
from .cpm2 import Family


def convert(
    source: Path, out: Path, *, vocabulary: Path, recipe: str = "w8a8", attn_scale: bool = False, force: bool = False
) -> None:
    """Merge the shards of ``source`` and migrate them to ``out``; see :func:`.model_parallel.convert`.

    ``vocabulary`` is the word list ``vocab.txt``. With ``attn_scale``, as in EVA 2, attention scores are divided by the
    root of a head's size; the tensors do not show that.
    """
    family = Family("eva", "EVATokenizer", "<s_0>", "<sep>", {"attn_scale": attn_scale})
    cpm2.convert(source, out, vocabulary=vocabulary, recipe=recipe, force=force, family=family)
