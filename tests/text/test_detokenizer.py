"""Streaming text: the pieces together are the text of all ids, and no piece is half a character."""

from __future__ import annotations

import time
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
def test_the_pieces_together_are_the_text_of_all_ids(case):
    tokenizer, ids = case
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(tokenizer_and_ids())
def test_what_was_emitted_stays_true_whatever_follows(case):
    tokenizer, ids = case
    detokenizer = Detokenizer(tokenizer)
    emitted = ""
    for n, i in enumerate(ids, 1):
        emitted += detokenizer.push(i)
        assert tokenizer.decode(ids[:n]).startswith(emitted)


@given(st.text(max_size=30))
@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_text_streams_back_whole_characters_at_a_time(name, text):
    tokenizer = ALL[name]
    text = text.replace("\ufffd", "")
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_byte_level_character_appears_with_its_last_byte():
    ids = BYTE_LEVEL.encode("a🙃b")
    pieces = stream(BYTE_LEVEL, ids)
    assert [p for p in pieces if p] == ["a", "🙃", "b"]
    assert pieces[-1] == ""


@pytest.mark.parametrize("text", ["𝄞𝄞", "ōж𝄞", "𝄞ありж"])
def test_every_character_appears_with_its_last_byte(text):
    ids = BYTE_LEVEL.encode(text)
    assert len(ids) == len(text.encode()), "a token each"
    expected = [part for c in text for part in [""] * (len(c.encode()) - 1) + [c]]
    assert stream(BYTE_LEVEL, ids) == [*expected, ""]


def test_text_is_not_held_back_without_need():
    ids = SENTENCEPIECE.encode("the cat")
    assert "".join(stream(SENTENCEPIECE, ids)[:-1]) == "the cat"


def test_an_unfinished_character_comes_out_at_the_end():
    ids = BYTE_LEVEL.encode("a🙃")[:-1]
    pieces = stream(BYTE_LEVEL, ids)
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces[:-1]) == "a"


def test_a_completion_keeps_the_space_after_its_prompt():
    prompt, ids = SENTENCEPIECE.encode("the"), ids_of(SENTENCEPIECE, "▁ca")
    assert "".join(stream(SENTENCEPIECE, ids)) == "ca"
    assert "".join(stream(SENTENCEPIECE, ids, prompt)) == " ca"


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
        start = time.process_time()
        pieces = stream(BYTE_LEVEL, [token] * count)
        assert "".join(pieces) == BYTE_LEVEL.decode([token] * count)
        return time.process_time() - start

    seconds(100)
    assert seconds(8000) < 24 * max(seconds(1000), 0.002)
