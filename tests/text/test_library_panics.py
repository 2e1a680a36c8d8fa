"""Panics of the tokenizers library: errors that name the file, for whatever part of the pipeline panics."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizer_kit
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from bminf_lite.errors import CheckpointError, UsageError, is_panic, library_errors
from bminf_lite.grammar import Grammar
from bminf_lite.grammar.matcher import GrammarCompiler
from bminf_lite.text.checkpoint_files import load_tokenizer
from bminf_lite.text.json_tokenizer import JsonTokenizer

ENDLESS = Regex("(x+x+)+y")
"""Takes more steps than the library's expressions may take, for a text of forty "x"."""


def save(folder: Path, backend: tokenizers.Tokenizer, **changes: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(backend.to_str()) | changes))
    return folder / "tokenizer.json"


def panicking(part: str, step: Any) -> tokenizers.Tokenizer:
    backend = tokenizer_kit.byte_level()
    before = getattr(backend, part)
    kinds = {"pre_tokenizer": pre_tokenizers, "normalizer": normalizers, "decoder": decoders}
    setattr(backend, part, step if before is None else kinds[part].Sequence([step, before]))
    return backend


@pytest.mark.parametrize("text", ["x" * 40, "x" * 5000], ids=["short", "long"])
@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("pre_tokenizer", pre_tokenizers.Split(ENDLESS, "isolated")),
        ("pre_tokenizer", pre_tokenizers.Split(ENDLESS, "merged_with_previous", invert=True)),
        ("normalizer", normalizers.Replace(ENDLESS, "z")),
    ],
)
def test_a_text_on_which_an_expression_panics_is_an_error_that_names_the_file(
    tmp_path: Path, part: str, step: Any, text: str
) -> None:
    path = save(tmp_path, panicking(part, step))
    tokenizer = load_tokenizer(tmp_path, 1000)
    with pytest.raises(CheckpointError, match=r"cannot turn 'x+'\.* into tokens: .*retry-limit") as caught:
        tokenizer.encode(text)
    assert str(path) in str(caught.value) and is_panic(caught.value.__cause__)
    assert len(str(caught.value)) < len(str(path)) + 200
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat", "other texts are not concerned"


@pytest.mark.parametrize("length", [40, 5000])
def test_tokens_on_which_a_decoder_panics_are_an_error_that_names_the_file(tmp_path: Path, length: int) -> None:
    backend = panicking("decoder", decoders.Replace(ENDLESS, "z"))
    backend.add_tokens(["x" * 40])
    path = save(tmp_path, backend)
    tokenizer = load_tokenizer(tmp_path, 1000)
    ids = tokenizer.encode("x" * 40)
    assert len(ids) == 1
    with pytest.raises(CheckpointError, match=r"cannot turn these tokens into text: .*retry-limit") as caught:
        tokenizer.decode(ids * length)
    assert str(path) in str(caught.value)


def table(size: int, rest: bytes) -> dict[str, Any]:
    content = base64.b64encode(size.to_bytes(4, "little") + rest).decode()
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": content}}


OF_EVERY_TEXT = {
    "an expression that matches nothing": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": r"\b"}, "content": "x"}
    },
    "a table of less than it claims": table(1 << 30, b"abcd"),
    "a table whose entries lead out of it": table(8, b"\xff" * 8 + b"a\0"),
    "a number for a token that is not there": {
        "model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    },
    "an unknown token beyond the vocabulary": {
        "model": {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]], "byte_fallback": False}
    },
    "an empty vocabulary": {"model": {"type": "Unigram", "unk_id": None, "vocab": [], "byte_fallback": False}},
    "a score that is no number": {
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", None]], "byte_fallback": False}
    },
    "a part of a kind that does not exist": {"decoder": {"type": "None"}},
    "a frame of tokens without an id": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("name", OF_EVERY_TEXT)
def test_a_file_that_the_library_cannot_use_is_refused_or_named(tmp_path: Path, name: str) -> None:
    """When it is read, or with the first text; never by anything but an error of ours."""
    path = save(tmp_path, tokenizer_kit.byte_level(), **OF_EVERY_TEXT[name])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        load_tokenizer(tmp_path, 1000).encode("It has 2 words, or more.\n")
    assert str(path) in str(caught.value)


def test_what_panics_on_every_text_is_refused_when_it_is_read(tmp_path: Path) -> None:
    save(tmp_path, tokenizer_kit.byte_level(), **OF_EVERY_TEXT["an expression that matches nothing"])
    with pytest.raises(CheckpointError, match="cannot turn 'It has 2 words"):
        load_tokenizer(tmp_path, 1000)


def test_a_vocabulary_without_tokens_for_some_text_is_read(tmp_path: Path) -> None:
    save(tmp_path, tokenizer_kit.metaspace(), post_processor=None)
    assert load_tokenizer(tmp_path, 1000).encode("the cat")


def test_a_grammar_names_the_tokenizer_that_it_cannot_follow(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    path = save(tmp_path, backend)
    with pytest.raises(UsageError, match="cannot be constrained by a grammar") as caught:
        GrammarCompiler(load_tokenizer(tmp_path, 10), 10).matcher(Grammar.regex("the"), frozenset({0}))
    assert str(path) in str(caught.value)


def panic() -> BaseException:
    """A panic of the library, as it raises it."""
    try:
        panicking("normalizer", normalizers.Replace(ENDLESS, "z")).encode("x" * 40)
    except BaseException as error:
        assert is_panic(error)
        return error
    raise AssertionError


def test_only_what_libraries_raise_becomes_an_error_of_ours() -> None:
    for raised in (panic(), ValueError("v"), Exception("e")):
        with pytest.raises(UsageError, match=r"^message: "), library_errors("message", UsageError):
            raise raised
    for passing in (KeyboardInterrupt(), SystemExit(), MemoryError(), CheckpointError("a"), GeneratorExit()):
        with pytest.raises(type(passing)) as caught, library_errors("message", UsageError):
            raise passing
        assert caught.value is passing


def test_the_source_of_a_tokenizer_made_here_is_the_usual_file() -> None:
    assert JsonTokenizer(tokenizer_kit.byte_level()).source == "tokenizer.json"
