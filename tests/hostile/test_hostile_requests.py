"""Requests that are wrong on purpose: a 4xx that names the field, soon, and the next request is served."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

import api_kit
from hostile_kit import bounded

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 2},
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    RESPONSES: {"input": "a", "max_output_tokens": 16},
    MESSAGES: {"messages": HI, "max_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
NAN = float("nan")
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def function(name: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def chat(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


FIELDS: tuple[tuple[str, dict[str, Any], str], ...] = (
    *((path, {"temperature": "hot"}, "temperature") for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)),
    *(
        (path, {"structured_outputs": {"regex": "("}}, "structured_outputs")
        for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
    ),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"top_p": 7}, "top_p"),
    (COMPLETIONS, {"top_k": 2**70}, "top_k"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 10**30}, "max_tokens"),
    (MESSAGES, {"max_tokens": "5"}, "max_tokens"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (COMPLETIONS, {"n": 10**9}, "n"),
    (COMPLETIONS, {"best_of": -1}, "best_of"),
    (COMPLETIONS, {"seed": 10**40}, "seed"),
    (CHAT, {"stop": [""]}, "stop"),
    (CHAT, {"stop": ["a" * 10**6]}, "stop"),
    (MESSAGES, {"stop_sequences": ["a"] * 10_000}, "stop_sequences"),
    (CHAT, {"stop": "\ud800"}, "stop"),
    (CHAT, {"logit_bias": {"5": 1e30}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {str(10**12): 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias"),
    (CHAT, {"top_logprobs": 99, "logprobs": True}, "top_logprobs"),
    (COMPLETIONS, {"stop_token_ids": [10**12]}, "stop_token_ids"),
    (CHAT, {"model": 5}, "model"),
    (CHAT, {"model": "a\0b"}, "model"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"chat_template_kwargs": 5}, "chat_template_kwargs"),
    (CHAT, {"chat_template": "{{ 'x' * 10**10 }}"}, "chat_template"),
    (CHAT, {"tools": [1]}, "tools"),
    (CHAT, {"tools": [function("a b/\0")]}, "tools"),
    (CHAT, {"tools": [function(f"f{i}", parameters={}) for i in range(5000)]}, "messages"),  # the prompt is too long
    (CHAT, {"tools": [function("a", parameters={"type": "objct"})], "tool_choice": "required"}, "tools"),
    (CHAT, {"tools": [function("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
    (MESSAGES, {"tools": [{"name": "a", "input_schema": 5}]}, "tools"),
    (RESPONSES, {"tools": [{"type": "function", "name": "a b"}]}, "tools"),
    (RESPONSES, {"previous_response_id": "x"}, "previous_response_id"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    (RESPONSES, {"input": [{"type": "zzz"}]}, "input"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": 5}]}, "input"),
    (CHAT, {"response_format": {"type": "zzz"}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/x"}}}}, "response"),
    (COMPLETIONS, {"structured_outputs": {"grammar": "start: start start"}}, "structured_outputs.grammar"),
    (COMPLETIONS, {"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs.choice"),
    (COMPLETIONS, {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    (COMPLETIONS, {"guided_json": {"type": "zz"}}, "guided_json"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{}]}, "messages"),
    (CHAT, {"messages": [{"role": "zzz", "content": "a"}]}, "messages"),
    (CHAT, {"messages": chat("\ud800")}, "messages"),
    (CHAT, {"messages": chat([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}] * 100_000}, ""),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages"),
    (MESSAGES, {"messages": chat([{"type": "zz"}])}, "messages"),
    (MESSAGES, {"system": [5]}, "system"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**12]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1]] * 5000}, "prompt"),
    (COMPLETIONS, {"prompt": [1] * 10**6}, "prompt"),
    (COMPLETIONS, {"prompt": "a" * 5_000_000}, "prompt"),
    (CHAT, {"messages": chat("a " * 2_000_000)}, "messages"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "a" * 14_000_000}, ""),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [5] * 3_000_000}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens"),
)
"""Where it is sent, what is wrong in it, and the beginning of the field's name."""

RAW: dict[str, bytes] = {
    "nothing": b"",
    "half of an object": b"{",
    "a list": b"[]",
    "null": b"null",
    "no UTF-8": b"\xff\xfe",
    "a zero": b"\0",
    "deep objects": b'{"a":' * 100_000,
    "a million brackets": b"[" * 10**6,
    "a NaN": b'{"prompt": NaN}',
    "an infinity": b'{"prompt": 1e999}',
    "a number of 5,000 digits": b'{"prompt": ' + b"9" * 5000 + b"}",
    "half of a pair": b'{"\\ud800": 1}',
    "UTF-16": json.dumps({"prompt": "a"}).encode("utf-16"),
}
"""Bodies that are no JSON, or not of an object that a request is."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[api_kit.LiveServer]:
    folder = api_kit.folder_with_template(tmp_path_factory.mktemp("hostile") / "model")
    server = api_kit.fake_server(folder)
    serves(server)  # what reads the tokenizer counts for no input
    yield server
    server.close()


def serves(server: api_kit.LiveServer) -> None:
    for path, body in BODIES.items():
        assert server.post(path, body).status_code == 200


def refusal(server: api_kit.LiveServer, path: str, content: bytes) -> tuple[str | None, str]:
    """The field and the message of an answer that refuses."""
    with bounded():
        response = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500, response.text[:500]
    assert len(response.content) < 20_000 and "Traceback" not in response.text
    error = response.json()["error"]
    return error.get("param"), error["message"]


@pytest.mark.parametrize(
    ("path", "wrong", "field"), [pytest.param(*case, id=f"{case[0]} {reprlib.repr(case[1])[:50]!r}") for case in FIELDS]
)
def test_a_field(server: api_kit.LiveServer, path: str, wrong: dict[str, Any], field: str, capfd: Any) -> None:
    param, message = refusal(server, path, json.dumps(BODIES[path] | wrong).encode())
    assert (param or "").startswith(field) or message.startswith(field), (param, message)
    serves(server)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_are_none(server: api_kit.LiveServer, path: str, capfd: Any) -> None:
    for content in RAW.values():
        _, message = refusal(server, path, content)
        assert message
    serves(server)
    assert "Traceback" not in capfd.readouterr().err
