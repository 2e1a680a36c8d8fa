"""Grammars of calls: they accept what the parsers read as calls, and what is no valid call is refused."""

from __future__ import annotations

import json

import pytest
import tool_templates
import tool_texts
from test_tool_calls import parse_text
from test_tool_prompts import TIME, WEATHER

from bminf_lite.errors import UsageError
from bminf_lite.text import reasoning
from bminf_lite.text.reasoning import REASONING_FORMATS
from bminf_lite.text.tool_calls import HARMONY, TOOL_FORMATS, tool_grammar

llguidance = pytest.importorskip("llguidance")
TOKENIZER = tool_templates.tokenizer()
FORMS = [form for form in TOOL_FORMATS.values() if form is not HARMONY]  # of which an answer is one message
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
STRICT["function"]["parameters"] = {**WEATHER["function"]["parameters"], "additionalProperties": False}
THINK = REASONING_FORMATS["think"]


@pytest.fixture(scope="module")
def vocabulary():
    return llguidance.LLTokenizer(TOKENIZER._backend.to_str(), eos_token=TOKENIZER.piece_to_id("</s>"))


@pytest.fixture
def accepts(vocabulary):
    """Whether a grammar accepts a text in this vocabulary; ``None`` if it accepts a longer one."""

    def check(grammar, text):
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        if not all(matcher.consume_token(i) for i in TOKENIZER.encode(text)):
            return False
        return True if matcher.is_accepting() else None

    return check


def written(form, *calls):
    """Calls as their grammar has them."""
    return tool_texts.written(form, [(name, json.loads(arguments)) for name, arguments in calls], literal=json.dumps)


CITY, WRONG = ("weather", '{"city": "Paris"}'), ("weather", '{"town": 1}')
NOW = ("time", "{}")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_required_calls(form, accepts):
    grammar = tool_grammar(form, [STRICT, TIME], required=True, token_id=TOKENIZER.piece_to_id)
    for calls in ([CITY], [NOW], [CITY, NOW], [NOW, CITY, CITY]):
        text = written(form, *calls)
        assert accepts(grammar, text)
        assert parse_text(form, text, ["weather", "time"]) == calls
    assert accepts(grammar, "") is None
    for text in ("Hello", written(form, WRONG), written(form, ("f", "{}")), written(form, ("time", '{"a": 1}'))):
        assert accepts(grammar, text) is False
    single = tool_grammar(form, [STRICT, TIME], required=True, parallel=False, token_id=TOKENIZER.piece_to_id)
    assert accepts(single, written(form, CITY)) and not accepts(single, written(form, CITY, NOW))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_named_call(form, accepts):
    grammar = tool_grammar(form, [WEATHER, TIME], name="time", token_id=TOKENIZER.piece_to_id)
    assert accepts(grammar, written(form, NOW))
    assert not accepts(grammar, written(form, CITY)) and not accepts(grammar, written(form, NOW, NOW))
    with pytest.raises(UsageError, match=r"'date'.* are: weather, time"):
        tool_grammar(form, [WEATHER, TIME], name="date")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("parallel", [True, False])
def test_strict_tools_leave_text_free(form, parallel, accepts):
    grammar = tool_grammar(form, [STRICT, TIME], parallel=parallel, token_id=TOKENIZER.piece_to_id)
    assert tool_grammar(form, [WEATHER, TIME]) is None
    for text in ("", "Hello.\n\nYes < [ }", written(form, CITY), written(form, ("time", '{"a": [1, 2]}'))):
        assert accepts(grammar, text)
    before = f"So:{'' if not form.has_bare_calls else form.begin}"
    assert accepts(grammar, before + written(form, CITY))
    assert not accepts(grammar, before + written(form, WRONG))
    assert not accepts(grammar, written(form, WRONG))
    assert accepts(grammar, written(form, CITY, NOW)) is parallel


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_reasoning_may_precede(form, accepts):
    options = {"reasoning": THINK, "token_id": TOKENIZER.piece_to_id, "required": True}
    call = written(form, CITY)
    closed = tool_grammar(form, [WEATHER], **options)
    assert accepts(closed, call) and accepts(closed, f"<think>\nHm <\n</think>\n\n{call}")
    assert accepts(closed, "Hm") is False
    opened = tool_grammar(form, [WEATHER], **options, reasoning_is_open=True)
    assert accepts(opened, f"Hm\n</think>\n\n{call}")
    assert accepts(opened, "Hm") is None


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_without_ids_a_grammar_needs_no_vocabulary(form):
    """It is the same with marks as text, and validates for a vocabulary of bytes; a bad schema is found there."""
    matcher, texts = llguidance.LLMatcher, [written(form, CITY), f"<think>a</think>{written(form, NOW)}"]
    for required in (True, False):
        grammar = tool_grammar(form, [STRICT, TIME], required=required, reasoning=THINK)
        for text in texts:
            state = matcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
            assert all(state.consume_token(i) for i in text.encode()) and state.is_accepting()
    bad = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "sting"}}}}}
    assert (
        "sting"
        in matcher(llguidance.LLTokenizer("byte"), tool_grammar(form, [bad], required=True), log_level=0).get_error()
    )


