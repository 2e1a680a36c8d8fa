"""Long texts: refused before they are tokenized, and documents in pieces that give the tokens of the whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizer_kit
import tokenizers

from bminf_lite.errors import UsageError
from bminf_lite.text import json_tokenizer, long_text
from bminf_lite.text.json_tokenizer import JsonTokenizer
from bminf_lite.text.long_text import PIECE, QUICK, check_length, encode_document
from bminf_lite.text.tokenizer import Tokenizer

KINDS = [tokenizer_kit.byte_level, tokenizer_kit.sentencepiece_like, tokenizer_kit.metaspace]


class Counting(Tokenizer):
    """A token for each ``width`` characters; counts the characters that it was given."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.seen = 0

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.seen += len(text)
        return [0] * -(-len(text) // self.width)

    def __len__(self) -> int:
        return 1

    def id_to_piece(self, token_id: int) -> str | None:
        return "x"

    def piece_to_id(self, piece: str) -> int | None:
        return None

    def encode_spans(self, parts: Any) -> list[int]:
        return []

    def _decode(self, ids: list[int]) -> str:
        return ""


@pytest.mark.parametrize("width", [1, 4, 100])
@pytest.mark.parametrize("most", [10, 4_096, 100_000])
def test_a_text_that_cannot_fit_is_not_tokenized_whole(width: int, most: int) -> None:
    """50 million characters, of which as much is tokenized as tells that they are too many."""
    tokenizer = Counting(width)
    text = "x" * 50_000_000
    with pytest.raises(UsageError, match=r"the prompt is too long: the first .* characters have more than"):
        check_length(tokenizer, text, most)
    assert tokenizer.seen <= width * (1.25 * most + 1_000) + 2 * PIECE


@pytest.mark.parametrize("most", [10, 4_096, 1_000_000])
def test_what_may_fit_passes(most: int) -> None:
    for width, length in ((1, most), (4, 4 * most), (50, 50 * most)):
        check_length(Counting(width), "x" * length, most)
    tokenizer = Counting(1)
    check_length(tokenizer, "x" * QUICK, 10)
    assert tokenizer.seen == 0  # it takes no time, and the message has the exact number later
    check_length(tokenizer, None, 10)  # type: ignore[arg-type]  # another error says so


@pytest.mark.parametrize("kind", KINDS)
def test_long_and_short_texts_take_ways_with_equal_results(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[], tokenizers.Tokenizer]
) -> None:
    text = "the cat sat on the mat\n\nhello  there — naïve\n" * 50
    found = []
    for longest in (0, 1 << 30):
        monkeypatch.setattr(json_tokenizer, "LONG_TEXT", longest)
        tokenizer = JsonTokenizer(kind())
        ids = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
        found.append((ids, tokenizer.decode(ids[0]), tokenizer.decode([])))
    assert found[0] == found[1]


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    tokenizer = JsonTokenizer(tokenizer_kit.byte_level())
    text = "the cat sat on the mat and the dog\n" * 20_000
    ids: list[int] = []
    worker = threading.Thread(target=lambda: ids.extend(tokenizer.encode(text)))
    start, steps = time.perf_counter(), []
    worker.start()
    while worker.is_alive():
        steps.append(time.perf_counter())
        time.sleep(0.001)
    seconds = time.perf_counter() - start
    # With the lock held, the first step would be the last for nearly all of the time.
    assert max(np.diff([start, *steps, start + seconds])) < 0.5 * seconds
    assert len(ids) > 100_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_in_pieces_has_the_tokens_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[], tokenizers.Tokenizer]
) -> None:
    tokenizer = JsonTokenizer(kind())
    rng = np.random.default_rng(0)
    words = ["the", "cat", "hello", "naïve", "—", "  ", "\n", "\n\n\n", "\n \n", "\t", "mat.", "你好"]
    text = " ".join(rng.choice(words, 20_000))
    expected = tokenizer.encode(text)
    longest = [0]
    original = tokenizer._encode

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        longest[0] = max(longest[0], len(text))
        return original(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encode", encode)
    monkeypatch.setattr(long_text, "DOCUMENT_PIECE", 3_000)
    monkeypatch.setattr(long_text, "CUT_CONTEXT", 200)
    assert encode_document(tokenizer, text).tolist() == expected
    if (
        kind is tokenizer_kit.byte_level
    ):  # the others put a space before a text, so that no piece is a part of the whole
        assert longest[0] <= 3 * 3_000


def test_a_document_that_cannot_be_cut_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "DOCUMENT_PIECE", 1_000)
    monkeypatch.setattr(long_text, "MAX_PIECE", 10_000)
    tokenizer = JsonTokenizer(tokenizer_kit.byte_level())
    assert len(encode_document(tokenizer, "a" * 10_000)) == 10_000
    with pytest.raises(UsageError, match="a text of 10,001 characters that cannot be cut at a line"):
        encode_document(tokenizer, "a" * 10_001)
    assert len(encode_document(tokenizer, "a\n" * 50_000)) == 100_000


def test_the_prompts_of_a_model_are_bounded(tmp_path: Path) -> None:
    """Whatever way a text takes: a prompt, a conversation, the last message of a dialogue, the cuts of a template."""
    import tiny_checkpoint

    import bminf_lite

    folder = tiny_checkpoint.write(tmp_path / "model")
    text = "the quick brown fox " * 2_500_000
    with bminf_lite.load(folder, device="cpu") as model:
        messages = [{"role": "user", "content": text[:15_000_000]}]
        calls: list[Callable[[], object]] = [
            lambda: model.encode(text),
            lambda: model.generate(text),
            lambda: model.generate(messages),
            lambda: list(model.stream(text)),
            lambda: model.generate([text, "a"]),
        ]
        for call in calls:
            start = time.process_time()
            with pytest.raises(UsageError, match="too long"):
                call()
            assert time.process_time() - start < 5  # 50 MB took 60 s
