"""``/v1/chat/completions``: content, reasoning, calls of functions and structure, whole and in pieces."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any

import api_kit
import httpx
import pytest
from api_kit import NAME, LiveServer
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.server.settings import ServerSettings
from bminf_lite.text.prompts import PromptEncoder

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn", "days": 2}}\n</tool_call>'


def allowing(mode: str, *names: str) -> dict[str, Any]:
    """A tool choice of some tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def joined(events: list[Any]) -> list[dict[str, Any]]:
    """The choices that the chunks of a stream make. Checks the form of a stream."""
    assert events[-1] == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        assert event["object"] == "chat.completion.chunk" and event["id"] == events[0]["id"]
        for chunk in event["choices"]:
            delta, index = chunk["delta"], chunk["index"]
            if index not in choices:
                assert delta == {"role": "assistant", "content": ""}
                message = {"role": "assistant", "content": "", "refusal": None}
                choices[index] = {"index": index, "message": message, "logprobs": None}
                continue
            choice = choices[index]
            message = choice["message"]
            assert "role" not in delta and "finish_reason" not in choice
            message["content"] += delta.get("content", "")
            if "reasoning_content" in delta:
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for part in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    assert part["id"] and part["type"] == "function"
                    calls.append({"type": "function", "function": dict(part["function"])})
                else:
                    assert part.keys() == {"index", "function"} and part["index"] == len(calls) - 1
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
            if chunk["logprobs"] is not None:
                scores = choice["logprobs"] or {"content": [], "refusal": None}
                choice["logprobs"] = scores
                scores["content"] += chunk["logprobs"]["content"]
            if chunk["finish_reason"] is not None:
                assert delta == {}
                choice |= {name: chunk[name] for name in ("finish_reason", "stop_reason")}
    for choice in choices.values():
        if choice["message"].get("tool_calls"):
            choice["message"]["content"] = choice["message"]["content"] or None
    return [choices[index] for index in sorted(choices)]


