"""Calls in a model's text: what the parser makes of each form does not depend on how the text is cut."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tool_texts import written

from bminf_lite.text.reasoning import Content
from bminf_lite.text.tool_calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GENERIC,
    GLM45,
    HERMES,
    KIMI_K2,
    LFM2,
    LLAMA3_JSON,
    LLAMA4_PYTHONIC,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN3_CODER,
    SEED_OSS,
    TOOL_FORMATS,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ToolCallParser,
)

NAMES = ["weather", "add"]
FORMS = list(TOOL_FORMATS.values())


def parse(form, pieces, names=NAMES, schemas=None, was_cut=False):
    """The contents and calls of a text, in order: a content is text, a call is a name and its arguments."""
    parser = ToolCallParser(form, names, schemas)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush(was_cut)
    found, calls, running = [], [], None
    for event in events:
        match event:
            case Content(text):
                assert text and running is None
                if found and isinstance(found[-1], str):
                    found[-1] += text
                else:
                    found.append(text)
            case CallBegin(index, name):
                assert index == len(calls) and running is None
                running = index
                calls.append((name, ""))
                found.append(index)
            case ArgumentsDelta(index, text):
                assert text and index == running
                calls[index] = (calls[index][0], calls[index][1] + text)
            case CallEnd(index):
                assert index == running
                running = None
    assert running is None and parser.call_count == len(calls)
    return [item if isinstance(item, str) else calls[item] for item in found]


def parse_text(form, text, names=NAMES, schemas=None):
    return parse(form, [text], names, schemas)


def cut(text, places):
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


# -- what models write ------------------------------------------------------------------------------------------------

GLM_ADD = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
ARGUMENTS = '{"city": "Paris }]\\" </tool_call>", "days": [1, {"n": null}]}'
ADD = '{"a": 1, "b": -2.5e3}'
BOTH = [("weather", ARGUMENTS), ("add", ADD)]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (
            HERMES,
            f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
            f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>',
            BOTH,
        ),
        (GENERIC, f'So.\n\n<tool_call>{{"name":"add","arguments":{ADD}}}</tool_call>', ["So.", BOTH[1]]),
        (HERMES, f'<tool_call>{{"arguments": {ADD}, "name": "add"}}</tool_call> Done. ', [BOTH[1], "Done. "]),
        (HERMES, f'<tool_call>{{"name": "add", "arguments": {json.dumps(ADD)}}}</tool_call>', [BOTH[1]]),
        (HERMES, '<tool_call>{"name": "add"}</tool_call>', [("add", "{}")]),
        (HERMES, '<tool_call>{"name": "add", "arguments": null, "id": 3}</tool_call>', [("add", "{}")]),
        (HERMES, f'<tool_call>[{{"name": "add", "arguments": {ADD}}}]</tool_call>', [BOTH[1]]),
        (HERMES, f'<tool_call>{{"name": "unknown", "arguments": {ADD}}}</tool_call>', [("unknown", ADD)]),
        (LLAMA3_JSON, f'{{"name": "weather", "parameters": {ARGUMENTS}}}', BOTH[:1]),
        (LLAMA3_JSON, f'\n<|python_tag|>{{"type": "function", "name": "add", "parameters": {ADD}}}', BOTH[1:]),
        (
            LLAMA3_JSON,
            f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "add", "parameters": {ADD}}}',
            BOTH,
        ),
        (LLAMA3_JSON, f'I call <|python_tag|>{{"name": "unknown", "arguments": {ADD}}}', ["I call", ("unknown", ADD)]),
        (
            MISTRAL,
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}, "id": "Ab1"}}, '
            f'{{"name": "add", "arguments": {ADD}}}]',
            BOTH,
        ),
        (MISTRAL_ARGS, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]add[CALL_ID]Ab1[ARGS]{ADD}", BOTH),
        (MISTRAL_ARGS, f"So:[TOOL_CALLS]weather{ARGUMENTS}", ["So:", BOTH[0]]),
        (MISTRAL_ARGS, f'[TOOL_CALLS][{{"name": "add", "arguments": {ADD}}}]', BOTH[1:]),
        (
            DEEPSEEK_V3,
            "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{ADD}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ["So.", *BOTH],
        ),
        (
            DEEPSEEK_V31,
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
            f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            BOTH,
        ),
        (
            QWEN3_CODER,
            "Hm.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis }]\n</parameter>\n<parameter=days>\n"
            '[1, {"n": null}]\n</parameter>\n</function>\n</tool_call>\n<tool_call><function=add><parameter=a>True'
            "</parameter></function></tool_call> Done.",
            ["Hm.", ("weather", '{"city": "Paris }]", "days": [1, {"n": null}]}'), ("add", '{"a": true}'), "Done."],
        ),
        (QWEN3_CODER, "<tool_call>\n<function=add>\n</function>\n</tool_call>", [("add", "{}")]),
        (
            LLAMA4_PYTHONIC,
            "[weather(city='Paris )]\"', days=[1, {'n': None}]), add( a = -2.5 ,b=x+1,)]",
            [("weather", '{"city": "Paris )]\\"", "days": [1, {"n": null}]}'), ("add", '{"a": -2.5, "b": "x+1"}')],
        ),
        (LLAMA4_PYTHONIC, "So <|python_start|>[unknown()]<|python_end|>", ["So", ("unknown", "{}")]),
        (
            LFM2,
            "<|tool_call_start|>[add(a=1), add(a='x')]<|tool_call_end|>Adding.",
            [("add", '{"a": 1}'), ("add", '{"a": "x"}'), "Adding."],
        ),
        (
            GLM45,
            "Hm.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris }]</arg_value>\n<arg_key>days"
            '</arg_key>\n<arg_value>[1, {"n": null}]</arg_value>\n</tool_call>\n<tool_call>add<arg_key>a</arg_key>'
            "<arg_value>1</arg_value></tool_call><tool_call>add</tool_call>",
            ["Hm.", ("weather", '{"city": "Paris }]", "days": [1, {"n": null}]}'), ("add", '{"a": 1}'), ("add", "{}")],
        ),
        (
            MINIMAX_M2,
            'So.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris "1"</parameter>\n'
            '</invoke>\n<invoke name="add">\n</invoke>\n</minimax:tool_call> "> ok',
            ["So.", ("weather", '{"city": "Paris \\"1\\""}'), ("add", "{}"), '"> ok'],
        ),
        (
            SEED_OSS,
            "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>",
            [("add", '{"a": 1}')],
        ),
        (
            KIMI_K2,
            f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0 <|tool_call_argument_begin|>"
            f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{ADD}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            BOTH,
        ),
        (
            GEMMA4,
            '<|tool_call>call:weather{city:<|"|>Paris }],"<|"|>,days:[1,{n:null}], on:true}<tool_call|>'
            "<|tool_call>call:add{}<tool_call|>",
            [("weather", '{"city": "Paris }],\\"", "days": [1, {"n": null}], "on": true}'), ("add", "{}")],
        ),
        (
            GEMMA4,
            '<|tool_call>call:add{a:two words,<|"|>b:c<|"|>:[{<|"|>d:<|"|> :1}]}',
            [("add", '{"a": "two words", "b:c": [{"d:": 1}]}')],
        ),
    ],
)
def test_calls_are_found(form, text, expected):
    assert parse_text(form, text) == expected
    assert parse(form, text) == expected, "a character at a time"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "no call at all < <tool \n"),
        (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": "x"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": }</tool_call>'),
        (HERMES, "  <tool_call>add(1, 2)</tool_call>  "),
        (HERMES, '<tool_call>{"name": "ad'),
        (HERMES, "<tool_call>{}</tool_call>"),
        (HERMES, "say </tool_call>"),
        (LLAMA3_JSON, '{"name": "Ada", "age": 36}'),
        (LLAMA3_JSON, '{"name": "unknown", "parameters": {}}'),
        (LLAMA3_JSON, 'Call {"name": "add", "parameters": {}}'),
        (LLAMA3_JSON, '<|python_tag|>brave_search.call(query="x")'),
        (LLAMA3_JSON, '{"name": "add"'),
        (MISTRAL, "[TOOL_CALLS] add"),
        (MISTRAL, "[TOOL_CALLS] [1, 2]"),
        (MISTRAL_ARGS, "[TOOL_CALLS]add[ARGS]"),
        (MISTRAL_ARGS, "[TOOL_CALLS]add[ARGS][1]"),
        (MISTRAL_ARGS, "[TOOL_CALLS][TOOL_CALLS"),
        (DEEPSEEK_V31, "<｜tool▁calls▁begin｜>add"),
        (DEEPSEEK_V3, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add x"),
        (QWEN3_CODER, '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
        (QWEN3_CODER, "<tool_call><function=add"),
        (LLAMA4_PYTHONIC, "[1, 2]"),
        (LLAMA4_PYTHONIC, "[unknown(a=1)]"),
        (LLAMA4_PYTHONIC, "See [add(a=1)]"),
        (LFM2, "[add(a=1)]"),
        (GLM45, "<tool_call>Hello world</tool_call>"),
        (MINIMAX_M2, '<minimax:tool_call>\n<invoke name="add"'),
        (KIMI_K2, "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0 1"),
        (GEMMA4, "<|tool_call>add{a:1}<tool_call|>"),
        (GEMMA4, "<|tool_call>call:add"),
    ],
)
def test_text_that_is_no_call_is_content(form, text):
    assert parse_text(form, text) == [text]
    assert parse(form, text) == [text]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', [("add", '{"a": 1')]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}\n</tool_call>ok', [("add", '{"a": 1}'), "ok"]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}}}\n</tool_call>ok', [("add", '{"a": 1}'), "ok"]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}}', [("add", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {\'a\': 1}}</tool_call>ok', [("add", "{'a': 1}}"), "ok"]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": [1}}</tool_call>ok', [("add", '{"a": [1}}'), "ok"]),
        (HERMES, '<tool_call>{"x" <tool_call>{"name": "add"}</tool_call>', ['<tool_call>{"x"', ("add", "{}")]),
        (MISTRAL_ARGS, f"[TOOL_CALLS]add[ARGS]{{=}} x[TOOL_CALLS]add{ADD}", [("add", "{=} x"), ("add", ADD)]),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, {"b"', [("add", '{"a": 1}'), '{"b"']),
        (QWEN3_CODER, "<tool_call><function=add><parameter=a>1</parameter><parameter=b>2", [("add", '{"a": 1')]),
        (QWEN3_CODER, "<tool_call><function=add>x</tool_call>", [("add", ""), "x"]),
        (LLAMA4_PYTHONIC, "[add(a=1, b=[2", [("add", '{"a": 1')]),
        (GLM45, "<tool_call>add<arg_key>a</arg_key>1</tool_call>ok", [("add", ""), "ok"]),
        (GLM45, f"<tool_call>add<arg_key>a</tool_call>ok{GLM_ADD}", [("add", ""), "ok", ("add", '{"a": 1}')]),
        (GLM45, f"<tool_call>add<arg_key>a</arg_key></tool_call>{GLM_ADD}", [("add", ""), ("add", '{"a": 1}')]),
        (QWEN3_CODER, "<tool_call><function=add><parameter=a>1</function></tool_call>ok", [("add", ""), "ok"]),
        (GEMMA4, '<|tool_call>call:add{a:1,b:<|"|>x', [("add", '{"a": 1')]),
        (GEMMA4, "<|tool_call>call:add{a:[1,{b:2],c:3]}<tool_call|>", [("add", '{"a": "[1,{b:2],c:3]"}')]),
        (GEMMA4, "<|tool_call>call:add{a:1,b}<tool_call|>ok", [("add", '{"a": 1'), "ok"]),
        (LLAMA4_PYTHONIC, "[add(a=1, 2)] ok", [("add", '{"a": 1'), "2)] ok"]),
        (LLAMA4_PYTHONIC, f"[add(a={'[' * 300}{']' * 300})]", [("add", f'{{"a": {"[" * 300}{"]" * 300}}}')]),
        (
            LLAMA4_PYTHONIC,
            f"[add(a={'1+' * 6000}1, b='\\d', c=1if)]",
            [("add", f'{{"a": "{"1+" * 6000}1", "b": "\\\\d", "c": "1if"}}')],
        ),
        (LLAMA4_PYTHONIC, f"[add(a={'-' * 9000}1)]", [("add", f'{{"a": "{"-" * 9000}1"}}')]),
    ],
)
def test_malformed_calls_end_gracefully(form, text, expected):
    assert parse_text(form, text) == expected
    assert parse(form, text) == expected


# -- any text, cut anywhere -------------------------------------------------------------------------------------------

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", '{"name": ', '"add"', '"',
    ', "arguments": ', ', "parameters": ', '{"a": 1}', ADD, ARGUMENTS, "{", "}", "[", "]", ",", ":", ";", "\\", " ",
    "\n", "add", "text", "null", "<", "é🙂", "<function=add>", "<parameter=a>", "</parameter>", "</function>",
    "[add(", "a=", ")", "'",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "add<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "\n```json\n",
    "<arg_key>a</arg_key>", "<arg_value>1</arg_value>", "<minimax:tool_call>", '<invoke name="add">', "</invoke>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.add:0", "<|tool_call_argument_begin|>",
    "<|tool_call>", "call:add{", '<|"|>', "a:", "<tool_call|>",
    "\n```",     "<|python_start|>", '{"name": "add", "arguments": {', '{"name": "x"}',
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@given(st.sampled_from(FORMS), TEXTS, st.lists(st.integers(0, 200), max_size=20))
@example(HERMES, '<tool_call>{"name": "add", "arguments": {"a": "\\"}"}}</tool_call>', list(range(80)))
def test_how_the_text_is_cut_does_not_matter(form, text, places):
    whole = parse_text(form, text)
    assert parse(form, cut(text, places)) == whole
    assert parse(form, text) == whole


@given(st.sampled_from(FORMS), TEXTS)
def test_text_without_a_call_comes_back_as_it_was(form, text):
    found = parse_text(form, text)
    if not any(isinstance(item, tuple) for item in found):
        assert "".join(found) == text


WORDS = [("weather", {"city": "Bonn", "days": [1, 2]}), ("add", {}), ("add", {"a": 1})]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("before", ["", "I will look. "])
def test_a_call_that_is_cut_leaves_no_marks(form, before):
    """At every character: content is the text before the calls, with less than half of the first mark."""
    calls = written(form, WORDS)
    text = before + (calls if form.begin in calls else form.begin + calls)
    for end in range(len(text) + 1):
        is_undecided = end - len(before) < len(form.begin) / 2
        for places in ([], [end // 2, end // 3], list(range(end))):
            found = parse(form, cut(text[:end], places), was_cut=True)
            content = "".join(item for item in found if isinstance(item, str))
            assert content.rstrip() == (text[:end] if is_undecided else before).rstrip()
            names = [item[0] for item in found if isinstance(item, tuple)]
            assert names == [name for name, _ in WORDS[: len(names)]]


@given(st.sampled_from(FORMS), TEXTS, st.lists(st.integers(0, 200), max_size=20))
def test_how_a_text_that_is_cut_arrives_does_not_matter(form, text, places):
    whole = parse(form, [text], was_cut=True)
    assert parse(form, cut(text, places), was_cut=True) == whole
    plain = parse_text(form, text)
    assert whole == plain or whole == plain[:-1] or whole[:-1] == plain[: len(whole) - 1], "only the end differs"


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, "a < b", ["a < b"]),
        (HERMES, "a <", ["a <"]),
        (HERMES, "a <tool", ["a <tool"]),
        (HERMES, "a <tool_c", ["a "]),
        (HERMES, "see </tool_call", ["see </tool_call"]),
        (LLAMA3_JSON, '{"name": "weath', ['{"name": "weath']),
        (LLAMA3_JSON, '{"temperature": 3', ['{"temperature": 3']),
        (LLAMA3_JSON, f'{{"name": "add", "parameters": {ADD}}}; {{"name": "ad', [("add", ADD)]),
        (HERMES, f'<tool_call>{{"name": "add", "arguments": {ADD}}}</tool_call> and then', [("add", ADD), "and then"]),
    ],
)
def test_text_that_is_cut_outside_of_a_call_is_content(form, text, expected):
    assert parse(form, [text], was_cut=True) == expected


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, f'<tool_call>{{"name": "add", "arguments": {ADD}}} ok </tool_call> x', [("add", ADD), "ok  x"]),
        (QWEN3_CODER, "<tool_call><function=add>{}</function></tool_call>", [("add", ""), "{}</function>"]),
        (LLAMA4_PYTHONIC, "<|python_start|>[add(a=1, 2)]<|python_end|>", [("add", '{"a": 1'), "2)]"]),
        (HERMES, "say </tool_call> once", ["say </tool_call> once"]),
    ],
)
def test_marks_behind_a_call_are_no_content(form, text, expected):
    assert parse(form, [text]) == parse(form, text) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=3), VALUES, max_size=2)), min_size=1, max_size=3
)


def is_json(form):
    return form.syntax not in ("xml", "python", "braces")


@given(
    st.sampled_from([form for form in FORMS if is_json(form)]), CALLS, st.booleans(), st.sampled_from([None, 2]),
    st.lists(st.integers(0, 400)),
)  # fmt: skip
def test_calls_survive_the_round_trip(form, calls, ensure_ascii, indent, places):
    def dump(value):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    found = parse(form, cut(written(form, calls, dump), places))
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


NAMED = st.dictionaries(st.sampled_from(["a", "b_2"]), VALUES, max_size=2)
TEXTUAL = st.dictionaries(st.sampled_from(["s", "text-1"]), st.text(max_size=6), max_size=2)
SCHEMA = {"properties": {"s": {"type": "string"}, "text-1": {"type": ["string", "null"]}}}


def has_plain_keys(value):
    """Whether the keys of all objects in a value are words."""
    if isinstance(value, list):
        return all(map(has_plain_keys, value))
    return not isinstance(value, dict) or all(k.isidentifier() and has_plain_keys(v) for k, v in value.items())


@given(
    st.sampled_from([form for form in FORMS if not is_json(form)]),
    st.lists(st.tuples(st.sampled_from(NAMES), NAMED, TEXTUAL), min_size=1, max_size=3),
    st.lists(st.integers(0, 400)),
)
def test_calls_that_are_not_json_become_json(form, calls, places):
    """A text is a string where the schema says so, whatever else it might be."""
    expected = []
    for name, values, texts in calls:
        if form.syntax == "xml":  # which has no marks for a string
            values = {key: value for key, value in values.items() if not isinstance(value, str)}
        if form.syntax == "braces":  # which has none for a key
            values = {key: value for key, value in values.items() if has_plain_keys(value)}
        expected.append((name, values | {key: text for key, text in texts.items() if text != "null"}))
    found = parse(form, cut(written(form, expected), places), schemas=dict.fromkeys(["weather", "add"], SCHEMA))
    assert [(name, json.loads(arguments)) for name, arguments in found] == expected


def test_arguments_arrive_while_they_are_written():
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push('Hm.\n<tool_call>{"name": "add", "arguments": ') == [Content("Hm.")]
    assert parser.push('{"a') == [CallBegin(0, "add"), ArgumentsDelta(0, '{"a')]
    assert parser.push('": 1}') == [ArgumentsDelta(0, '": 1}')]
    assert parser.push("}") == [CallEnd(0)]
    assert parser.push("</tool_call>") == parser.flush() == []


@pytest.mark.parametrize(
    ("form", "piece"),
    [
        (HERMES, "word "), (HERMES, '<tool_call>{"name": "add", "x": "'), (HERMES, '<tool_call>{"a":1,'),
        (HERMES, "<tool_call>["), (QWEN3_CODER, "<tool_call><function=add><parameter=a>"),
        (GEMMA4, '<|tool_call>call:add{a:<|"|>b'), (GEMMA4, "<|tool_call>call:add{a:[1,"),
        (GLM45, "<tool_call>add<arg_key>a"), (MINIMAX_M2, '<minimax:tool_call><invoke name="add">'),
        (LLAMA4_PYTHONIC, "[add(a=[1,"), (DEEPSEEK_V31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add"),
    ],
)  # fmt: skip
def test_a_long_text_costs_the_same_per_character(form, piece):
    """Eight times the text takes well under sixty-four times the time."""

    def seconds(count):
        parser = ToolCallParser(form, NAMES)
        start = time.thread_time()
        for _ in range(count):
            parser.push(piece)
        parser.flush()
        return time.thread_time() - start

    seconds(100)
    # once: the garbage collector, or another process, may take time beside one of the two
    assert any(seconds(8000) < 24 * max(seconds(1000), 0.002) for _ in range(10))


def test_ids_that_a_model_writes():
    parser = ToolCallParser(KIMI_K2, NAMES)
    events = parser.push(written(KIMI_K2, [("add", {"a": 1})]).replace("add:0", "add:17 ")) + parser.flush()
    assert events == [CallBegin(0, "add", "functions.add:17"), ArgumentsDelta(0, '{"a": 1}'), CallEnd(0)]


def test_ids_of_calls():
    assert HERMES.new_call_id() != HERMES.new_call_id()
    assert MISTRAL.new_call_id().isalnum() and len(MISTRAL_ARGS.new_call_id()) == 9