def test_messages_of_harmony(accepts):
    """An answer is one call or one text, each in its channel; reasoning precedes it."""
    options = {"reasoning": reasoning.HARMONY, "token_id": TOKENIZER.piece_to_id}
    call, text = written(HARMONY, CITY), f"{HARMONY.text_mark}Hello. < {{"
    natural = call.replace("<|message|>", " <|constrain|>json<|message|>") + "<|call|>"
    analysis = "<|channel|>analysis<|message|>Hm <|<|end|><|start|>assistant"
    required = tool_grammar(HARMONY, [STRICT, TIME], required=True, **options)
    for accepted in (call, natural, analysis + natural):
        assert accepts(required, accepted)
    for refused in ("Hello", text, written(HARMONY, WRONG), written(HARMONY, ("f", "{}")), call + call):
        assert accepts(required, refused) is False
    free = tool_grammar(HARMONY, [STRICT, TIME], **options)
    assert accepts(free, text) and accepts(free, analysis + text) and accepts(free, natural)
    assert accepts(free, "Hello") is False and not accepts(free, written(HARMONY, WRONG))
    named = tool_grammar(HARMONY, [WEATHER, TIME], name="time", **options)
    assert accepts(named, written(HARMONY, NOW)) and not accepts(named, call)
    opened = tool_grammar(HARMONY, [STRICT], required=True, **options, reasoning_is_open=True)
    assert accepts(opened, f"Hm<|end|><|start|>assistant{call}") and accepts(opened, "Hm") is None


PLAN = {
    "type": "function",
    "function": {
        "name": "plan",
        "parameters": {
            "type": "object",
            "properties": {
                "days": {"type": "integer", "maximum": 9},
                "exact": {"type": "boolean"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
            },
            "required": ["exact"],
            "$defs": {"place": {"enum": ["sea", 1]}},
        },
    },
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_arguments_of_all_types(form, accepts):
    """Each may be there or not unless it is required, and has the values of its schema."""
    grammar = tool_grammar(form, [PLAN], name="plan", token_id=TOKENIZER.piece_to_id)
    literals = {True: "True", False: "False"}

    def text(**arguments):
        order = ["days", "exact", "unit", "places"] if form.syntax != "python" else ["exact", "days", "unit", "places"]
        order = sorted(order) if form.syntax == "braces" else order
        ordered = {key: arguments[key] for key in order if key in arguments}

        def literal(value):
            return literals[value] if isinstance(value, bool) else json.dumps(value)

        return tool_texts.written(form, [("plan", ordered)], literal=literal)

    for arguments in ({}, {"days": 3}, {"unit": "F"}, {"days": -1, "unit": "C", "places": []}, {"places": ["sea", 1]}):
        call = text(exact=True, **arguments)
        assert accepts(grammar, call)
        ((name, found),) = parse_text(form, call, ["plan"], {"plan": PLAN["function"]["parameters"]})
        assert (name, json.loads(found)) == ("plan", {"exact": True, **arguments})
    for arguments in ({"days": 10}, {"days": 1.5}, {"unit": "K"}, {"places": ["city"]}, {"places": 1}):
        assert accepts(grammar, text(exact=True, **arguments)) is False
    assert not accepts(grammar, text(days=3)) and not accepts(grammar, text(exact="yes"))
    optional = {**PLAN["function"], "parameters": PLAN["function"]["parameters"] | {"required": []}}
    grammar = tool_grammar(form, [{"function": optional}], name="plan", token_id=TOKENIZER.piece_to_id)
    for arguments in ({}, {"days": 3}, {"exact": False}, {"unit": "C", "places": [1]}):
        assert accepts(grammar, text(**arguments))


def test_references_within_a_schema(accepts):
    schema = {"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "$defs": {"n": {"enum": [1, '/x"y']}}}
    tools = [{"type": "function", "function": {"name": "f-1", "parameters": schema}}]
    grammar = tool_grammar(TOOL_FORMATS["hermes"], tools, required=True, token_id=TOKENIZER.piece_to_id)
    assert accepts(grammar, written(TOOL_FORMATS["hermes"], ("f-1", json.dumps({"a": '/x"y'}))))
    assert not accepts(grammar, written(TOOL_FORMATS["hermes"], ("f-1", json.dumps({"a": 2}))))


def test_formats_that_are_annotations():
    form = TOOL_FORMATS["hermes"]
    with_format, without = (
        {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "string", **annotation}}}}}
        for annotation in ({"format": "binary"}, {})
    )
    assert tool_grammar(form, [with_format], required=True) == tool_grammar(form, [without], required=True)