def without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choices without the ids of calls, which are random."""
    for choice in choices:
        for call in choice["message"].get("tool_calls", ()):
            call.pop("id", None)
    return choices


def both(server: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    """The choice that a request gets, which must be the same with and without a stream."""
    whole = server.json(PATH, body)
    assert joined(server.events(PATH, body)) == without_ids(whole["choices"])
    return whole["choices"][0]


options = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.just("user"), "content": st.text("ab é", min_size=1, max_size=8)}),
            min_size=1,
            max_size=3,
        ),
        "max_tokens": st.integers(1, 12),
    },
    optional={
        "n": st.integers(1, 3),
        "logprobs": st.just(True),
        "stop": st.lists(st.sampled_from(["e", "B", "@A", "x"]), max_size=2),
        "stream_options": st.just({"include_usage": True}),
        "tools": st.just([WEATHER]),
    },
)


@given(body=options)
def test_a_stream_is_the_response_in_pieces(fake: LiveServer, body: dict[str, Any]):
    whole = fake.json(PATH, {k: v for k, v in body.items() if k != "stream_options"})
    events = fake.events(PATH, body)
    assert joined(events) == whole["choices"] and events[0]["model"] == NAME
    if "stream_options" in body:
        assert events[-2]["choices"] == [] and events[-2]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        if choice["logprobs"] is not None and "tools" not in body:
            scores = choice["logprobs"]["content"]
            assert "".join(score["token"] for score in scores) == choice["message"]["content"]
            assert b"".join(bytes(score["bytes"]) for score in scores).decode() == choice["message"]["content"]


def test_the_usage_so_far(fake: LiveServer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HI, "n": 2, "max_tokens": 6} | {"stream_options": options}
    events = fake.events(PATH, body)
    generated = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert generated == sorted(generated) and generated[-2:] == [6 * len(joined(events))] * 2
    assert {event["usage"]["prompt_tokens"] for event in events[:-1]} == {events[-2]["usage"]["prompt_tokens"]}


def test_an_answer(scripted: LiveServer):
    ids = scripted.says("Return the list.")
    whole = scripted.json(PATH, {"messages": HI, "logprobs": True, "top_logprobs": 2})
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Return the list.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == len(ids) and whole["usage"]["completion_tokens"] == len(ids) + 1
    assert all(len(score["top_logprobs"]) == 2 for score in choice["logprobs"]["content"])
    assert both(scripted, {"messages": HI, "max_completion_tokens": 2})["finish_reason"] == "length"


def test_the_prompt_is_the_chat_template_s(scripted: LiveServer):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
        {"role": "assistant", "content": "x"},
        *HI,
    ]
    used = scripted.json(PATH, {"messages": messages})["usage"]["prompt_tokens"]
    expected = "<system>Be brief.\n<user>One\nTwo\n<assistant>x\n<user>Hi\n<assistant>"
    assert used == len(api_kit.TOKENIZER.encode(expected, add_special_tokens=False))
    assert used == scripted.json("/tokenize", {"messages": messages})["count"]


def test_continuing_the_last_message(scripted: LiveServer):
    scripted.says(" list")
    body = {"messages": [*HI, {"role": "assistant", "content": "Return the"}], "continue_final_message": True}
    whole = scripted.json(PATH, body)
    expected = "<user>Hi\n<assistant>Return the"
    assert whole["usage"]["prompt_tokens"] == len(api_kit.TOKENIZER.encode(expected, add_special_tokens=False))
    assert whole["choices"][0]["message"]["content"] == " list"


@pytest.mark.parametrize("content", ["<", "user", "Hi", ">Hi\n<", "I ", "I\n\n"])
def test_an_answer_that_has_begun_is_continued_with_its_white_space(scripted: LiveServer, content: str):
    """Also if its text stands elsewhere in the prompt, in the template's own marks for example."""
    scripted.says("go on")
    messages = [*HI, {"role": "assistant", "content": content}]
    expected = len(api_kit.TOKENIZER.encode(f"<user>Hi\n<assistant>{content}", add_special_tokens=False))
    whole = scripted.json(PATH, {"messages": messages, "continue_final_message": True})
    assert whole["usage"]["prompt_tokens"] == expected
    usage = scripted.json("/v1/messages", {"messages": messages, "max_tokens": 4})["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected


def test_a_message_with_calls_is_not_continued(scripted: LiveServer):
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    response = scripted.post(PATH, {"messages": messages, "continue_final_message": True})
    assert response.status_code == 400 and "cannot be continued" in response.json()["error"]["message"]


# -- tools ------------------------------------------------------------------------------------------------------------


def test_a_call(scripted: LiveServer):
    scripted.says(f"I look.\n{CALL}")
    choice = both(scripted, {"messages": HI, "tools": [WEATHER], "max_tokens": 200})
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"place": "Bonn", "days": 2}'}
    raw = scripted.json(PATH, {"messages": HI, "tools": [WEATHER], "max_tokens": 200})["choices"][0]["message"]
    assert raw["tool_calls"][0]["id"].startswith("call_")


@pytest.mark.parametrize(
    ("marks", "text"),
    [
        (
            "<tool_call> <function=",
            "I look.\n<tool_call>\n<function=weather>\n<parameter=place>\n2\n</parameter>\n<parameter=days>\n2\n"
            "</parameter>\n</function>\n</tool_call>",
        ),
        ("[func_name1(", 'I look.<|python_start|>[weather(place="2", days=2)]'),
        (
            "<｜tool▁calls▁begin｜>",
            'I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"place": "2", "days": 2}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
    ],
    ids=["qwen3_coder", "llama4_pythonic", "deepseek_v31"],
)
def test_calls_in_other_forms(tmp_path: Path, marks: str, text: str):
    """A value that is no JSON is a string if the function's schema says so."""
    folder = api_kit.folder_with_template(tmp_path / "model", api_kit.CHAT_TEMPLATE + f"{{# tools {marks} #}}")
    server = api_kit.scripted_server(folder, text)
    try:
        choice = both(server, {"messages": HI, "tools": [WEATHER], "max_tokens": 400})
    finally:
        server.close()
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"place": "2", "days": 2}'}
    assert choice["message"]["content"] == "I look." and choice["finish_reason"] == "tool_calls"


