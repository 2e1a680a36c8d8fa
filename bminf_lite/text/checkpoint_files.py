"""Reads the files of a checkpoint that concern text: its tokenizer, and the tokens that end a completion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..gguf_files.header import find_gguf, read_header
from ..gguf_files.tokenizer import tokenizer_files
from .cpm_tokenizer import CLASSES, CpmTokenizer
from .json_tokenizer import JsonTokenizer
from .tokenizer import Tokenizer


def load_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    """Read the tokenizer of the checkpoint in ``folder``, or of a GGUF file; its embedding has ``vocab_size`` rows.

    Raises ``CheckpointError`` if files are missing or malformed, if a special token is not in the vocabulary, or if the
    vocabulary does not fit the embedding.
    """
    gguf = find_gguf(Path(folder))
    if gguf is not None:
        return JsonTokenizer.from_texts(tokenizer_files(read_header(gguf)), gguf, vocab_size)
    return _tokenizer_class(Path(folder)).load(Path(folder), vocab_size)


def has_tokenizer(folder: Path) -> bool:
    """Whether ``folder`` has the file that :func:`load_tokenizer` reads first."""
    if (gguf := find_gguf(folder)) is not None:
        return "tokenizer.ggml.tokens" in read_header(gguf).metadata
    return (folder / _tokenizer_class(folder).FILE).is_file()


def configured_eos_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int
) -> frozenset[int] | None:
    """The ``eos_token_id`` (an id or a list) of ``generation_config.json``, else of ``config.json``, else ``None``.

    Raises ``CheckpointError`` for ids outside the vocabulary.
    """
    for name, values in (("generation_config.json", generation_config), ("config.json", config)):
        value = values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size for i in ids):
            raise CheckpointError(
                f"{name}: eos_token_id is {value!r}, but must be a token id from 0 to {vocab_size - 1}, or a list"
            )
        return frozenset(ids)
    return None


def _tokenizer_class(folder: Path) -> type[CpmTokenizer] | type[JsonTokenizer]:
    """The class of :data:`.cpm_tokenizer.CLASSES` that ``tokenizer_config.json`` names, else :class:`JsonTokenizer`."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return JsonTokenizer
    name = config.get("tokenizer_class") if isinstance(config, dict) else None
    return CLASSES.get(name, JsonTokenizer) if isinstance(name, str) else JsonTokenizer
