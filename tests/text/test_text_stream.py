"""The text of a completion and its tokens do not depend on how the tokens arrive."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import bminf_lite
from bminf_lite.text.checkpoint_files import load_tokenizer
from bminf_lite.text.text_stream import NewText, ScoredToken, TextStream
from bminf_lite.text.token_bytes import TokenTexts

VOCAB_SIZE = 2048
END = 0
TOKENIZER = load_tokenizer(Path(bminf_lite.__file__).parent / "demo_model", VOCAB_SIZE)
TEXTS = TokenTexts(TOKENIZER)
BYTES = [i for i in range(VOCAB_SIZE) if "\ufffd" in TOKENIZER.decode([i])]
tokens = st.lists(st.one_of(st.integers(0, VOCAB_SIZE - 1), st.sampled_from(BYTES), st.just(END)), max_size=24)
SPELLING = TOKENIZER.id_to_piece(END)
MARKS = [SPELLING, f"e{SPELLING}", f"{SPELLING} a", f"{SPELLING}{SPELLING}"]
texts = st.lists(st.sampled_from(["e", "th", " a", "in", "the", "\ufffd", "é", *MARKS]), max_size=3, unique=True)
reasons = st.sampled_from(["stop", "length", "deadline"])


def read(ids: list[int], reason: str, stop: list[str], cuts: list[int], prompt: list[int], scores: bool = True):
    """A completion whose tokens arrive cut into pieces, until it has ended."""
    stream = TextStream(TOKENIZER, stop, prompt, TEXTS if scores else None)
    text, scored = "", []
    ends = [*sorted({cut for cut in cuts if cut < len(ids)}), len(ids)]
    for start, end in zip([0, *ends], ends, strict=False):
        piece = ids[start:end]
        top = [[(i, -1.0)] for i in piece]
        new = stream.push(piece, reason if end == len(ids) else None, [-float(i) for i in piece], top)
        text += new.text
        scored += new.tokens
        if new.finish_reason is not None:
            return text, scored, new.finish_reason, stream
    raise AssertionError("the completion does not end")


@given(tokens, reasons, texts, st.lists(st.integers(1, 24)), tokens)
def test_it_depends_on_the_tokens_alone(ids, reason, stop, cuts, prompt):
    ids = [*ids, END] if reason == "stop" else ids
    text, scored, finish_reason, stream = read(ids, reason, stop, cuts, prompt)
    whole, whole_scored, whole_reason, _ = read(ids, reason, stop, [], prompt)
    assert (text, scored, finish_reason) == (whole, whole_scored, whole_reason)
    assert "".join(token.text for token in scored) == text
    for pieces in ([], cuts):  # without log-probabilities, and then perhaps decoded at once
        plain, no_tokens, plain_reason, plain_stream = read(ids, reason, stop, pieces, prompt, scores=False)
        assert (plain, no_tokens, plain_reason) == (text, [], finish_reason)
        assert (plain_stream.num_tokens, plain_stream.found_stop) == (stream.num_tokens, stream.found_stop)
    assert finish_reason == ("stop" if stream.found_stop is not None else reason)
    if stream.found_stop is None:
        assert stream.num_tokens == len(ids) == len(scored)
        assert [token.logprob for token in scored] == [-float(i) for i in ids]


words = st.lists(st.sampled_from([*TOKENIZER.encode("the line in a the", add_special_tokens=False), END]), max_size=12)


@given(words, st.lists(st.sampled_from(["the", " a", "line", *MARKS]), min_size=1, max_size=3, unique=True))
def test_a_stop_string_may_spell_tokens_without_text(ids, stop):
    """The definition: a search of the text in which they are spelled, of which only the others' text is given out."""
    spelled = [SPELLING if i == END else TOKENIZER.decode([0, i]) for i in ids]
    whole = "".join(spelled)
    ends = [(whole.index(text) + len(text), -len(text)) for text in stop if text in whole]
    end, length = min(ends, default=(len(whole), 0))
    expected, at = "", 0
    for i, text in zip(ids, spelled, strict=True):
        expected += "" if i == END else text[: max(end + length - at, 0)]
        at += len(text)
    found, _, reason, _ = read(ids, "length", stop, [1, 4, 5], [], scores=False) if ids else ("", [], "length", None)
    assert (found.replace(" ", ""), reason) == (expected.replace(" ", ""), "stop" if ends else "length")


def test_an_end_token_may_complete_a_stop_string():
    ids = [*TOKENIZER.encode("Return the", add_special_tokens=False), END]
    text, _, reason, stream = read(ids, "stop", [f" the{SPELLING}"], [], [])
    assert (text, reason, stream.found_stop) == ("Return", "stop", f" the{SPELLING}")
    stream = TextStream(TOKENIZER, [f"the{SPELLING}"], keeps_stop=True)
    assert stream.push(ids, "length").text == f"Return the{SPELLING}"


def test_a_token_that_completes_a_character_has_all_of_it():
    ids = TOKENIZER.encode("a 𝄞b", add_special_tokens=False)
    text, scored, _, _ = read(ids, "length", [], [1, 2, 3], [])
    assert (text == "a 𝄞b" and [token.text for token in scored] == ["a", "", "", "", " 𝄞", "b"]) or len(scored) == len(
        ids
    )
    assert "".join(token.text for token in scored) == text


def test_the_chosen_token_has_its_text_among_the_most_likely():
    stream = TextStream(TOKENIZER, texts=TEXTS)
    word = TOKENIZER.encode("Return the", add_special_tokens=False)
    new = stream.push(word, "length", [-1.0, -2.0], [[(word[0], -1.0)], [(word[1], -2.0), (word[0], -3.0)]])
    assert new.tokens == [
        ScoredToken("Return", -1.0, [("Return", -1.0, b"Return")], b"Return"),
        ScoredToken(" the", -2.0, [(" the", -2.0, b" the"), ("Return", -3.0, b"Return")], b" the"),
    ]


def test_which_stop_text_was_found():
    stream = TextStream(TOKENIZER, ["xyz", "turn", "the"])
    new = stream.push(TOKENIZER.encode("Return the", add_special_tokens=False), "length")
    assert (new.text, new.finish_reason, stream.found_stop, stream.num_tokens) == ("Re", "stop", "turn", 1)


def test_without_a_tokenizer_the_text_is_empty():
    stream = TextStream(None)
    assert stream.push([1, 2]) == NewText("", [], None)
    assert stream.push([], "deadline") == NewText("", [], "deadline")
    assert stream.num_tokens == 2
