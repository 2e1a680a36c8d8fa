"""Fields of other servers: done, or refused by name. No field that changes an answer is accepted and does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import api_kit
import pytest
from api_kit import LiveServer
from test_chat import HI

from bminf_lite.server.schemas.unsupported import FieldsOfChats, UnsupportedFields
from bminf_lite.server.settings import ServerSettings

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 3},
    COMPLETIONS: {"prompt": "a", "max_tokens": 3},
    RESPONSES: {"input": "a", "max_output_tokens": 3},
    MESSAGES: {"messages": HI, "max_tokens": 3},
}
every_route = pytest.mark.parametrize("path", BODIES)
SCHEMA = {"type": "object", "properties": {"a": {"const": 5}}, "required": ["a"], "additionalProperties": False}


def message_of(response: Any) -> tuple[str | None, str]:
    """The field that an error names, and its message; Anthropic's errors name it in the message."""
    error = response.json()["error"]
    return error.get("param"), error["message"]


@every_route
@pytest.mark.parametrize("field", sorted(UnsupportedFields.model_fields))
def test_a_field_that_is_not_supported_is_refused_by_name(fake: LiveServer, path: str, field: str):
    response = fake.post(path, BODIES[path] | {field: 0.123})
    param, message = message_of(response)
    assert response.status_code == 400 and param in (field, None) and message.startswith(field), message


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("field", sorted(FieldsOfChats.model_fields.keys() | {"stop", "logprobs"}))
def test_a_field_of_chats_is_refused_where_it_does_nothing(fake: LiveServer, path: str, field: str):
    response = fake.post(path, BODIES[path] | {field: 5})
    param, message = message_of(response)
    assert response.status_code == 400 and param in (field, None) and message.startswith(field), message
    assert fake.post(path, BODIES[path] | {"n": 1, "stop": [], "logprobs": False}).status_code == 200


@every_route
def test_values_that_ask_for_nothing_are_accepted(fake: LiveServer, path: str):
    neutral = {
        "use_beam_search": False,
        "length_penalty": 1.0,
        "mirostat": 0,
        "typical_p": 1,
        "skip_special_tokens": True,
        "top_n_sigma": -1,
        "bad_words": [],
        "grammar": "",
        "n_predict": -1,
        "prompt_logprobs": None,
        "return_token_ids": False,
        "no_stop_trim": False,
    }
    assert fake.post(path, BODIES[path] | neutral).status_code == 200


def test_all_of_them_are_named_at_once(fake: LiveServer):
    _, message = message_of(fake.post(CHAT, BODIES[CHAT] | {"use_beam_search": True, "regex": "a", "typical_p": 0.5}))
    assert all(name in message for name in ("use_beam_search", "regex", "typical_p"))


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": "{}"}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": "objekt"}}}, "response_format.schema"),
    ],
)
def test_refusals_of_chats(fake: LiveServer, wrong: dict[str, Any], param: str):
    messages = [*HI, {"role": "assistant", "content": "x"}] if "continue_final_message" in wrong else HI
    response = fake.post(CHAT, BODIES[CHAT] | {"messages": messages} | wrong)
    assert response.status_code == 400 and message_of(response)[0] == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_the_stop_text_may_be_part_of_the_answer(scripted: LiveServer, stream: bool, logprobs: bool):
    scripted.says("Return the list of lists.")
    stop: dict[str, Any] = {"include_stop_str_in_output": True, "max_tokens": 50}

    def text(path: str, body: dict[str, Any]) -> str:
        if stream:
            events = [event for event in scripted.events(path, body | stop) if event != "[DONE]"]
            choices = [event["choices"][0] for event in events]
            pieces = [c["text"] if path == COMPLETIONS else c["delta"].get("content") or "" for c in choices]
            assert choices[-1]["finish_reason"] == "stop"
            return "".join(pieces)
        (choice,) = scripted.json(path, body | stop)["choices"]
        assert choice["finish_reason"] == "stop"
        return choice["text"] if path == COMPLETIONS else choice["message"]["content"]

    scores = {"logprobs": logprobs} if logprobs else {}
    assert text(CHAT, {"messages": HI, "stop": ["the", "list"], **scores}) == "Return the"
    assert text(COMPLETIONS, {"prompt": "a", "stop": "list", "logprobs": 1 if logprobs else None}) == "Return the list"


def test_the_stop_text_is_in_anthropic_s_and_in_no_ended_answer(scripted: LiveServer):
    scripted.says("Return the list.")
    body = BODIES[MESSAGES] | {"stop_sequences": ["list"], "include_stop_str_in_output": True, "max_tokens": 50}
    message = scripted.json(MESSAGES, body)
    assert message["content"][0]["text"] == "Return the list" and message["stop_sequence"] == "list"
    body = {"messages": HI, "include_stop_str_in_output": True}
    assert scripted.json(CHAT, body)["choices"][0]["message"]["content"] == "Return the list."


