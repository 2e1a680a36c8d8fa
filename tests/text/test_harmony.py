"""The format of gpt-oss: messages in channels, read while they arrive, and written by a grammar."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.text.lark import after_reasoning, mark_rule
from bminf_lite.text.reasoning import HARMONY, HARMONY_ENDS, Content, Reasoning, find_reasoning_format
from bminf_lite.text.tool_calls import HARMONY as CALLS
from bminf_lite.text.tool_calls import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ToolCallParser,
    find_tool_format,
    tool_grammar,
)

TEMPLATE = """{%- for tool in tools %}{{ "namespace functions {" + tool.function.name + "}" }}{% endfor %}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"""
ANALYSIS = "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
WEATHER = '{"city": "Paris"}'
MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]
IDS = {mark: 100 + i for i, mark in enumerate(MARKS)}


def parse(pieces, opened=False, was_cut=False):
    """The reasoning, the content, and the calls with their arguments."""
    parser, calls = HARMONY.parser(opened), ToolCallParser(CALLS, ["weather"])
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush(was_cut)
    assert all(part.text for part in parts)
    events = [event for part in parts if isinstance(part, Content) for event in calls.push(part.text)]
    events += calls.flush(was_cut)
    found: list[list[str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            found.append([event.name, ""])
        elif isinstance(event, ArgumentsDelta):
            found[event.call][1] += event.text
    assert sum(isinstance(event, CallEnd) for event in events) == len(found)
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return reasoning, "".join(event.text for event in events if isinstance(event, Content)), found


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        (f"{ANALYSIS}{FINAL}It rains.<|return|>", False, ("The user asks.", "It rains.", [])),
        (f"{ANALYSIS}{FINAL}It rains.", False, ("The user asks.", "It rains.", [])),
        (f"{FINAL}Yes", False, ("", "Yes", [])),
        ("So.<|end|><|start|>assistant<|channel|>final<|message|>Yes", True, ("So.", "Yes", [])),
        ("<|channel|>analysis<|message|>Hm", False, ("Hm", "", [])),
        (
            f"{ANALYSIS}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{WEATHER}<|call|>",
            False, ("The user asks.", "", [["weather", WEATHER]]),
        ),
        # the recipient may stand before the channel, and a model may stop before the mark
        (
            f"{ANALYSIS} to=functions.weather<|channel|>commentary json<|message|>{WEATHER}",
            False, ("The user asks.", "", [["weather", WEATHER]]),
        ),
        (
            f"{ANALYSIS}<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
            f"<|channel|>commentary to=functions.weather<|message|>{WEATHER}<|call|>",
            False, ("The user asks.", "I look it up.", [["weather", WEATHER]]),
        ),
        (f"{ANALYSIS}<|channel|>analysis<|message|>More.<|end|>", False, ("The user asks.\n\nMore.", "", [])),
        ("No header, 1 < 2 <|x|>", False, ("", "No header, 1 < 2 <|x|>", [])),
        ("<|start|>no\nheader<|end|>", False, ("", "no\nheader", [])),
        ("<|channel|>fin", False, ("", "", [])),
        ("", False, ("", "", [])),
    ],
)  # fmt: skip
def test_messages_and_their_channels(text, opened, expected):
    assert parse([text], opened) == expected
    assert parse(text, opened) == expected, "a character at a time"


@given(
    st.lists(
        st.sampled_from([*MARKS, "analysis", "final", "commentary", " to=functions.f", "assistant", "<|", "a", "\n"]),
        max_size=14,
    ),
    st.booleans(), st.booleans(), st.lists(st.integers(0, 150), max_size=10),
)  # fmt: skip
def test_how_the_text_is_cut_does_not_matter(fragments, opened, was_cut, places):
    text = "".join(fragments)
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    assert parse([text[a:b] for a, b in pairwise(bounds)], opened, was_cut) == parse([text], opened, was_cut)


def test_a_long_header_is_decided_alike_however_it_is_cut():
    for length in range(240, 260):
        text = f"<|channel|>{'a' * length}<|message|>x"
        assert parse(text) == parse([text])


def test_reasoning_may_be_content():
    """The headers are still no text, and calls are read."""
    form = HARMONY.unseparated
    assert form is not None
    parts = form.parser().push(f"{ANALYSIS}{FINAL}Yes<|end|>")
    assert "".join(part.text for part in parts) == "The user asks.\n\nYes"
    assert all(isinstance(part, Content) for part in parts)


def test_text_arrives_as_soon_as_it_is_certain():
    parser = HARMONY.parser()
    assert parser.push("<|channel|>analysis<|mess") == []
    assert parser.push("age|>Hm, ") == [Reasoning("Hm, ")]
    assert parser.push("so<|e") == [Reasoning("so")]
    assert parser.push("nd|><|start|>assistant<|channel|>final<|message|>Y") == [Content("Y")]


@pytest.mark.parametrize("mark", HARMONY_ENDS)
def test_at_least_half_of_a_mark_that_is_cut_is_no_text(mark):
    for end in range(1, len(mark)):
        text = "" if 2 * end >= len(mark) else mark[:end]
        assert parse([f"{FINAL}Yes{mark[:end]}"], was_cut=True) == ("", f"Yes{text}", [])


def test_a_template_of_messages_is_known():
    assert find_reasoning_format(TEMPLATE) is HARMONY
    assert find_tool_format(TEMPLATE, lambda text: False) is CALLS
    assert HARMONY.is_open_after(f"<|start|>assistant{HARMONY.begin}") and not HARMONY.is_open_after(
        "<|start|>assistant"
    )


def test_marks_in_grammars_are_tokens():
    """llguidance takes a token that looks like a mark for no text."""
    assert mark_rule(HARMONY.begin, IDS.get) == '<[101]> "analysis" <[102]>'
    assert mark_rule(HARMONY.begin, lambda text: None) == json.dumps(HARMONY.begin)
    grammar = after_reasoning("answer: TEXT", HARMONY, False, IDS.get)
    assert 'reasoning: <[101]> "analysis" <[102]> until_end <[100]> "assistant"' in grammar
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}]
    found = tool_grammar(CALLS, tools, token_id=IDS.get, reasoning=HARMONY)
    assert 'answer: <[101]> "final" <[102]> TEXT | <[101]> "commentary to=functions." rest' in found
    assert "rest: call <[105]>?" in found
    assert '"weather" (" " <[103]> "json")? <[102]> arguments_0' in found
