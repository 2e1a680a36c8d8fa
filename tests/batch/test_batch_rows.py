"""Rows as requests, and answers as rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bminf_lite.batch.rows import OpenAIRows, PlainRows, Row, RowError, encode, failed, has_error, parse_line, usage_of
from bminf_lite.server.direct import DirectAnswer
from bminf_lite.server.schemas.chat import ChatBody
from bminf_lite.server.schemas.completions import CompletionBody
from bminf_lite.server.schemas.unsupported import UnsupportedFields

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


def test_a_plain_row_is_a_request_with_the_defaults_that_it_does_not_give():
    rows = PlainRows({"max_tokens": 9, "temperature": 0.5}, seed=2**64 - 1)
    path, body = rows.call(Row(3, {"prompt": "a", "temperature": 0, "stream": True, "note": "n", "top_p": None}))
    assert path == "/v1/completions"
    assert json.loads(body) == {"prompt": "a", "temperature": 0, "max_tokens": 9, "seed": 2}
    messages = [{"role": "user", "content": "b"}]
    path, body = rows.call(Row(0, {"messages": messages, "max_completion_tokens": 5, "seed": 7}))
    assert path == "/v1/chat/completions"
    assert json.loads(body) == {"messages": messages, "temperature": 0.5, "max_completion_tokens": 5, "seed": 7}


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": []}, {"prompt": None}])
def test_a_plain_row_has_one_prompt(fields):
    with pytest.raises(RowError, match="either prompt or messages"):
        PlainRows().call(Row(0, fields))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "is list, but must be an object"),
        (b"\xff{}", "byte 0 is 0xff"),
        (b"[" * 100_000, "nests too deeply"),
        (b"1" * 5000, "not JSON that can be read"),
    ],
    ids=["cut off", "array", "latin-1", "deep", "long number"],
)
def test_a_line_that_is_no_row_says_why_in_both_forms(line, words):
    row = parse_line(5, line)
    assert words in row.problem and row.index == 5
    for form in (PlainRows(), OpenAIRows()):
        with pytest.raises(RowError) as error:
            form.call(row)
        result = form.result(failed(error.value))
        assert has_error(result) and usage_of(result) == (0, 0)
        assert words in form.output(row, result)["error"]["message"]
    assert PlainRows().output(row, result)["line"] == line.decode(errors="replace")


def test_an_openai_row_says_all_that_is_wrong_with_it():
    with pytest.raises(RowError) as error:
        OpenAIRows().call(Row(0, {"custom_id": 1, "method": "GET", "body": []}))
    assert [p.split(" ")[0] for p in str(error.value).split("; ")] == ["custom_id", "method", "url", "body"]


def answer(**choice: Any) -> DirectAnswer:
    return DirectAnswer(
        200, {"choices": [{"index": 0, "logprobs": None, "finish_reason": "stop", **choice}], "usage": USAGE}
    )


def test_what_comes_out_of_a_plain_row():
    row = Row(0, {"prompt": "a", "id": 1, "error": "of an earlier batch"})
    output = PlainRows().output(row, PlainRows().result(answer(text="b")))
    assert output == {
        "prompt": "a",
        "id": 1,
        "generated_text": "b",
        "finish_reason": "stop",
        "choices": None,
        "error": None,
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1},
    }
    message = {"role": "assistant", "content": "c", "refusal": None}
    assert PlainRows().result(answer(message=message))["choices"] is None
    calls = PlainRows().result(answer(message=message | {"tool_calls": [1]}))
    assert (calls["generated_text"], len(calls["choices"])) == ("c", 1)


def test_what_comes_out_of_an_openai_row():
    row, form = Row(4, {"custom_id": "x"}), OpenAIRows()
    good, bad = form.result(answer(text="b")), form.result(DirectAnswer(404, {"error": {"code": "unknown_url"}}))
    assert (has_error(good), usage_of(good), has_error(bad)) == (False, (3, 2), True)
    output = form.output(row, good)
    assert output["custom_id"] == "x" and output["response"]["body"]["choices"][0]["text"] == "b"
    assert form.output(row, bad)["response"]["status_code"] == 404 and form.output(row, bad)["error"] is None


def test_text_of_any_kind_is_written():
    assert json.loads(encode({"a": "ü\ud800"})) == {"a": "ü\ud800"}
    assert encode({"a": "ü"}) == '{"a": "ü"}'.encode()


def test_the_guide_names_fields_that_rows_may_have():
    guide = (Path(__file__).parents[2] / "docs" / "batch.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)`", guide.split("(http_api.md): ")[1].split(". Fields with")[0])
    supported = (
        CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()
    ) - UnsupportedFields.model_fields.keys()
    assert len(named) > 5 and set(named) <= supported
    examples = [line for line in guide.splitlines() if line.startswith('    {"') and "custom_id" not in line]
    for line in examples:
        call = PlainRows().call(parse_line(0, line.encode()))
        (ChatBody if "chat" in call.path else CompletionBody).model_validate_json(call.body)