def test_a_stop_token_s_text_may_be_part_of_the_answer(scripted: LiveServer):
    ids = scripted.says("Return the list.")
    body = {"messages": HI, "stop_token_ids": [ids[1]], "logprobs": True}
    assert scripted.json(CHAT, body)["choices"][0]["message"]["content"] == "Return"
    (choice,) = scripted.json(CHAT, body | {"include_stop_str_in_output": True})["choices"]
    assert choice["message"]["content"] == "Return the"
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["Return", " the"]


def test_a_prompt_without_the_beginning_of_an_answer(scripted: LiveServer):
    def prompt_of(**options: Any) -> int:
        return scripted.json(CHAT, {"messages": HI, "max_tokens": 1, **options})["usage"]["prompt_tokens"]

    def tokens(text: str) -> int:
        return len(api_kit.TOKENIZER.encode(text, add_special_tokens=False))

    assert prompt_of() == prompt_of(add_generation_prompt=True) == tokens("<user>Hi\n<assistant>")
    assert prompt_of(add_generation_prompt=False) == tokens("<user>Hi\n")
    body = {"messages": HI, "add_generation_prompt": False}
    assert scripted.json("/tokenize", body)["count"] == tokens("<user>Hi\n")


def test_documents_reach_the_template(tmp_path: Path):
    template = "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}{{ messages[0].content }}"
    server = api_kit.scripted_server(api_kit.folder_with_template(tmp_path / "model", template), "x")
    try:
        for documents in ([], [{"title": "One"}, {"title": "Two"}]):
            expected = "".join(f"[{document['title']}]" for document in documents) + "Hi"
            usage = server.json(CHAT, {"messages": HI, "documents": documents, "max_tokens": 1})["usage"]
            assert usage["prompt_tokens"] == len(api_kit.TOKENIZER.encode(expected, add_special_tokens=False))
    finally:
        server.close()


@pytest.mark.parametrize(
    ("path", "form"),
    [
        (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}),
        (CHAT, {"response_format": {"type": "json_schema", "schema": SCHEMA}}),
        (COMPLETIONS, {"response_format": {"type": "json_object", "schema": SCHEMA}}),
        (RESPONSES, {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
)
def test_a_schema_is_followed_wherever_it_stands(demo: LiveServer, path: str, form: dict[str, Any]):
    length = {"max_output_tokens": 100} if path == RESPONSES else {"max_tokens": 100}
    answer = demo.json(path, BODIES[path] | length | form | {"temperature": 0})
    if path == RESPONSES:
        text = answer["output"][0]["content"][0]["text"]
    elif path == MESSAGES:
        text = answer["content"][0]["text"]
    else:
        text = answer["choices"][0]["text" if path == COMPLETIONS else "message"]
        text = text if isinstance(text, str) else text["content"]
    assert "".join(text.split()) == '{"a":5}'


def test_two_formats_of_an_answer_exclude_each_other(fake: LiveServer):
    form = {"type": "json_schema", "schema": SCHEMA}
    response = fake.post(MESSAGES, BODIES[MESSAGES] | {"output_format": form, "output_config": {"format": form}})
    assert response.status_code == 400 and "output_format.schema" in message_of(response)[1]


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({}, "auto"),
        ({"tool_choice": "auto"}, "auto"),
        ({"tool_choice": "none"}, "none"),
        ({"tool_choice": None}, "auto"),
    ],
)
def test_the_tool_choice_of_a_response(fake: LiveServer, given: dict[str, Any], reported: str):
    assert fake.json(RESPONSES, BODIES[RESPONSES] | given)["tool_choice"] == reported


# -- tools whose schemas cannot be enforced ---------------------------------------------------------------------------

UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


def function(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


FINE = function("fine", {"a": {"type": "string"}})


FORMS = ("qwen3_coder", "llama3_json", "llama4_pythonic", "mistral_args", "gemma4", "glm45")


@pytest.mark.parametrize("form", ["hermes", *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS)])
@pytest.mark.parametrize(
    ("tools", "choice", "named"),
    [
        ([FINE, function("tag", {"a": UNIQUE})], "required", {"tag": "/properties/a"}),
        (
            [function("one", {"a": {"properties": {"b": UNIQUE}}}), FINE, function("two", {"c": UNIQUE})],
            "required",
            {"one": "/properties/a/properties/b", "two": "/properties/c"},
        ),
        ([function("tag", {"a": UNIQUE}, strict=True), FINE], "auto", {"tag": "/properties/a"}),
        (
            [function("tag", {"a": UNIQUE}), FINE],
            {"type": "function", "function": {"name": "tag"}},
            {"tag": "/properties/a"},
        ),
        ([function("tag", {"a": {"type": "objekt"}})], "required", {"tag": "/properties/a"}),
    ],
    ids=["one", "two", "strict", "by name", "another type"],
)
def test_a_schema_that_cannot_be_enforced_names_its_function_and_the_place(
    chat_folder: Path, form: str, tools: list[dict[str, Any]], choice: Any, named: dict[str, str]
):
    settings = ServerSettings((api_kit.NAME,), tool_call_format=form)
    server = LiveServer(api_kit.UnconstrainedEngine(range(1, 9)), api_kit.info_of(chat_folder), settings)
    try:
        response = server.post(CHAT, {"messages": HI, "tools": tools, "tool_choice": choice, "max_tokens": 3})
    finally:
        server.close()
    param, message = message_of(response)
    assert response.status_code == 400 and param == "tools"
    for name, place in named.items():
        assert repr(name) in message and f"(at {place})" in message
    assert "'fine'" not in message and "call_" not in message and "\n" not in message


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("form", ["gemma4", "qwen3_coder", "hermes"])
@pytest.mark.parametrize(
    "parameters",
    [{"properties": {"a": {"enum": 5}}}, {"properties": ["a"]}, {"properties": {"a": {"type": [{}]}}}, nested(400)],
    ids=["enum", "properties", "type", "deep"],
)
def test_a_schema_of_a_wrong_form_is_an_error_of_the_request(chat_folder: Path, form: str, parameters: dict[str, Any]):
    settings = ServerSettings((api_kit.NAME,), tool_call_format=form)
    server = LiveServer(api_kit.UnconstrainedEngine(range(1, 9)), api_kit.info_of(chat_folder), settings)
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    try:
        response = server.post(CHAT, {"messages": HI, "tools": tools, "tool_choice": "required", "max_tokens": 3})
    finally:
        server.close()
    assert response.status_code == 400 and message_of(response)[0] in ("tools", None)  # None: the request is too deep


