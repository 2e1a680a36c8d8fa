"""Reads the files of a checkpoint's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from ..files import read_small_file
from ..gguf_files.header import find_gguf, read_header
from ..gguf_files.tokenizer import tokenizer_files
from .cpm_tokenizer import CLASSES, CpmTokenizer
from .json_tokenizer import JsonTokenizer, is_byte_level
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
    """Whether ``folder`` has the files that :func:`load_tokenizer` reads first."""
    if (gguf := find_gguf(folder)) is not None:
        return "tokenizer.ggml.tokens" in read_header(gguf).metadata
    kind = _tokenizer_class(folder)
    return (folder / kind.FILE).is_file() or (kind is JsonTokenizer and is_byte_level(folder))


def _tokenizer_class(folder: Path) -> type[CpmTokenizer] | type[JsonTokenizer]:
    """The class of :data:`.cpm_tokenizer.CLASSES` that ``tokenizer_config.json`` names, else :class:`JsonTokenizer`."""
    try:
        config = json.loads(read_small_file(folder / "tokenizer_config.json").decode())
    except (OSError, ValueError, RecursionError):
        return JsonTokenizer
    name = config.get("tokenizer_class") if isinstance(config, dict) else None
    return CLASSES.get(name, JsonTokenizer) if isinstance(name, str) else JsonTokenizer