def test_several_calls_or_one(scripted: LiveServer):
    other = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    scripted.says(f"{CALL}\n{other}")
    body = {"messages": HI, "tools": [WEATHER, TIME], "max_tokens": 200}
    calls = both(scripted, body)["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "time"]
    choice = both(scripted, body | {"parallel_tool_calls": False})
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None


def test_no_calls_where_none_are_wanted(scripted: LiveServer):
    scripted.says(CALL)
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = both(scripted, {"messages": HI, "max_tokens": 200} | body)
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_off(scripted: LiveServer):
    ids = scripted.says(CALL)
    choice = both(scripted, {"messages": HI, "tools": [WEATHER], "max_tokens": len(ids) - 12})
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_calls_and_results_of_earlier_turns_are_in_the_prompt(scripted: LiveServer):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Bonn"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
    ]
    without = scripted.json("/tokenize", {"messages": HI, "tools": [WEATHER]})
    with_calls = scripted.json("/tokenize", {"messages": messages, "tools": [WEATHER]})
    text = scripted.json("/detokenize", {"tokens": with_calls["tokens"]})["prompt"]
    assert with_calls["count"] > without["count"] and "Rain." in text and '"place": "Bonn"' in text
    assert (
        scripted.json(PATH, {"messages": messages, "tools": [WEATHER]})["usage"]["prompt_tokens"] == with_calls["count"]
    )


# -- reasoning --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory):
    """A server of a model whose template knows reasoning, and opens it if ``enable_thinking``."""
    template = api_kit.CHAT_TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"
    server = api_kit.scripted_server(api_kit.folder_with_template(tmp_path_factory.mktemp("think") / "model", template))
    yield server
    server.close()


def test_reasoning_is_separate(thinker: LiveServer):
    thinker.says("<think>\nIt is two.\n</think>\n\nTwo.")
    body = {"messages": HI, "max_tokens": 100}
    message = both(thinker, body)["message"]
    assert (message["content"], message["reasoning_content"]) == ("Two.", "It is two.")
    assert "reasoning_content" not in both(thinker, body | {"include_reasoning": False})["message"]
    whole = both(thinker, body | {"separate_reasoning": False})["message"]
    assert whole["content"] == "<think>\nIt is two.\n</think>\n\nTwo." and "reasoning_content" not in whole


def test_reasoning_that_the_prompt_opens(thinker: LiveServer):
    thinker.says("It is two.\n</think>\n\nTwo.")
    body = {"messages": HI, "max_tokens": 100, "chat_template_kwargs": {"enable_thinking": True}}
    message = both(thinker, body)["message"]
    assert (message["content"], message["reasoning_content"]) == ("Two.", "It is two.")
    thinker.says(f"Ask.\n</think>\n\n{CALL}")
    choice = both(thinker, body | {"tools": [WEATHER], "max_tokens": 200})
    assert choice["message"]["reasoning_content"] == "Ask." and choice["finish_reason"] == "tool_calls"


