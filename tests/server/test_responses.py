"""``/v1/responses``: items and events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import api_kit
import pytest
from api_kit import LiveServer
from test_chat import CALL, WEATHER

PATH = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}


def both(server: LiveServer, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The response to a request, which must be the same with and without a stream, and the stream's events."""
    whole, events = server.json(PATH, body), server.events(PATH, body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert plain(events[-1]["response"]) == plain(whole)
    assert events[-1]["type"] == f"response.{whole['status']}"
    check(events, events[-1]["response"]["output"])
    return whole, events


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """A response without ids and times."""
    output = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return {**response, "id": 0, "created_at": 0, "output": output}


def check(events: list[Any], output: list[dict[str, Any]]) -> None:
    """The events of each item, in order, say what is in the response."""
    for number, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == number]
        assert own[0]["type"] == "response.output_item.added" and own[0]["item"]["status"] == "in_progress"
        assert own[-1] == own[-1] | {"type": "response.output_item.done", "item": item}
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        done = next(e for e in own if e["type"].endswith((".arguments.done", "text.done", "arguments.done")))
        if item["type"] == "function_call":
            assert text == item["arguments"] == done["arguments"]
        else:
            assert text == item["content"][0]["text"] == done["text"]
            deltas = [event for event in own if event["type"] == "response.output_text.delta"]
            scores = [score for event in deltas for score in event["logprobs"]]
            assert scores == item["content"][0].get("logprobs", [])


def test_an_answer(scripted: LiveServer):
    scripted.says("Return the list.")
    whole, events = both(scripted, {"input": "Hi", "instructions": "Be brief.", "metadata": {"a": "b"}})
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    (item,) = whole["output"]
    assert item["content"][0]["text"] == "Return the list." and whole["status"] == "completed"
    assert whole["metadata"] == {"a": "b"} and whole["store"] is False
    expected = "<system>Be brief.\n<user>Hi\n<assistant>"
    assert whole["usage"]["input_tokens"] == len(api_kit.TOKENIZER.encode(expected, add_special_tokens=False))
    whole, _ = both(scripted, {"input": "Hi", "max_output_tokens": 2})
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}


def test_log_probabilities(scripted: LiveServer):
    scripted.says("Return the list.")
    body = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = both(scripted, body)[0]["output"][0]["content"]
    assert "".join(score["token"] for score in part["logprobs"]) == part["text"]
    assert all(len(score["top_logprobs"]) == 2 for score in part["logprobs"])


def test_log_probabilities_of_text_that_is_held_back(chat_folder: Path):
    """It may be the beginning of a call. Steps are so long that most tokens arrive alone."""
    text = 'Use <tool_call>{"name": "weather"'
    server = api_kit.scripted_server(chat_folder, text, seconds_per_step=0.005)
    try:
        (part,) = both(server, {"input": "Hi", "tools": [TOOL], "top_logprobs": 1})[0]["output"][0]["content"]
        assert "".join(score["token"] for score in part["logprobs"]) == part["text"] == text
    finally:
        server.close()


def test_an_empty_answer_is_a_message(scripted: LiveServer):
    whole, _ = both(scripted, {"input": "Hi"})
    assert whole["output"][0]["content"][0]["text"] == ""


def test_text_and_calls(scripted: LiveServer):
    scripted.says(f"I look.\n{CALL}\n{CALL}")
    whole, _ = both(scripted, {"input": "Hi", "tools": [TOOL, {"type": "web_search"}], "max_output_tokens": 300})
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call"]
    assert json.loads(whole["output"][1]["arguments"]) == {"place": "Bonn", "days": 2}
    assert [tool["name"] for tool in whole["tools"]] == ["weather"]


def test_reasoning_is_an_item(tmp_path_factory: pytest.TempPathFactory):
    template = api_kit.CHAT_TEMPLATE + "{# </think> #}"
    folder = api_kit.folder_with_template(tmp_path_factory.mktemp("think") / "model", template)
    server = api_kit.scripted_server(folder, "<think>\nIt is two.\n</think>\n\nTwo.")
    try:
        whole, _ = both(server, {"input": "Hi", "reasoning": {"effort": "low"}})
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
        assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "It is two."}]
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 2
    finally:
        server.close()


def test_earlier_items_are_a_conversation(scripted: LiveServer):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "content": [{"type": "reasoning_text", "text": "m"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"place": "Bonn"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
        {"role": "user", "content": "And?"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Bonn"}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
        {"role": "user", "content": "And?"},
    ]
    used = scripted.json(PATH, {"input": items, "tools": [TOOL]})["usage"]["input_tokens"]
    assert used == scripted.json("/tokenize", {"messages": messages, "tools": [WEATHER]})["count"]


def test_instructions_alone(scripted: LiveServer):
    """Codex asks this before the first turn."""
    assert scripted.json(PATH, {"instructions": "Be brief.", "input": []})["usage"]["input_tokens"] > 0


def test_a_schema(demo: LiveServer):
    form = {"type": "json_schema", "name": "x", "schema": {"enum": ["one", "two"]}, "strict": True}
    whole = demo.json(PATH, {"input": "Hi", "text": {"format": form}, "max_output_tokens": 20})
    assert json.loads(whole["output"][0]["content"][0]["text"]) in ("one", "two")
    assert whole["text"]["format"]["name"] == "x"


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"input": None}, "input", "list"),
        ({"input": []}, "input", "no messages"),
        ({"input": [5]}, "input[0]", "JSON object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "keeps no responses"),
        ({"input": [{"type": "file_search_call"}]}, "input[0]", "not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "input_image"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"conversation": "c"}, "conversation", "keeps no responses"),
        ({"background": True}, "background", "leave it out"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1 to"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "needs a schema"),
        ({"tools": [TOOL, TOOL]}, "tools", "twice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}}, "tool_choice", "needs tools"),
    ],
)
def test_a_wrong_value_is_named(fake: LiveServer, wrong: dict[str, Any], param: str, words: str):
    response = fake.post(PATH, {"input": "Hi"} | wrong)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param and words in error["message"], error
