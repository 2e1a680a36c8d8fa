"""``/v1/messages``: Anthropic's blocks and events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import api_kit
import pytest
from api_kit import NAME, LiveServer, UnconstrainedEngine, info_of
from test_chat import CALL, HI, WEATHER

from bminf_lite.server.security import Security, digests
from bminf_lite.server.settings import ServerSettings

PATH = "/v1/messages"
TOOL = {"name": "weather", "description": "The weather.", "input_schema": WEATHER["function"]["parameters"]}


def both(server: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    """The message that a request gets, which must be the same with and without a stream."""
    body = {"model": "claude-x", "messages": HI, "max_tokens": 300} | body
    whole = server.json(PATH, body)
    assert plain(joined(server.events(PATH, body))) == plain(whole)
    return whole


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message without ids."""
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": 0, "content": content}


def joined(events: list[Any]) -> dict[str, Any]:
    """The message that a stream makes. Checks the order of its events."""
    assert [e["type"] for e in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    message, pieces = events[0]["message"], ""
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            pieces = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            (kind, text) = event["delta"].values()
            assert kind == {"text": "text_delta", "tool_use": "input_json_delta", "thinking": "thinking_delta"}[
                message["content"][-1]["type"]
            ] or (kind, text) == ("signature_delta", "")
            pieces += text
        else:
            assert event == {"type": "content_block_stop", "index": len(message["content"]) - 1}
            block = message["content"][-1]
            block |= {"input": json.loads(pieces)} if block["type"] == "tool_use" else {block["type"]: pieces}
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def test_an_answer(scripted: LiveServer):
    ids = scripted.says("Return the list.")
    message = both(scripted, {"system": [{"type": "text", "text": "Be brief."}]})
    assert message["content"] == [{"type": "text", "text": "Return the list."}]
    assert (message["stop_reason"], message["stop_sequence"], message["model"]) == ("end_turn", None, "claude-x")
    expected = "<system>Be brief.\n<user>Hi\n<assistant>"
    assert message["usage"]["input_tokens"] == len(api_kit.TOKENIZER.encode(expected, add_special_tokens=False))
    assert message["usage"]["output_tokens"] == len(ids) + 1
    assert both(scripted, {"max_tokens": 2})["stop_reason"] == "max_tokens"
    message = both(scripted, {"stop_sequences": ["xyz", "list"]})
    assert message["content"][0]["text"] == "Return the " and message["stop_sequence"] == "list"
    assert message["stop_reason"] == "stop_sequence"


def test_calls(scripted: LiveServer):
    scripted.says(f"I look.\n{CALL}\n{CALL}")
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    message = both(scripted, {"tools": tools})
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "tool_use"]
    assert message["content"][1]["input"] == {"place": "Bonn", "days": 2} and message["stop_reason"] == "tool_use"
    one = both(scripted, {"tools": tools, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
    assert [block["type"] for block in one["content"]] == ["text", "tool_use"]
    none = both(scripted, {"tools": tools, "tool_choice": {"type": "none"}})
    assert [block["type"] for block in none["content"]] == ["text"] and none["stop_reason"] == "end_turn"


def test_arguments_that_are_not_json(scripted: LiveServer):
    scripted.says('<tool_call>\n{"name": "weather", "arguments": {"place": "Bo')
    body = {"messages": HI, "max_tokens": 300, "tools": [TOOL]}
    (block,) = scripted.json(PATH, body)["content"]
    assert block["input"] == {"not_json": '{"place": "Bo'}


def test_thinking(tmp_path_factory: pytest.TempPathFactory):
    template = api_kit.CHAT_TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"
    folder = api_kit.folder_with_template(tmp_path_factory.mktemp("think") / "model", template)
    server = api_kit.scripted_server(folder, "It is two.\n</think>\n\nTwo.")
    try:
        message = both(server, {"thinking": {"type": "enabled", "budget_tokens": 1024}})
        assert message["content"] == [
            {"type": "thinking", "thinking": "It is two.", "signature": ""},
            {"type": "text", "text": "Two."},
        ]
        server.says("Two.")
        assert both(server, {})["content"] == [{"type": "text", "text": "Two."}]
    finally:
        server.close()


def test_a_conversation(scripted: LiveServer):
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Bonn"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain."}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"place":"Bonn"}'}}
    expected = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "Rain."},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "weather", "description": "The weather.", "parameters": TOOL["input_schema"]}
    count = scripted.json("/tokenize", {"messages": expected, "tools": [{"type": "function", "function": function}]})
    body = {"messages": messages, "tools": [TOOL]}
    assert scripted.json(f"{PATH}/count_tokens", body) == {"input_tokens": count["count"]}
    assert scripted.json(PATH, body | {"max_tokens": 5})["usage"]["input_tokens"] == count["count"]


