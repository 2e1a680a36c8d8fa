"""Streaming text: the pieces joined are the text of all ids, and no piece has part of a character."""

from __future__ import annotations

import time
from copy import copy
from itertools import chain

import pytest
import tokenizer_kit
from hypothesis import example, given
from hypothesis import strategies as st

from bminf_lite.text.detokenizer import Detokenizer
from bminf_lite.text.json_tokenizer import JsonTokenizer

BYTE_LEVEL = JsonTokenizer(tokenizer_kit.byte_level())
SENTENCEPIECE = JsonTokenizer(tokenizer_kit.sentencepiece_like())
METASPACE = JsonTokenizer(tokenizer_kit.metaspace())
ALL = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE, "metaspace": METASPACE}
ALL |= {f"{name}, special tokens shown": tokenizer.showing(tokenizer_kit.SPECIAL) for name, tokenizer in ALL.items()}


def ids_of(tokenizer, *pieces):
    """The ids of pieces as the vocabulary spells them."""
    ids = {tokenizer.id_to_piece(i): i for i in range(len(tokenizer))}
    return [ids[piece] for piece in pieces]


@st.composite
def tokenizer_and_ids(draw):
    """Random ids, some of them unknown, mixed with the ids of real text."""
    tokenizer = ALL[draw(st.sampled_from(sorted(ALL)))]
    noise = st.lists(st.integers(0, len(tokenizer) + 3), max_size=20)
    text = st.text(st.sampled_from("the cat hé🙂你 \n—."), max_size=10).map(lambda t: tokenizer.encode(t))
    return tokenizer, list(chain(*draw(st.lists(noise | text, max_size=5))))


def stream(tokenizer, ids, prompt=()):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(tokenizer_and_ids())
@example((SENTENCEPIECE, ids_of(SENTENCEPIECE, "<0xE4>", "<s>", "<0xBD>", "<0xA0>", "▁", "é")))
@example((SENTENCEPIECE, ids_of(SENTENCEPIECE, "▁", "▁▁", "<s>", "▁the", "\ufffd", "\ufffd", "<0xFF>")))
def test_the_pieces_joined_are_the_text_of_all_ids(case):
    """At any time, what was emitted begins the text of the ids so far, and the rest may be decoded at once."""
    tokenizer, ids = case
    detokenizer = Detokenizer(tokenizer)
    emitted = ""
    for n, i in enumerate(ids, 1):
        emitted += detokenizer.push(i)
        assert tokenizer.decode(ids[:n]).startswith(emitted)
        assert emitted + copy(detokenizer).flush(ids[n:]) == tokenizer.decode(ids)
    assert emitted + detokenizer.flush() == tokenizer.decode(ids)


@given(st.text(max_size=30))
@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_text_streams_back_whole_characters_at_a_time(name, text):
    tokenizer = ALL[name]
    for special in ("\ufffd", *tokenizer_kit.SPECIAL):
        text = text.replace(special, "")
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert name == "sentencepiece" or "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", ["𝄞𝄞", "ōж𝄞", "𝄞ありж"])
def test_every_character_appears_with_its_last_byte(text):
    ids = BYTE_LEVEL.encode(text)
    assert len(ids) == len(text.encode()), "one token for each byte"
    expected = [part for c in text for part in [""] * (len(c.encode()) - 1) + [c]]
    assert stream(BYTE_LEVEL, ids) == [*expected, ""]
    unfinished = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text + "𝄞")[:-1])
    assert unfinished[-1] == "\ufffd" and "".join(unfinished[:-1]) == text


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "metaspace"])
def test_shown_tokens_are_part_of_the_text(name):
    plain = ALL[name]
    shown = plain.showing(["</s>", "<other>"])
    ids = [i for text in ("the", "</s>", "cat") for i in plain.encode(text, add_special_tokens=False)]
    assert "".join(stream(shown, ids)).replace(" ", "") == "the</s>cat"
    assert "</s>" not in "".join(stream(plain, ids)), "the tokenizer itself is as before"
    assert plain.special_ids - shown.special_ids == {plain.piece_to_id("</s>")}


def test_a_completion_keeps_the_space_after_its_prompt():
    prompt, ids = SENTENCEPIECE.encode("the"), ids_of(SENTENCEPIECE, "▁ca")
    assert stream(SENTENCEPIECE, ids) == ["ca", ""]
    assert stream(SENTENCEPIECE, ids, prompt) == [" ca", ""]


@given(tokenizer_and_ids(), st.data())
def test_a_continued_prompt_reads_as_one_text(case, data):
    tokenizer, ids = case
    prompt = tokenizer.encode(data.draw(st.text("the cat", max_size=30)))
    text = "".join(stream(tokenizer, ids, prompt))
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids)


@pytest.mark.parametrize("piece", ["Ã", "a"])
def test_a_long_stream_costs_the_same_per_token(piece):
    """A run of broken bytes, and of plain letters: eight times the tokens in well under sixty-four times the time."""
    (token,) = ids_of(BYTE_LEVEL, piece)

    def seconds(count):
        start = time.thread_time()
        pieces = stream(BYTE_LEVEL, [token] * count)
        assert "".join(pieces) == BYTE_LEVEL.decode([token] * count)
        return time.thread_time() - start

    seconds(100)
    # once: the garbage collector, or another process, may take time beside one of the two
    assert any(seconds(8000) < 24 * max(seconds(1000), 0.002) for _ in range(10))