def test_an_effort_turns_reasoning_on_or_off(thinker: LiveServer):
    """As in vLLM. What ``chat_template_kwargs`` say goes before."""
    thinker.says("Two.")
    off, on = (
        thinker.json("/v1/chat/completions", {"messages": HI, "chat_template_kwargs": {"enable_thinking": value}})
        for value in (False, True)
    )
    assert off["usage"]["prompt_tokens"] < on["usage"]["prompt_tokens"]
    for fields, expected in (
        ({"reasoning_effort": "none"}, off),
        ({"reasoning_effort": "low"}, on),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, off),
    ):
        usage = thinker.json("/v1/chat/completions", {"messages": HI} | fields)["usage"]
        assert usage["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    for effort, expected in (("none", off), ("medium", on)):
        usage = thinker.json("/v1/responses", {"input": "Hi", "reasoning": {"effort": effort}})["usage"]
        assert usage["input_tokens"] == expected["usage"]["prompt_tokens"]


# -- structure, with the bundled model --------------------------------------------------------------------------------

LONG = {"messages": HI, "max_tokens": 500, "temperature": 0.7, "seed": 3}


def test_a_json_schema(demo: LiveServer):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["list", "dict"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    choice = demo.json(PATH, LONG | {"response_format": form})["choices"][0]
    value = json.loads(choice["message"]["content"])
    assert value.keys() == {"name", "count"} and value["name"] in ("list", "dict") and value["count"] in range(10)
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("structure", "texts"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "[ab]{2}"}}, {"aa", "ab", "ba", "bb"}),
        ({"guided_regex": "x|y"}, {"x", "y"}),
        ({"guided_choice": ["one"]}, {"one"}),
        ({"structured_outputs": {"grammar": 'start: "a" "b"?'}}, {"a", "ab"}),
        ({"structured_outputs": {"json": {"const": 5}}}, {"5"}),
        ({"guided_json": '{"const": "q"}'}, {'"q"'}),
    ],
)
def test_structures(demo: LiveServer, structure: dict[str, Any], texts: set[str]):
    assert demo.json(PATH, LONG | structure)["choices"][0]["message"]["content"] in texts
    whole = demo.json("/v1/completions", {"prompt": "a", "max_tokens": 50, **structure})
    assert whole["choices"][0]["text"] in texts


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be(demo: LiveServer, choice: Any):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    strict["function"]["parameters"] = strict["function"]["parameters"] | {
        "properties": {"place": {"enum": ["Bonn", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}}
    }
    body = LONG | {"tools": [strict], "tool_choice": choice, "parallel_tool_calls": False}
    answer = demo.json(PATH, body)["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "weather" and arguments["place"] in ("Bonn", "Rome")
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("bias", [-100, 100])
def test_a_call_or_a_structure(demo: LiveServer, bias: float):
    """With tools and a schema an answer is one of the two."""
    begin = api_kit.TOKENIZER.encode("<tool_call>", add_special_tokens=False)[0]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["one", "two"]}}}
    body = LONG | {"tools": [TIME], "response_format": form, "logit_bias": {str(begin): bias}}
    message = demo.json(PATH, body | {"parallel_tool_calls": False})["choices"][0]["message"]
    if bias > 0:
        assert message["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}
    else:
        assert json.loads(message["content"]) in ("one", "two") and "tool_calls" not in message


@pytest.mark.parametrize(
    "more",
    [
        {"stream_options": {"include_usage": True}},
        {"logprobs": False, "top_logprobs": 0},
        {"messages": [*HI, {"role": "assistant"}, *HI]},
        {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool"}]},
    ],
)
def test_what_clients_send_without_need(fake: LiveServer, more: dict[str, Any]):
    assert fake.json(PATH, {"messages": HI, "max_tokens": 2} | more)["usage"]["completion_tokens"] == 2


def test_another_method(fake: LiveServer):
    response = fake.http.get(PATH)
    assert response.status_code == 405 and f"{PATH} takes POST, not GET" in response.json()["error"]["message"]


def test_a_byte_order_mark(fake: LiveServer):
    """PowerShell writes one at the start of a file."""
    body = b"\xef\xbb\xbf" + json.dumps({"messages": HI, "max_tokens": 2}).encode()
    assert fake.http.post(PATH, content=body, headers={"content-type": "application/json"}).status_code == 200


def test_tools_that_are_not_allowed(fake: LiveServer):
    """The model is not told of them."""
    body = {"messages": HI, "max_tokens": 2}

    def prompt_tokens(more: dict[str, Any]) -> int:
        return fake.json(PATH, body | more)["usage"]["prompt_tokens"]

    both = {"tools": [WEATHER, TIME]}
    assert prompt_tokens(both | {"tool_choice": allowing("auto", "time")}) == prompt_tokens({"tools": [TIME]})
    assert prompt_tokens(both | {"tool_choice": allowing("auto", "time", "weather")}) == prompt_tokens(both)
    assert prompt_tokens(both | {"tool_choice": allowing("auto")}) == prompt_tokens({})
    time = {"type": "function", "name": "time"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [time, {"type": "mcp", "server_label": "x"}]}
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
    response = fake.json("/v1/responses", {"input": "Hi", "tools": tools, "tool_choice": choice})
    assert response["usage"]["input_tokens"] == prompt_tokens({"tools": [TIME]})


def test_required_tools_that_are_allowed(demo: LiveServer):
    body = LONG | {"tools": [WEATHER, TIME], "tool_choice": allowing("required", "time"), "parallel_tool_calls": False}
    (call,) = demo.json(PATH, body)["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "time", "arguments": "{}"}


def test_a_template_that_refuses_messages_of_a_role_in_turn(tmp_path: Path):
    """Codex and Claude Code send several system messages, at other places than the first too, and several questions."""
    wrong = "not loop.first and m.role in ('system', loop.previtem.role)"
    refusal = f"{{% if {wrong} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    template = api_kit.CHAT_TEMPLATE.replace("<{{ m.role }}>", refusal + "<{{ m.role }}>")
    server = api_kit.fake_server(api_kit.folder_with_template(tmp_path, template))
    try:
        several = [
            {"role": "system", "content": "A"}, {"role": "developer", "content": [{"type": "text", "text": "B"}]}, *HI,
            {"role": "system", "content": "C"},
        ]  # fmt: skip
        one = [{"role": "system", "content": "A\n\nB\n\nC"}, {"role": "user", "content": "Hi\n\nHi"}]
        for later in ([], [{"role": "assistant", "content": "b"}, *HI, *HI]):
            tokens = server.json("/tokenize", {"messages": [*several, *HI, *later]})["tokens"]
            merged = [*one, *later[:1], *one[1:]] if later else one
            assert tokens == server.json("/tokenize", {"messages": merged})["tokens"]
        response = server.post("/tokenize", {"messages": [*one, *[{"role": "assistant", "content": "a"}] * 2]})
        assert response.status_code == 400 and "refuses these messages: no" in response.text
    finally:
        server.close()


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "needs a content"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "'king'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
            "messages[0].content[0]",
            "'image_url' is not supported",
        ),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "programs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "programs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "self"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters"),
        ({"tools": [TIME, TIME]}, "tools", "twice"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TIME], "tool_choice": "some"}, "tool_choice", "'required'"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "the tools are time",
        ),
        ({"tools": [TIME], "tool_choice": allowing("auto", "x")}, "tool_choice", "allows 'x'"),
        ({"functions": [{}]}, "functions", "use tools"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "1 to"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            "response_format.json_schema.schema",
            "objekt",
        ),
        ({"continue_final_message": True}, "continue_final_message", "assistant"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages", "context"),
    ],
)
def test_a_wrong_value_is_named(fake: LiveServer, wrong: dict[str, Any], param: str, words: str):
    response = fake.post(PATH, {"messages": HI} | wrong)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param and words in error["message"], error


