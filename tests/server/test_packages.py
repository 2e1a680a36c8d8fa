"""The packages ``openai`` and ``anthropic`` talk to a server over the bundled model."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from api_kit import NAME, LiveServer
from pydantic import BaseModel
from test_chat import HI, WEATHER

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

OPTIONS: dict[str, Any] = {"temperature": 0.7, "seed": 5}
TOOL = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
TOOL["function"]["parameters"] = {
    "type": "object",
    "properties": {"place": {"enum": ["Bonn", "Rome"]}},
    "required": ["place"],
    "additionalProperties": False,
}


class Pick(BaseModel):
    """What a structured answer is parsed to."""

    word: Literal["list", "dict"]
    flag: bool


@pytest.fixture(scope="module")
def client(demo: LiveServer):
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(demo: LiveServer):
    with anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0) as client:
        yield client


def test_completions(client):
    body = {"model": NAME, "prompt": "Return a", "max_tokens": 8, "logprobs": 1, **OPTIONS}
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage and whole.choices[0].logprobs.tokens


def test_chat(client):
    body = {"model": NAME, "messages": HI, "max_tokens": 8, **OPTIONS}
    whole = client.chat.completions.create(**body)
    assert whole.choices[0].message.role == "assistant" and whole.usage.completion_tokens == 8
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    body |= {"stop": ["e", "a", " "], "max_tokens": 200}
    whole = client.chat.completions.create(**body)
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_structured_answers(client):
    body = {"model": NAME, "messages": HI, "max_tokens": 100, "response_format": Pick, **OPTIONS}
    parsed = client.chat.completions.parse(**body).choices[0].message.parsed
    assert isinstance(parsed, Pick)
    with client.chat.completions.stream(**body) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    body = {"model": NAME, "input": "Hi", "max_output_tokens": 100, "text_format": Pick, "temperature": 0.5}
    assert isinstance(client.responses.parse(**body).output_parsed, Pick)


def test_tools(client):
    body = {"model": NAME, "messages": HI, "max_tokens": 120, "tools": [TOOL], "parallel_tool_calls": False, **OPTIONS}
    whole = client.chat.completions.create(**body, tool_choice="required")
    (call,) = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["place"] in ("Bonn", "Rome")
    with client.chat.completions.stream(**body, tool_choice="required") as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments and streamed.function.name == "weather"
    messages = [*HI, whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    again = client.chat.completions.create(model=NAME, messages=messages, tools=[TOOL], max_tokens=5)
    assert again.choices[0].finish_reason in ("length", "stop")


def test_responses(client):
    body = {"model": NAME, "input": "Hi", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**body)
    assert whole.status == "incomplete" and whole.output_text
    events = list(client.responses.create(**body, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    tool = {"type": "function", **TOOL["function"]}
    body |= {"max_output_tokens": 120, "tools": [tool], "parallel_tool_calls": False}
    body["tool_choice"] = {"type": "function", "name": "weather"}
    with client.responses.stream(**body) as stream:
        called = stream.get_final_response()
    (call,) = called.output
    assert call.name == "weather" and json.loads(call.arguments)["place"] in ("Bonn", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    history = [{"role": "user", "content": "Hi"}, *called.output, result]
    assert client.responses.create(model=NAME, input=history, max_output_tokens=4).usage.output_tokens == 4


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=NAME, messages=HI, temperature=-1)
    assert error.value.param == "temperature" and error.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    assert [model.id for model in client.models.list()] == [NAME] and client.models.retrieve(NAME).id == NAME


def test_anthropic_s_messages(claude):
    body = {"model": "claude-any", "messages": HI, "max_tokens": 8, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**body)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 8
    with claude.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage == whole.usage
    assert claude.messages.count_tokens(model="x", messages=HI).input_tokens == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens or 0
    )


def test_anthropic_s_tools(claude):
    tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {"model": "x", "messages": HI, "max_tokens": 120, "tools": [tool], "tool_choice": choice}
    with claude.messages.stream(**body) as stream:
        (block,) = stream.get_final_message().content
    assert block.type == "tool_use" and block.input["place"] in ("Bonn", "Rome")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "Rain."}
    messages = [*HI, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    again = claude.messages.create(model="x", messages=messages, tools=[tool], max_tokens=4)
    assert again.usage.output_tokens <= 4


def test_anthropic_s_errors(claude):
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(model="x", messages=HI, max_tokens=4, extra_body={"temperature": -1})