def test_a_schema_that_nothing_enforces_is_not_refused(fake: LiveServer):
    """The schema of a function that is not strict and need not be called."""
    tools = [function("tag", {"a": UNIQUE}), FINE]
    assert fake.post(CHAT, {"messages": HI, "tools": tools, "max_tokens": 3}).status_code == 200
    choice = {"type": "function", "function": {"name": "fine"}}
    assert fake.post(CHAT, {"messages": HI, "tools": tools, "tool_choice": choice, "max_tokens": 3}).status_code == 200


def test_anthropic_s_and_responses_tools_are_named_too(fake: LiveServer):
    schema = {"type": "object", "properties": {"a": UNIQUE}}
    bodies = {
        MESSAGES: {"tools": [{"name": "tag", "input_schema": schema}], "tool_choice": {"type": "any"}},
        RESPONSES: {"tools": [{"type": "function", "name": "tag", "parameters": schema}], "tool_choice": "required"},
    }
    for path, body in bodies.items():
        response = fake.post(path, BODIES[path] | body)
        message = message_of(response)[1]
        assert response.status_code == 400 and "'tag'" in message and "(at /properties/a)" in message


# -- control tokens in texts of others --------------------------------------------------------------------------------

CONTROL = "<|endoftext|>"


@pytest.mark.parametrize("default", [False, True])
def test_control_tokens_in_texts_are_text_if_a_request_or_the_server_says_so(chat_folder: Path, default: bool):
    settings = ServerSettings((api_kit.NAME,), split_special_tokens=default)
    server = LiveServer(api_kit.UnconstrainedEngine(range(1, 9)), api_kit.info_of(chat_folder), settings)
    end = api_kit.TOKENIZER.piece_to_id(CONTROL)

    def tokens(body: dict[str, Any]) -> list[int]:
        return server.json("/tokenize", {**body, "add_special_tokens": False})["tokens"]

    def used(path: str, body: dict[str, Any]) -> int:
        usage = server.json(path, BODIES[path] | body)["usage"]
        return usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get("cache_read_input_tokens", 0)

    try:
        says = [{"role": role, "content": f"a{CONTROL}b"} for role in ("user", "assistant", "user")]
        conversations = {CHAT: {"messages": says}, MESSAGES: {"messages": says}, RESPONSES: {"input": says}}
        for given, splits in (
            ({}, default),
            ({"split_special_tokens": True}, True),
            ({"split_special_tokens": False}, False),
        ):
            assert tokens({"prompt": f"a{CONTROL}b", **given}).count(end) == (0 if splits else 1)
            found = tokens({"messages": says, **given})
            assert found.count(end) == (1 if splits else 3)  # that of the assistant is the model's own
            for path, body in conversations.items():
                assert used(path, {**body, **given}) == len(found)
            assert used(COMPLETIONS, {"prompt": f"a{CONTROL}b", **given, "add_special_tokens": False}) == len(
                tokens({"prompt": f"a{CONTROL}b", **given})
            )
            assert used(COMPLETIONS, {"prompt": [1, 2, end], **given}) == 3
    finally:
        server.close()


def test_documents_are_guarded_too(tmp_path: Path):
    template = "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}{{ messages[0].content }}" + CONTROL
    server = api_kit.scripted_server(api_kit.folder_with_template(tmp_path / "model", template), "x")
    try:
        body = {"messages": HI, "documents": [{"title": CONTROL}], "max_tokens": 1}
        counts = [
            server.json(CHAT, {**body, "split_special_tokens": splits})["usage"]["prompt_tokens"]
            for splits in (False, True)
        ]
    finally:
        server.close()
    literal = len(api_kit.TOKENIZER.encode("<", add_special_tokens=False))
    assert counts[1] > counts[0] + literal
