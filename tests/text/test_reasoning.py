"""Reasoning apart from the answer: what the parser says does not depend on how the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tool_templates
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.text.reasoning import REASONING_FORMATS, Content, Reasoning, ReasoningParser, find_reasoning_format
from bminf_lite.text.text_stream import TextStream
from bminf_lite.text.tool_calls import MISTRAL_ARGS, ArgumentsDelta, CallBegin, CallEnd, ToolCallParser

THINK = REASONING_FORMATS["think"]


def parse(pieces, opened=False):
    parser = ReasoningParser(THINK, opened)
    found = {Reasoning: "", Content: ""}
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.flush():
        assert part.text and not (found[Content] and isinstance(part, Reasoning)), "reasoning comes first"
        found[type(part)] += part.text
    return found[Reasoning], found[Content]


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm. <b>\n\nSo\n</think>\n\nYes. ", False, ("Hm. <b>\n\nSo", "Yes. ")),
        ("Hm.\n</think>\n\nYes.", True, ("Hm.", "Yes.")),
        ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        (" \n<think>Hm", False, ("Hm", "")),
        ("Hm </thin", True, ("Hm </thin", "")),
        (" Yes <think>no</think>", False, ("", " Yes <think>no</think>")),
        ("<thin", False, ("", "<thin")),
        ("Yes</think>", False, ("", "Yes</think>")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        (" \n", False, ("", " \n")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_and_answer(text, opened, expected):
    assert parse([text], opened) == expected
    assert parse(text, opened) == expected, "a character at a time"


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", " ", "\n", "a", "é"]), max_size=12),
    st.booleans(),
    st.lists(st.integers(0, 60), max_size=10),
)
def test_how_the_text_is_cut_does_not_matter(fragments, opened, places):
    text = "".join(fragments)
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    assert parse([text[a:b] for a, b in pairwise(bounds)], opened) == parse([text], opened)


def test_text_arrives_as_soon_as_it_is_certain():
    parser = ReasoningParser(THINK)
    assert parser.push("<thi") == []
    assert parser.push("nk> a b ") == [Reasoning("a b")]
    assert parser.push("c</th") == [Reasoning(" c")]
    assert parser.push("ink> d ") == [Content("d ")]


def test_formats():
    assert find_reasoning_format("{{ '</think>' }}") is THINK
    assert find_reasoning_format("[THINK][/THINK]").name == "mistral"
    gemma = find_reasoning_format("{{ '<|channel>thought' }}{{ '<channel|>' }}")
    assert gemma.name == "gemma4" and gemma.visible_tokens == ("<|channel>", "<channel|>")
    assert gemma.is_open_after("<|turn>model\n<|channel>thought\n")
    parser = ReasoningParser(gemma)
    assert parser.push("<|channel>thought\nWhy?") == [Reasoning("Why?")]
    assert parser.push("\n<channel|>So.") == [Content("So.")]
    assert find_reasoning_format("{{ messages }}") is find_reasoning_format(None) is None
    assert THINK.is_open_after("<assistant><think>\n") and not THINK.is_open_after("<think>\n\n</think>\n\n")


def test_marks_that_are_special_tokens_reach_the_parsers():
    """From tokens to events: reasoning and a call whose marks a plain tokenizer drops."""
    form = REASONING_FORMATS["mistral"]
    plain = tool_templates.tokenizer()
    text = '[THINK]Ça va?[/THINK]Eh bien.[TOOL_CALLS]f[ARGS]{"a": "é"}'
    ids = [*plain.encode(text), *plain.eos_ids]
    assert plain.decode(ids) == 'Ça va?Eh bien.f{"a": "é"}'
    stream = TextStream(plain.showing([*form.visible_tokens, *MISTRAL_ARGS.visible_tokens]))
    reasoning, calls = ReasoningParser(form), ToolCallParser(MISTRAL_ARGS, ["f"])
    parts = [part for i in ids for part in reasoning.push(stream.push([i]).text)]
    parts += reasoning.push(stream.push([], "length").text) + reasoning.flush()
    events = [event for part in parts if isinstance(part, Content) for event in calls.push(part.text)] + calls.flush()
    assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == "Ça va?"
    assert "".join(event.text for event in events if isinstance(event, Content)) == "Eh bien."
    assert "".join(event.text for event in events if isinstance(event, ArgumentsDelta)) == '{"a": "é"}'
    assert CallBegin(0, "f") in events and events[-1] == CallEnd(0)


@pytest.mark.parametrize("form", REASONING_FORMATS.values(), ids=lambda form: form.name)
def test_a_mark_that_is_cut_is_no_text(form):
    """At least half of a mark is no text; less may be the beginning of anything."""
    text = f"{form.begin}so it is{form.end}yes"
    for end in range(len(text) + 1):
        parser = ReasoningParser(form)
        parts = [*parser.push(text[:end]), *parser.flush(was_cut=True)]
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        assert content == ("yes"[: max(end - len(text) + 3, 0)] if end >= len(form.begin) / 2 else text[:end])
        whole = text[len(form.begin) : end].partition(form.end)[0]
        partial = next((n for n in range(len(form.end) - 1, 0, -1) if whole.endswith(form.end[:n])), 0)
        assert reasoning == (whole[: len(whole) - partial] if 2 * partial >= len(form.end) else whole).rstrip()