def test_a_model_without_a_chat_template():
    server = api_kit.fake_server()
    try:
        response = server.post(PATH, {"messages": HI})
        assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]
    finally:
        server.close()


def test_an_error_within_a_stream_is_an_event(chat_folder):
    server = api_kit.scripted_server(chat_folder, "word " * 200)

    def events_of(path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a request that fails when its stream has begun."""
        server.engine.may_fail.clear()
        with server.http.stream("POST", path, json=body | {"stream": True}) as response:
            pieces = response.iter_text()
            text = next(pieces)
            server.engine.may_fail.set()
            return list(api_kit.parse_events(text + "".join(pieces)))

    try:
        server.engine.fail_at = 5
        for path, body in ((PATH, {"messages": HI}), ("/v1/completions", {"prompt": "a", "max_tokens": 50})):
            events = events_of(path, body)
            assert "NaN" in events[-1]["error"]["message"] and events[-1]["error"]["code"]
            assert events[0]["choices"]
            response = server.post(path, body)
            assert response.status_code == 500 and "NaN" in response.json()["error"]["message"]
        events = events_of("/v1/responses", {"input": "a"})
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        events = events_of("/v1/messages", {"messages": HI, "max_tokens": 50})
        assert events[-1]["type"] == "error" and "NaN" in events[-1]["error"]["message"]
    finally:
        server.close()


def test_the_log_tells_of_clients_that_have_gone(chat_folder: Path, tmp_path: Path):
    """Within a request, and before an answer."""
    log = tmp_path / "log"
    engine = api_kit.UnconstrainedEngine(range(1, api_kit.VOCAB_SIZE), seconds_per_step=0.005)
    server = LiveServer(engine, api_kit.info_of(chat_folder), ServerSettings((NAME,), request_log=str(log)))
    until = time.monotonic() + 60
    sent = 0
    try:
        for path in (PATH, "/v1/completions", "/v1/responses", "/v1/messages"):
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            prompt = "a" if path == "/v1/completions" else None
            body = json.dumps({"messages": HI, "prompt": prompt, "input": "a", limit: 900})
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            request = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()
            for is_whole in (False, True):
                while engine.stats().running:  # what the last client left
                    assert time.monotonic() < until
                    time.sleep(0.002)
                with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
                    connection.sendall(request if is_whole else request[:-1])
                    while is_whole and not engine.stats().running:
                        assert time.monotonic() < until
                        time.sleep(0.002)
                sent += 1
                while log.read_text().count("\n") < sent:
                    assert time.monotonic() < until
                    time.sleep(0.002)
    finally:
        server.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines] == [499] * sent
    assert [line["finish_reasons"] for line in lines] == [{}, {"cancelled": 1}] * (sent // 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(chat_folder, stream: bool):
    server = api_kit.fake_server(chat_folder, seconds_per_step=0.1)  # no request ends by itself within a minute

    def num_requests() -> int:
        stats = server.engine.stats()
        return stats.running + stats.waiting

    try:
        for path, body in (
            (PATH, {"messages": HI}),
            ("/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 900}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", {"messages": HI, "max_tokens": 900}),
        ):
            with contextlib.suppress(httpx.ReadTimeout):
                timeout = httpx.Timeout(300, read=300 if stream else 0.05)
                with server.http.stream("POST", path, json=body | {"stream": stream}, timeout=timeout) as response:
                    next(response.iter_bytes())
                    assert num_requests() > 0
            until = time.monotonic() + 60
            while num_requests() and time.monotonic() < until:
                time.sleep(0.005)
            assert num_requests() == 0
    finally:
        server.close()


def test_a_template_that_reads_parts_gets_them(tmp_path: Path):
    """The same prompt as the library's."""
    template = "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{{ c.text }}|{% endfor %}{% endfor %}"
    folder = api_kit.folder_with_template(tmp_path / "model", template)
    library = PromptEncoder(folder, api_kit.info_of(folder))
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    with contextlib.closing(api_kit.scripted_server(folder, "x")) as server:
        for content, text in ((parts, "<user>One|Two|"), ("One", "<user>One|")):
            messages = [{"role": "user", "content": content}]
            tokens = api_kit.TOKENIZER.encode(text, add_special_tokens=False)
            assert list(library.encode(messages).token_ids) == tokens
            assert server.json("/tokenize", {"messages": messages})["tokens"] == tokens
            assert server.json(PATH, {"messages": messages})["usage"]["prompt_tokens"] == len(tokens)


def test_a_call_that_max_tokens_cuts_leaves_no_marks(scripted: LiveServer):
    """Whole and streamed, cut behind every third token."""
    number = len(scripted.says(f"I look. {CALL}"))
    for cut in range(3, number - 1, 3):
        choice = both(scripted, {"messages": HI, "tools": [WEATHER], "max_tokens": cut})
        content = choice["message"]["content"] or ""
        assert choice["finish_reason"] == "length"
        assert "tool_" not in content and "{" not in content and "I look. <tool_call>".startswith(content)
