"""Generated requests, valid and not: every one gets an answer that is no error of the server."""

from __future__ import annotations

from typing import Any

import pytest
from api_kit import NAME, LiveServer, parse_events
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import TIME, WEATHER

EXAMPLES = 2000
"""The examples of all interfaces together, in the long test."""

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.integers(),
    st.floats(-3, 3),
    st.floats(allow_nan=False),
    st.text(max_size=6),
    st.sampled_from(["auto", "text", "function", "user", "json_object", "\u2028", "\x00"]),
)
keys = st.one_of(
    st.text(max_size=4), st.sampled_from(["type", "role", "content", "text", "name", "function", "schema", "self"])
)
junk = st.recursive(
    scalars,
    lambda values: st.one_of(st.lists(values, max_size=3), st.dictionaries(keys, values, max_size=3)),
    max_leaves=6,
)

schemas = st.sampled_from(
    [{"type": "object"}, {"enum": [1, "a"]}, {"type": "objekt"}, {"$ref": "#/x"}, {"pattern": "("}, {}, True]
)
sampling = {
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(-0.1, 1.1),
    "top_k": st.integers(-2, 50),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0, 2),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "seed": st.integers(-(2**63), 2**64),
    "logit_bias": st.dictionaries(st.integers(-1, 2100).map(str), st.floats(-101, 101), max_size=2),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(-1, 9),
    "priority": st.integers(-5, 5),
    "cache_salt": st.text(max_size=4),
}
structure = {
    "response_format": st.one_of(
        st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object", "xml"])}),
        schemas.map(lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["regex", "choice", "grammar", "json", "json_object"]), junk, min_size=1, max_size=2
    ),
    "guided_regex": st.sampled_from(["a+", "(", "[ab]{3}"]),
    "guided_choice": st.lists(st.text(max_size=3), max_size=3),
}
texts = st.text("ab é𝄞\n", max_size=12)
counts = st.integers(0, 6)
parts = st.lists(st.one_of(texts.map(lambda text: {"type": "text", "text": text}), junk), max_size=2)
contents = st.one_of(texts, parts)
calls = st.lists(
    st.one_of(texts, st.just('{"a": 1}')).map(
        lambda a: {"id": "c1", "type": "function", "function": {"name": "time", "arguments": a}}
    ),
    max_size=2,
)
messages = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": contents},
            optional={"name": texts, "tool_calls": calls, "tool_call_id": st.just("c1"), "reasoning_content": texts},
        ),
        junk,
    ),
    min_size=1,
    max_size=4,
)
streaming = {
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
}
choices = st.one_of(
    st.sampled_from(["none", "auto", "required", "any"]),
    st.just({"type": "function", "function": {"name": "weather"}}),
    st.just({"type": "function", "name": "weather"}),
    st.just({"type": "any"}),
    st.just({"type": "tool", "name": "weather"}),
    junk,
)
strict_tools = st.one_of(junk, schemas).map(
    lambda schema: [{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}]
)
flat_tools = [{"type": "function", **WEATHER["function"]}, {"type": "web_search"}]
blocks = st.lists(
    st.one_of(
        texts.map(lambda text: {"type": "text", "text": text}),
        texts.map(lambda text: {"type": "thinking", "thinking": text}),
        st.just({"type": "tool_use", "id": "t", "name": "time", "input": {}}),
        texts.map(lambda text: {"type": "tool_result", "tool_use_id": "t", "content": text}),
        junk,
    ),
    max_size=3,
)
items = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "developer"]), "content": contents}),
        st.just({"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"}),
        texts.map(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}),
        st.just({"type": "reasoning", "id": "r", "summary": []}),
        junk,
    ),
    max_size=4,
)

INTERFACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/completions": (
        {
            "prompt": st.one_of(
                texts,
                st.lists(texts, max_size=3),
                st.lists(st.integers(-1, 2100), max_size=4),
                st.lists(st.lists(st.integers(1, 2047), max_size=3), max_size=3),
            ),
            "max_tokens": counts,
        },
        {
            **sampling,
            **structure,
            **streaming,
            "n": st.integers(0, 3),
            "best_of": st.integers(0, 4),
            "echo": st.booleans(),
            "logprobs": st.integers(-1, 21),
            "stop": st.one_of(texts, st.lists(texts, max_size=3)),
            "suffix": texts,
            "model": st.sampled_from([NAME, "other"]),
            "add_special_tokens": st.booleans(),
        },
    ),
    "/v1/chat/completions": (
        {"messages": messages, "max_tokens": counts},
        {
            **sampling,
            **structure,
            **streaming,
            "n": st.integers(0, 3),
            "logprobs": st.booleans(),
            "top_logprobs": st.integers(-1, 21),
            "max_completion_tokens": counts,
            "tool_choice": choices,
            "stop": st.one_of(texts, st.lists(texts, max_size=3)),
            "parallel_tool_calls": st.booleans(),
            "tools": st.one_of(st.just([WEATHER, TIME]), st.just([]), st.lists(junk, max_size=2), strict_tools),
            "chat_template_kwargs": st.dictionaries(keys, junk, max_size=2),
            "continue_final_message": st.booleans(),
            "separate_reasoning": st.booleans(),
            "reasoning_effort": texts,
        },
    ),
    "/v1/responses": (
        {"input": st.one_of(texts, items), "max_output_tokens": counts},
        {
            **sampling,
            "stream": st.booleans(),
            "instructions": texts,
            "tools": st.one_of(st.just(flat_tools), junk),
            "tool_choice": choices,
            "top_logprobs": st.integers(-1, 21),
            "metadata": st.dictionaries(texts, texts),
            "text": st.one_of(
                junk, schemas.map(lambda s: {"format": {"type": "json_schema", "name": "x", "schema": s}})
            ),
            "include": st.lists(st.sampled_from(["message.output_text.logprobs", "x"]), max_size=2),
            "previous_response_id": texts,
            "reasoning": junk,
            "background": st.booleans(),
        },
    ),
    "/v1/messages": (
        {
            "messages": st.lists(
                st.fixed_dictionaries(
                    {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.one_of(texts, blocks)}
                ),
                max_size=4,
            ),
            "max_tokens": counts,
        },
        {
            **sampling,
            "stream": st.booleans(),
            "system": st.one_of(texts, blocks),
            "tool_choice": choices,
            "stop_sequences": st.lists(texts, max_size=2),
            "thinking": st.just({"type": "enabled"}),
            "tools": st.one_of(st.just([{"name": "weather", "input_schema": {"type": "object"}}]), junk),
            "output_config": st.one_of(junk, schemas.map(lambda s: {"format": {"type": "json_schema", "schema": s}})),
        },
    ),
    "/tokenize": ({"prompt": texts}, {"messages": messages, "return_token_strs": st.booleans(), "tools": junk}),
    "/detokenize": ({"tokens": st.lists(st.integers(-1, 2**33), max_size=4)}, {"model": texts}),
    "/v1/fill_blank": ({"text": texts}, {**sampling, "max_tokens": counts}),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    """A path and a body: mostly of the right form, some with a field that is junk or missing, some all junk."""
    path = draw(st.sampled_from(sorted(INTERFACES)))
    required, optional = INTERFACES[path]
    body = draw(st.fixed_dictionaries(required))
    for name in draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)):
        body[name] = draw(optional[name])
    fault = draw(st.sampled_from(["none", "none", "junk field", "missing", "new field", "junk"]))
    if fault == "junk field":
        body[draw(st.sampled_from(sorted(body)))] = draw(junk)
    elif fault == "missing":
        del body[draw(st.sampled_from(sorted(body)))]
    elif fault == "new field":
        body[draw(st.text(max_size=5))] = draw(junk)
    return path, draw(junk) if fault == "junk" else body


def check(server: LiveServer, path: str, body: Any) -> int:
    response = server.post(path, body)
    assert response.status_code in (200, 400, 404), response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("\n\n")
        for event in parse_events(response.text):
            assert event == "[DONE]" or "error" not in event or event["error"] is None
    else:
        value = response.json()
        assert (
            isinstance(value, dict) and ("error" in value) == (response.status_code != 200)
        ) or path == "/v1/responses"
        if response.status_code != 200:
            assert value["error"]["message"] and value["error"]["type"]
    return response.status_code


@given(request=requests())
@settings(max_examples=60)
def test_no_request_is_an_error_of_the_server(fake: LiveServer, request: tuple[str, Any]):
    check(fake, *request)


@pytest.mark.slow
def test_two_thousand_requests(fake: LiveServer):
    statuses: list[int] = []

    @given(request=requests())
    @settings(max_examples=EXAMPLES)
    def run(request: tuple[str, Any]) -> None:
        statuses.append(check(fake, *request))

    run()
    assert len(statuses) >= EXAMPLES and statuses.count(200) > EXAMPLES / 10 and statuses.count(400) > EXAMPLES / 4


@given(body=st.one_of(st.binary(max_size=30), st.text('{}[]",:0a\\u', max_size=30).map(str.encode)))
def test_bodies_that_are_no_json(fake: LiveServer, body: bytes):
    for path in ("/v1/chat/completions", "/v1/messages"):
        response = fake.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400 and response.json()["error"]["message"]
