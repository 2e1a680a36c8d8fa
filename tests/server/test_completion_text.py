"""The text of a completion and its tokens do not depend on how the tokens arrive."""

from __future__ import annotations

import pytest
from api_kit import END, TOKENIZER, VOCAB_SIZE
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.server.client import Output
from bminf_lite.server.completion_text import CompletionFailed, CompletionText, ScoredToken, TokenTexts
from bminf_lite.text.text_stream import TextStream

TEXTS = TokenTexts(TOKENIZER)
BYTES = [i for i in range(VOCAB_SIZE) if "\ufffd" in TOKENIZER.decode([i])]
tokens = st.lists(st.one_of(st.integers(0, VOCAB_SIZE - 1), st.sampled_from(BYTES)), max_size=24)
texts = st.lists(st.sampled_from(["e", "th", " a", "in", "the", "\ufffd", "é"]), max_size=3, unique=True)
reasons = st.sampled_from(["stop", "length", "deadline"])


def read(ids: list[int], reason: str, stop: list[str], cuts: list[int], prompt: list[int]):
    """A completion whose tokens arrive cut into pieces, until it has ended."""
    completion = CompletionText(TOKENIZER, stop, prompt, TEXTS)
    text, scored = "", []
    ends = [*sorted({cut for cut in cuts if cut < len(ids)}), len(ids)]
    for start, end in zip([0, *ends], ends, strict=False):
        piece = ids[start:end]
        last = end == len(ids)
        top = [[(i, -1.0)] for i in piece]
        new = completion.read(Output(0, piece, [-float(i) for i in piece], top, reason if last else None))
        text += new.text
        scored += new.tokens
        if new.finish_reason is not None:
            return text, scored, new.finish_reason, completion
    raise AssertionError("the completion does not end")


@given(tokens, reasons, texts, st.lists(st.integers(1, 24)), tokens)
def test_it_depends_on_the_tokens_alone(ids, reason, stop, cuts, prompt):
    ids = [*ids, END] if reason == "stop" else ids
    text, scored, finish_reason, completion = read(ids, reason, stop, cuts, prompt)
    whole, whole_scored, whole_reason, _ = read(ids, reason, stop, [], prompt)
    assert (text, scored, finish_reason) == (whole, whole_scored, whole_reason)
    assert "".join(token.text for token in scored) == text
    expected, stopped = TextStream(TOKENIZER, stop, prompt).push(ids[:-1] if reason == "stop" else ids, last=True)
    assert text == expected and (completion.found_stop is not None) == stopped
    assert finish_reason == ("stop" if stopped or reason == "stop" else "length")
    if not stopped:
        assert completion.num_tokens == len(ids) == len(scored)
        assert [token.logprob for token in scored] == [-float(i) for i in ids]


def test_a_token_that_completes_a_character_has_all_of_it():
    ids = TOKENIZER.encode("a 𝄞b", add_special_tokens=False)
    text, scored, _, _ = read(ids, "length", [], [1, 2, 3], [])
    assert (text == "a 𝄞b" and [token.text for token in scored] == ["a", "", "", "", " 𝄞", "b"]) or len(scored) == len(
        ids
    )
    assert "".join(token.text for token in scored) == text


def test_the_chosen_token_has_its_text_among_the_most_likely():
    completion = CompletionText(TOKENIZER, texts=TEXTS)
    word = TOKENIZER.encode("Return the", add_special_tokens=False)
    new = completion.read(
        Output(0, word, [-1.0, -2.0], [[(word[0], -1.0)], [(word[1], -2.0), (word[0], -3.0)]], "length")
    )
    assert new.tokens == [
        ScoredToken("Return", -1.0, [("Return", -1.0)]),
        ScoredToken(" the", -2.0, [(" the", -2.0), ("Return", -3.0)]),
    ]


def test_which_stop_text_was_found():
    completion = CompletionText(TOKENIZER, ["xyz", "turn", "the"])
    new = completion.read(Output(0, TOKENIZER.encode("Return the", add_special_tokens=False), finish_reason="length"))
    assert (new.text, new.finish_reason, completion.found_stop, completion.num_tokens) == ("Re", "stop", "turn", 1)


def test_an_error_of_the_engine():
    with pytest.raises(CompletionFailed, match="NaN"):
        CompletionText(TOKENIZER).read(Output(0, [5], finish_reason="error", error="logits are NaN"))
