"""Tokens have their own bytes, within a character too, and different tokens are told apart."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

import pytest
import tokenizer_kit
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.text.json_tokenizer import JsonTokenizer
from bminf_lite.text.text_stream import LikelyToken, TextStream
from bminf_lite.text.token_bytes import TokenTexts, shared_bytes

TOKENIZERS = {
    "byte-level": JsonTokenizer(tokenizer_kit.byte_level()),
    "byte fallback": JsonTokenizer(tokenizer_kit.sentencepiece_like()),
    "metaspace": JsonTokenizer(tokenizer_kit.metaspace()),
}
TEXTS = {name: TokenTexts(tokenizer) for name, tokenizer in TOKENIZERS.items()}
every_kind = pytest.mark.parametrize("name", TOKENIZERS)


@every_kind
def test_the_text_of_a_token_is_that_of_its_bytes(name):
    tokenizer, texts = TOKENIZERS[name], TEXTS[name]
    for token in range(len(tokenizer)):
        assert texts.bytes(token).decode(errors="replace") == texts.text(token)
        assert (texts.bytes(token) == b"") == (token in tokenizer.special_ids or texts.text(token) == "")
        assert texts.label(token) and texts.label_bytes(token)


@every_kind
def test_tokens_of_one_label_are_the_same_bytes(name):
    """A byte token and a character, for example; nothing else tells them apart in a text."""
    tokens = defaultdict(set)
    for token in range(len(TOKENIZERS[name])):
        tokens[TEXTS[name].label(token)].add(TEXTS[name].bytes(token) or token)
    assert [label for label, found in tokens.items() if len(found) > 1] == []


def test_labels():
    byte_level, fallback = TEXTS["byte-level"], TEXTS["byte fallback"]
    tokenizer = TOKENIZERS["byte fallback"]
    half = tokenizer.piece_to_id("<0xE4>")
    assert (fallback.label(half), fallback.bytes(half)) == ("bytes:\\xe4", b"\xe4")
    assert fallback.label(tokenizer.piece_to_id("<s>")) == "<s>"
    assert fallback.label(100_000) == "token_id:100000" and fallback.bytes(100_000) == b""
    first = TOKENIZERS["byte-level"].encode("🙂", add_special_tokens=False)[0]
    assert byte_level.label(first).startswith("bytes:\\xf0")


def characters(tokenizer):
    """Tokens of real texts and of characters that the vocabulary has in bytes, cut anywhere."""
    text = st.text(st.sampled_from("the cat hé🙂你漢 \n—.\ufffd"), max_size=8)
    return st.lists(text.map(lambda t: tokenizer.encode(t, add_special_tokens=False)), max_size=5).map(
        lambda parts: list(chain(*parts))
    )


@every_kind
@given(data=st.data())
def test_the_bytes_of_all_tokens_are_the_text(name, data):
    """Behind any prompt, and up to any stop string."""
    tokenizer, texts = TOKENIZERS[name], TEXTS[name]
    ids = data.draw(characters(tokenizer))
    before = data.draw(characters(tokenizer))
    stop = data.draw(st.lists(st.sampled_from(["h", "🙂", "é🙂", "你漢", " cat", "t h"]), max_size=3, unique=True))
    keeps_stop = data.draw(st.booleans())
    cut = data.draw(st.integers(0, len(ids)))
    stream = TextStream(tokenizer, stop, before, texts, keeps_stop)
    first = stream.push(ids[:cut])
    last = stream.push(ids[cut:], "length") if first.finish_reason is None else None
    found = [first] if last is None else [first, last]
    text, tokens = "".join(new.text for new in found), list(chain.from_iterable(new.tokens for new in found))
    joined = b"".join(token.bytes for token in tokens)
    assert joined.decode(errors="replace") == text
    assert "".join(token.text for token in tokens) == text
    if "\ufffd" not in text:
        assert joined == text.encode()


@every_kind
@given(data=st.data())
def test_a_stop_string_may_be_part_of_the_text(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(characters(tokenizer))
    stop = data.draw(st.lists(st.sampled_from(["h", "🙂", "é🙂", "你漢", " cat", "t h"]), min_size=1, max_size=3))
    without, kept = (TextStream(tokenizer, stop, keeps_stop=keeps) for keeps in (False, True))
    short, long = without.push(ids, "length"), kept.push(ids, "length")
    assert long.text == short.text + (without.found_stop or "")
    assert (kept.found_stop, kept.num_tokens, long.finish_reason) == (
        without.found_stop,
        without.num_tokens,
        short.finish_reason,
    )


def test_the_token_that_ends_a_completion_may_be_part_of_its_text():
    tokenizer, texts = TOKENIZERS["byte-level"], TEXTS["byte-level"]
    ids = tokenizer.encode("the cat", add_special_tokens=False)
    for scores in (None, texts):
        assert TextStream(tokenizer, texts=scores).push(ids, "stop").text == tokenizer.decode(ids[:-1])
        kept = TextStream(tokenizer, texts=scores, keeps_stop=True).push(ids, "stop")
        assert kept.text == "the cat"
        assert scores is None or [token.is_end for token in kept.tokens] == [False] * len(ids)
        special = TextStream(tokenizer, texts=scores, keeps_stop=True).push([*ids, *tokenizer.special_ids], "stop")
        assert special.text == "the cat" and (scores is None or special.tokens[-1].is_end)


def test_alternatives_within_a_character_differ():
    tokenizer, texts = TOKENIZERS["byte fallback"], TEXTS["byte fallback"]
    e4, bd, a0, bf = (tokenizer.piece_to_id(f"<0x{byte}>") for byte in ("E4", "BD", "A0", "BF"))
    stream = TextStream(tokenizer, texts=texts)
    new = stream.push([e4, bd, a0], "length", [-1.0] * 3, [[(e4, -1.0), (bd, -2.0)], [(bf, -0.5)], [(a0, -1.0)]])
    assert [token.text for token in new.tokens] == ["", "", "你"]
    assert [token.bytes for token in new.tokens] == [b"\xe4", b"\xbd", b"\xa0"]
    assert new.tokens[0].top == [
        LikelyToken("", -1.0, b"\xe4"),
        LikelyToken("bytes:\\xbd", -2.0, b"\xbd"),
    ]
    assert new.tokens[1].top == [LikelyToken("bytes:\\xbf", -0.5, b"\xbf")]
    assert new.tokens[2].top == [LikelyToken("你", -1.0, b"\xa0")]


@pytest.mark.parametrize(
    ("tokens", "text", "given", "expected"),
    [
        ([b"\xf0\x9f\x99", b"\x82"], "🙂", "🙂", [b"\xf0\x9f\x99", b"\x82"]),
        ([b"\xf0\x9f\x99", b"\x82 a b"], "🙂 a b", "🙂 a", [b"\xf0\x9f\x99", b"\x82 a"]),
        ([b" ", b"", b" word"], " word", " wo", [b"", b"", b" wo"]),
        ([b"word"], "word", "wo", [b"wo"]),
        ([b"\xf0", b"\x9f"], "\ufffd", "\ufffd", [b"\xf0", b"\x9f"]),
        ([b"", b"\xf0"], "", "", [b"", b""]),
        ([b"", b"##ing"], "ing", "in", [b"", b"in"]),
        ([b"##in", b"##g"], "ing", "ing", [b"", b"ing"]),
    ],
)
def test_the_parts_of_tokens_that_are_in_the_text(tokens, text, given, expected):
    assert shared_bytes(tokens, text, given) == expected
