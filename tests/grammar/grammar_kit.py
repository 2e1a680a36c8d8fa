"""A small vocabulary in which JSON can be written, for models without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bminf_lite.grammar.matcher import GrammarCompiler
from bminf_lite.text.json_tokenizer import JsonTokenizer

VOCAB_SIZE = 61
PIECES = [
    "<unk>",
    "</s>",
    *'{}[]",:.-+\\0123456789abcdefghijklnrstu',
    "▁",
    "true",
    "false",
    "null",
    "ab",
    "abc",
    "12",
    '{"',
    '":',
    '",',
    '"}',
    "]}",
    "▁a",
    "▁1",
    "ef",
    "34",
]
"""As T5 writes them: ``▁`` is a space. The model has more tokens than the tokenizer."""
EOS = frozenset({1})


def make_tokenizer() -> JsonTokenizer:
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in PIECES], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.add_special_tokens(["<unk>", "</s>"])
    return JsonTokenizer(backend, special_tokens={"eos_token": "</s>"})


def make_compiler() -> GrammarCompiler:
    return GrammarCompiler(make_tokenizer(), VOCAB_SIZE)


def text_of(tokens: Iterable[int]) -> str:
    return "".join("" if token in EOS else PIECES[token].replace("▁", " ") for token in tokens)