def test_the_accounting_of_claude_code_is_no_text(scripted: LiveServer):
    """It would make every prompt begin differently."""
    blocks = [{"type": "text", "text": f"x-anthropic-billing-header: cch={i};"} for i in range(2)]
    brief = {"type": "text", "text": "Be brief."}
    counts = [
        scripted.json(f"{PATH}/count_tokens", {"messages": HI, "system": system})["input_tokens"]
        for system in ("Be brief.", [blocks[0], brief], [*blocks, brief])
    ]
    assert len(set(counts)) == 1


def test_an_answer_that_is_begun(scripted: LiveServer):
    scripted.says(" list")
    message = both(scripted, {"messages": [*HI, {"role": "assistant", "content": "Return the"}]})
    assert message["content"][0]["text"] == " list"


def test_forced_calls_and_schemas(demo: LiveServer):
    body = {"messages": HI, "max_tokens": 120, "temperature": 0.5, "seed": 1}
    tool = {
        "name": "pick",
        "input_schema": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]},
    }
    tool["input_schema"]["additionalProperties"] = False
    for choice in ({"type": "any"}, {"type": "tool", "name": "pick"}):
        choice["disable_parallel_tool_use"] = True
        (block,) = demo.json(PATH, body | {"tools": [tool], "tool_choice": choice})["content"]
        assert block["name"] == "pick" and block["input"]["x"] in (1, 2)
    form = {"format": {"type": "json_schema", "schema": {"enum": ["one", "two"]}}}
    assert json.loads(demo.json(PATH, body | {"output_config": form})["content"][0]["text"]) in ("one", "two")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]: blocks of the type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "cannot have"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_errors_have_anthropic_s_form(fake: LiveServer, wrong: dict[str, Any], words: str):
    response = fake.post(PATH, {"messages": HI, "max_tokens": 5} | wrong)
    value = response.json()
    assert response.status_code == 400 and value["type"] == "error"
    assert value["error"]["type"] == "invalid_request_error" and words in value["error"]["message"], value


@pytest.mark.parametrize("path", [PATH, PATH + "/count_tokens"])
def test_refusals_before_a_route_have_anthropic_s_form(chat_folder: Path, path: str):
    server = LiveServer(
        UnconstrainedEngine([1]), info_of(chat_folder), ServerSettings((NAME,), Security(digests(["k"])))
    )
    json_type, key = {"content-type": "application/json"}, {"x-api-key": "k"}
    try:
        for method, headers, status, kind in (
            ("POST", json_type, 401, "authentication_error"),
            ("POST", key, 415, "invalid_request_error"),
            ("GET", key, 405, "invalid_request_error"),
            ("POST", {**json_type, **key, "host": "evil.example"}, 421, "invalid_request_error"),
        ):
            response = server.http.request(method, path, headers=headers, content=b"{}")
            value = response.json()
            assert (response.status_code, value["type"], value["error"]["type"]) == (status, "error", kind)
        response = server.http.post("/v1/completions", headers=json_type, content=b"{}")
        assert response.status_code == 401 and "type" not in response.json()  # OpenAI's form
    finally:
        server.close()
