"""Tokenizers of encoders in GGUF files: BERT's WordPiece, and XLM-RoBERTa's unigrams of SentencePiece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import CheckpointError, is_whole
from .header import GgufHeader
from .special_tokens import CONTROL, named_ids, scores_of, vocabulary

SPACE = "▁"
"""What marks the first piece of a word."""
_LONGEST_WORD = 100
"""Characters of a word that WordPiece cuts; BERT's own limit."""


def word_piece(header: GgufHeader, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """BERT's tokenizer. A file marks the first piece of a word, where BERT marks the others.

    Letters are lowered if no piece has a capital one, unless the file says it.
    """
    types, metadata = vocabulary(header)[1] or [0] * len(tokens), header.metadata
    pieces = [_piece(token, kind) for token, kind in zip(tokens, types, strict=True)]
    ordinary = (piece for piece, kind in zip(pieces, types, strict=True) if kind != CONTROL and piece[:1] != "[")
    is_cased = any(piece != piece.lower() for piece in ordinary)
    lowers = metadata.get("tokenizer.ggml.normalizer.lowercase", not is_cased)
    strips = metadata.get("tokenizer.ggml.normalizer.strip_accents", lowers)
    ids = {piece: index for index, piece in enumerate(pieces) if piece}
    unknown = _text(header, tokens, "unknown", "[UNK]")
    model = models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=_LONGEST_WORD)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=bool(lowers), strip_accents=bool(strips))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    first, end = _text(header, tokens, "bos", "[CLS]"), _text(header, tokens, "seperator", "[SEP]")
    _frame(backend, first, end, f"{first} $A {end} $B:1 {end}:1")
    return backend


def unigram(header: GgufHeader, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """XLM-RoBERTa's tokenizer: the most probable pieces of each word, of text that a table of SentencePiece changes."""
    metadata = header.metadata
    scores = scores_of(header, tokens)
    unknown = named_ids(header).get("unknown")
    if unknown is None:
        raise CheckpointError(f"{header.path}: lacks tokenizer.ggml.unknown_token_id; export the model again")
    backend = tokenizers.Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=unknown))
    steps: list[Any] = []
    if table := metadata.get("tokenizer.ggml.precompiled_charsmap"):
        if not isinstance(table, list) or not all(map(is_whole, table)):
            problem = "tokenizer.ggml.precompiled_charsmap must be a list of bytes"
            raise CheckpointError(f"{header.path}: {problem}; export the model again")
        steps.append(normalizers.Precompiled(bytes(value & 255 for value in table)))
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    first, end = _text(header, tokens, "bos", "<s>"), _text(header, tokens, "eos", "</s>")
    _frame(backend, first, end, f"{first} $A {end} {end} $B {end}")
    return backend


def _piece(token: str, kind: int) -> str:
    """A piece as BERT writes it."""
    if kind == CONTROL or not token:
        return token
    return token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"


def _text(header: GgufHeader, tokens: Sequence[str], name: str, usual: str) -> str:
    """The text of a special token: the one of that name in the file, or else the ``usual`` one, if there is one."""
    if name in (named := named_ids(header)):
        return tokens[named[name]]
    if usual in tokens:
        return usual
    raise CheckpointError(f"{header.path}: lacks tokenizer.ggml.{name}_token_id, and a token {usual}")


def _frame(backend: tokenizers.Tokenizer, first: str, end: str, pair: str) -> None:
    ids: Mapping[str, int] = backend.get_vocab()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {end}", pair=pair, special_tokens=[(token, ids[token]) for token in {first, end}]
    )
