"""What a ``tokenizer.json`` may make of a text: published kinds pass, and files that multiply are refused, wherever."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizer_kit
from tokenizers import normalizers, pre_tokenizers

from bminf_lite.errors import CheckpointError
from bminf_lite.text.json_tokenizer import JsonTokenizer
from bminf_lite.text.tokenizer_budget import check_budget

REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
"""Twice as many of one letter."""


def sequence(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def charsmap(text: str) -> str:
    return base64.b64encode((4).to_bytes(4, "little") + bytes(4) + text.encode() + b"\0").decode()


def bpe() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(tokenizer_kit.byte_level().to_str())
    return value


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2": json.loads(tokenizer_kit.sentencepiece_like().to_str()),
    "Llama 3": bpe(),
    "T5": json.loads(tokenizer_kit.metaspace().to_str()),
    "XLM-R": bpe()
    | {
        "normalizer": sequence(
            "normalizers",
            {"type": "Precompiled", "precompiled_charsmap": charsmap("x" * 18)},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
        )
    },
    "Albert": bpe()
    | {
        "normalizer": json.loads(
            normalizers.Sequence(
                [
                    normalizers.Replace("``", '"'),
                    normalizers.Replace("''", '"'),
                    normalizers.NFKD(),
                    normalizers.StripAccents(),
                    normalizers.Lowercase(),
                ]
            ).__getstate__()
        )
    },
    "BERT": bpe() | {"normalizer": json.loads(normalizers.BertNormalizer().__getstate__())},
    "DeepSeek": bpe()
    | {
        "pre_tokenizer": json.loads(
            pre_tokenizers.Sequence(
                [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()]
            ).__getstate__()
        )
    },
}

HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "forty replacements": ({"normalizer": sequence("normalizers", *[REPLACE] * 40)}, "1.1e+12 characters of one"),
    "one long replacement": ({"normalizer": REPLACE | {"content": "a" * 10**6}}, "1e+06 characters of one"),
    "of nothing": ({"normalizer": REPLACE | {"pattern": {"String": ""}, "content": "x" * 20}}, "21 characters of one"),
    "of a pattern": ({"normalizer": REPLACE | {"pattern": {"Regex": "a?"}, "content": "x" * 20}}, "21 characters"),
    "nested": ({"normalizer": sequence("normalizers", *[sequence("normalizers", *[REPLACE] * 4)] * 4)}, "6.55e+04"),
    "many": ({"normalizer": sequence("normalizers", *[{"type": "NFC"}] * 65)}, "more than 64 steps"),
    "bytes of bytes": ({"pre_tokenizer": sequence("pretokenizers", *[{"type": "ByteLevel"}] * 20)}, "1.05e+06"),
    "while decoding": ({"decoder": sequence("decoders", *[REPLACE] * 30)}, "decoder makes up to 1.07e+09"),
    "a table": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("x" * 5000)}}, "5,000 char"),
    "a prefix": ({"normalizer": {"type": "Prepend", "prepend": "x" * 2000}}, "2,000 characters before a text"),
    "a frame": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x"}}],
                "special_tokens": {"x": {"id": "x", "ids": [0] * 5000, "tokens": ["x"] * 5000}},
            }
        },
        "5,000 tokens",
    ),
    "a word's prefix": ({"model": bpe()["model"] | {"continuing_subword_prefix": "x" * 200}}, "200 characters"),
    "long words": ({"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}}, "1,000,000,000"),
}
DEEP: dict[str, Any] = REPLACE
for _ in range(12):
    DEEP = sequence("normalizers", DEEP)
HOSTILE["deep"] = ({"normalizer": DEEP}, "more than 64 steps")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_kinds_pass(name: str) -> None:
    check_budget(json.dumps(PUBLISHED[name]).encode(), name)


@pytest.mark.parametrize("place", ["before", "behind", "escaped", "twice"])
@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_multiply_are_refused(tmp_path: Path, name: str, place: str) -> None:
    """Wherever the part stands in the file, before the library sees it."""
    change, message = HOSTILE[name]
    content = bpe() | change
    if place != "before":
        content = {"model": content.pop("model"), **content}
    text = json.dumps(content)
    if place == "escaped":
        for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor", "continuing_subword_prefix"):
            text = text.replace(f'"{part}"', f'"\\u{ord(part[0]):04x}{part[1:]}"')
        text = text.replace("max_input_chars", "max_\\u0069nput_chars")
    if place == "twice":
        text = text[:-1] + "".join(f', "{part}": null' for part in change) + "}"
        message = rf"{message}|has .* twice"
    (tmp_path / "tokenizer.json").write_text(text)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message.replace("+", r"\+")):
        JsonTokenizer.load(tmp_path, 1000)
    assert time.process_time() - start < 1


def test_a_token_that_is_too_long_is_refused(tmp_path: Path) -> None:
    content = bpe()
    content["model"]["vocab"]["x" * 5000] = len(content["model"]["vocab"]) + 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="a token of the vocabulary has 5,000 characters, and 4,096 are allowed"):
        JsonTokenizer.load(tmp_path, 1000)


def test_a_file_of_too_many_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"x": [' + "1," * (1 << 23) + "1]}")
    with pytest.raises(CheckpointError, match="values, and 8,388,608 are allowed"):
        JsonTokenizer.load(tmp_path, 1000)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model": 1}', '{"normalizer": 1}', '{"a": {}', "{" * 10_000])
def test_what_is_no_tokenizer_is_left_to_the_library(tmp_path: Path, text: str) -> None:
    check_budget(text.encode(), "x")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not a tokenizer that the tokenizers library can read"):
        JsonTokenizer.load(tmp_path, 1000)
