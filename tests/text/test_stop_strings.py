"""Stop strings against a search of the whole text, however it is cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.text.stop_strings import StopMatcher

texts = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)
"""Texts of two letters, so that the beginnings of stop strings overlap in every way."""


def text_before(text, stops):
    """The definition: the first end of any stop string, and of those that end there the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stops if text[:end].endswith(s)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@st.composite
def chunked(draw):
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(pieces=chunked(), stops=stop_lists)
def test_any_chunking_equals_a_search_of_the_whole_text(pieces, stops):
    matcher = StopMatcher(stops)
    expected, expected_stop = text_before("".join(pieces), stops)
    emitted, stopped = "", False
    for piece in pieces:
        text, stopped = matcher.push(piece)
        emitted += text
        assert expected.startswith(emitted)
    emitted += matcher.flush()
    assert (emitted, stopped) == (expected, expected_stop)


@given(pieces=chunked(), stops=stop_lists, first=st.integers(0, 13))
def test_stop_strings_count_from_a_piece_on_and_may_begin_before(pieces, stops, first):
    text, least = "".join(pieces), len("".join(pieces[:first]))
    ends = (end for end in range(least + 1, len(text) + 1) if any(text[:end].endswith(s) for s in stops))
    end = next(ends, None)
    expected = text if end is None else text[: end - max(len(s) for s in stops if text[:end].endswith(s))]
    matcher, emitted = StopMatcher(stops), ""
    for i, piece in enumerate(pieces):
        emitted += matcher.push(piece, may_stop=i >= first)[0]
        assert expected.startswith(emitted)
    assert (emitted + matcher.flush(), matcher.stopped) == (expected, end is not None)


@given(
    pieces=st.lists(st.tuples(st.text("ab", max_size=6), st.booleans()), max_size=8),
    stops=stop_lists,
    keeps=st.booleans(),
)
def test_what_is_hidden_is_looked_at_and_not_emitted(pieces, stops, keeps):
    """Upper-case letters stand for hidden ones in the definition."""
    matcher = StopMatcher(stops, keeps)
    text = "".join(piece for piece, _ in pieces)
    marked = "".join(piece.upper() if hidden else piece for piece, hidden in pieces)
    before, expected_stop = text_before(text, stops)
    expected = "".join(c for c in marked[: len(before)] if c.islower())
    emitted, stopped = "", False
    for piece, hidden in pieces:
        given, stopped = matcher.push(piece, hidden)
        emitted += given
    emitted += matcher.flush()
    kept = matcher.found if keeps and matcher.found else ""
    assert (emitted, stopped) == (expected + kept, expected_stop and bool(pieces))


@given(text=texts, stops=stop_lists)
def test_text_is_held_back_only_if_it_may_begin_a_stop_string(text, stops):
    matcher = StopMatcher(stops)
    emitted, stopped = matcher.push(text)
    if not stopped:
        held = text[len(emitted) :]
        assert not held or any(s.startswith(held) and s != held for s in stops)


def test_examples():
    matcher = StopMatcher(["END"])
    assert matcher.push("a EN") == ("a ", False)
    assert matcher.push("EM EN") == ("ENEM ", False)
    assert matcher.push("D b") == ("", True)
    assert matcher.push("c") == ("", True)
    assert matcher.flush() == ""
    assert StopMatcher().push("text") == ("text", False)


def test_long_stop_strings_in_a_text_that_repeats_itself():
    """The most and longest stop strings of a request; looking for each beginning would take 20 ms a character."""
    stops = ["a" * 1023 + "b", *("a" + chr(0x4E00 + i) * 1000 for i in range(63))]
    matcher = StopMatcher(stops)
    assert "".join(matcher.push("a")[0] for _ in range(5000)) == "a" * (5000 - 1023)
    assert matcher.push("ab") == ("a", True) and matcher.found == stops[0]
