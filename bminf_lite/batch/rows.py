"""Rows of a batch as requests, and their answers as rows: this package's own form, and OpenAI's batch files.

A row that is wrong has an answer too, with an error; it stops nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..server.direct import DirectAnswer
from ..server.errors import bad_request
from ..server.schemas.chat import ChatBody
from ..server.schemas.completions import CompletionBody

RESULT_FIELDS = ("generated_text", "finish_reason", "usage", "choices", "error")
"""What an output row has beside the fields of its input. Fields of the input with these names are replaced."""
MAX_SEED = 2**64
_FIELDS = frozenset(
    info.alias or name for body in (ChatBody, CompletionBody) for name, info in body.model_fields.items()
) - {"stream", "stream_options"}


@dataclass(frozen=True)
class Row:
    """A row of the input: its number among all rows, from 0, and its fields.

    ``problem`` says why a row has no fields, and ``text`` is then the line.
    """

    index: int
    fields: Mapping[str, Any]
    problem: str = ""
    text: str = ""


class Call(NamedTuple):
    """A request to an interface of the server."""

    path: str
    body: bytes


class RowError(ValueError):
    """A row that is no request. The message says why."""


class RowFormat(Protocol):
    """How rows are requests, and what is kept of their answers."""

    def call(self, row: Row) -> Call:
        """The request of a row. Raises ``RowError``."""
        ...

    def result(self, answer: DirectAnswer) -> dict[str, Any]:
        """What an output row has beside its input, as JSON."""
        ...

    def output(self, row: Row, result: Mapping[str, Any]) -> dict[str, Any]:
        """The output row."""
        ...


def parse_line(index: int, line: bytes) -> Row:
    """The row in a line of JSON."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        problem = f"the row is not UTF-8 text: byte {error.start} is {line[error.start]:#04x}"
        return Row(index, {}, problem, line.decode(errors="replace"))
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return Row(index, {}, f"the row is not JSON: {error.msg} at column {error.colno}", text)
    except (RecursionError, ValueError) as error:
        problem = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
        return Row(index, {}, f"the row is not JSON that can be read: {problem}", text)
    if not isinstance(value, dict):
        return Row(index, {}, f"the row is {type(value).__name__}, but must be an object", text)
    return Row(index, value)


def failed(error: RowError) -> DirectAnswer:
    """The answer to a row that is no request."""
    return DirectAnswer(400, json.loads(bad_request(str(error), code="invalid_row").body()))


def encode(value: object) -> bytes:
    """A value as a line of JSON, without its end."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a row may spell
        return json.dumps(value).encode()


@dataclass(frozen=True)
class PlainRows:
    """A row has ``prompt`` or ``messages``, and fields of ``/v1/completions`` or ``/v1/chat/completions``.

    It may have others, which come out as they are. ``defaults`` are the fields of rows that have none of these names.
    With a ``seed``, a row without one has the seed ``seed + index``, so that results do not depend on who answers it.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def call(self, row: Row) -> Call:
        """See :meth:`RowFormat.call`."""
        if row.problem:
            raise RowError(row.problem)
        given = {name: value for name, value in row.fields.items() if name in _FIELDS and value is not None}
        if ("prompt" in given) == ("messages" in given):
            raise RowError("the row must have either prompt or messages")
        body = {**self.defaults, **given}
        if "max_completion_tokens" in given:
            body.pop("max_tokens", None)
        if self.seed is not None:
            body.setdefault("seed", (self.seed + row.index) % MAX_SEED)
        try:
            content = json.dumps(body).encode()
        except (TypeError, ValueError) as error:  # a column of a table may hold bytes or times
            raise RowError(f"the row cannot be written as JSON: {error}") from None
        return Call("/v1/chat/completions" if "messages" in body else "/v1/completions", content)

    def result(self, answer: DirectAnswer) -> dict[str, Any]:
        """See :meth:`RowFormat.result`: :data:`RESULT_FIELDS`. ``choices`` is given where they hold more than text."""
        empty: dict[str, Any] = dict.fromkeys(RESULT_FIELDS)
        if answer.status != 200:
            return {**empty, "error": answer.body["error"]}
        choices, usage = answer.body["choices"], answer.body["usage"]
        first = choices[0]
        message = first.get("message")
        has_more = len(choices) > 1 or first.get("logprobs") is not None
        has_more = has_more or (message is not None and not {"role", "content", "refusal"} >= message.keys())
        return {
            **empty,
            "generated_text": first["text"] if message is None else message["content"],
            "finish_reason": first["finish_reason"],
            "usage": {
                "prompt_tokens": usage["prompt_tokens"],
                "completion_tokens": usage["completion_tokens"],
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            },
            "choices": choices if has_more else None,
        }

    def output(self, row: Row, result: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`RowFormat.output`. A row that could not be read has its text as ``line``."""
        fields = {"line": row.text} if row.problem else row.fields
        return {**fields, **result}


@dataclass(frozen=True)
class OpenAIRows:
    """OpenAI's batch files: ``custom_id``, ``method``, ``url`` and ``body``; answers have ``response`` and ``error``.

    See https://platform.openai.com/docs/api-reference/batch/request-input. ``seed`` is as in :class:`PlainRows`.
    """

    seed: int | None = None

    def call(self, row: Row) -> Call:
        """See :meth:`RowFormat.call`."""
        if row.problem:
            raise RowError(row.problem)
        method, url, body = (row.fields.get(name) for name in ("method", "url", "body"))
        problems = []
        if not isinstance(row.fields.get("custom_id"), str):
            problems.append(f"custom_id is {_shown(row.fields.get('custom_id'))}, but must be a text")
        if method != "POST":
            problems.append(f"method is {_shown(method)}, but must be 'POST'")
        if not isinstance(url, str):
            problems.append(f"url is {_shown(url)}, but must be a path such as '/v1/chat/completions'")
        if not isinstance(body, dict):
            problems.append(f"body is {_shown(body)}, but must be an object")
        if problems:
            raise RowError("; ".join(problems))
        assert isinstance(url, str) and isinstance(body, dict)
        if self.seed is not None and body.get("seed") is None:
            body = {**body, "seed": (self.seed + row.index) % MAX_SEED}
        return Call(url, json.dumps(body).encode())

    def result(self, answer: DirectAnswer) -> dict[str, Any]:
        """See :meth:`RowFormat.result`: a status and a body, or for a row that is no request only an error."""
        error = answer.body.get("error") if answer.status != 200 else None
        if error is not None and error["code"] == "invalid_row":
            return {"response": None, "error": {"code": error["code"], "message": error["message"]}}
        return {"response": {"status_code": answer.status, "body": answer.body}, "error": None}

    def output(self, row: Row, result: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`RowFormat.output`."""
        name = f"batch_req_{row.index}"
        response = result["response"]
        if response is not None:
            response = {"status_code": response["status_code"], "request_id": name, "body": response["body"]}
        return {"id": name, "custom_id": row.fields.get("custom_id"), "response": response, "error": result["error"]}


def has_error(result: Mapping[str, Any]) -> bool:
    """Whether a row, of either form, was not answered."""
    response = result.get("response")
    return result["error"] is not None or (response is not None and response["status_code"] != 200)


def usage_of(result: Mapping[str, Any]) -> tuple[int, int]:
    """The tokens of a row's prompt, and those that were generated."""
    usage = result.get("usage") or ((result.get("response") or {}).get("body") or {}).get("usage") or {}
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    return prompt, usage.get("completion_tokens", usage.get("output_tokens", 0))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
