"""``/v1/responses``: the next message of a conversation, as a list of items. Nothing is kept between requests."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import Route

from ...engine.sampling_params import SamplingParams
from ...text.reasoning import Content, Reasoning
from ...text.text_stream import ScoredToken
from ...text.tool_calls import ArgumentsDelta, CallBegin
from ..answer import Event
from ..client import Generation
from ..conversation import Conversation, PreparedConversation, prepare
from ..event_stream import EventStream
from ..generating import check_model, ending, generation_request, sampling_params, told
from ..request_record import RequestRecord
from ..schemas.chat import effort_variables
from ..schemas.responses import ResponsesBody
from ..state import ServerState
from ..work import Endpoint
from .chunks import TokenUsage, scored_token, sse

_encode = msgspec.json.encode


def routes(server: ServerState) -> list[Route]:
    """The route."""
    return [ENDPOINT.route(server)]


async def _prepare(server: ServerState, body: ResponsesBody, record: RequestRecord) -> _Response:
    """Check a request as far as HTTP can, and submit it."""
    adapter = check_model(server, body.model)
    logprobs = (body.top_logprobs or 0) if body.wants_logprobs else None
    params = sampling_params(server, body, body.max_output_tokens, "max_output_tokens", logprobs)
    effort = None if body.reasoning is None else body.reasoning.effort
    conversation = Conversation(
        body.messages,
        [tool.plain() for tool in body.functions],
        body.choice,
        body.structures,
        {**effort_variables(effort), **(body.chat_template_kwargs or {})},
        body.parallel_tool_calls is not False,
        split_special_tokens=body.split_special_tokens,
        field="input",
    )
    prepared = await prepare(server, conversation, record.client)
    request = generation_request(
        adapter,
        prepared.prompt,
        params,
        body,
        grammar=prepared.grammar,
        is_streamed=body.stream,
        ends_by_text=prepared.ends_by_text(()),
    )
    return _Response(server, body, await server.client.generate(request, record=record), prepared, params)


class _Items:
    """The items of a response while it arrives, and the events that tell of them."""

    def __init__(self, prepared: PreparedConversation, wants_logprobs: bool):
        self.items: list[dict[str, Any]] = []
        self.sequence_number = 0
        self._prepared = prepared
        self._wants_logprobs = wants_logprobs
        self._pieces: list[str] = []
        self._scores: list[dict[str, Any]] = []
        self._next_scores: list[dict[str, Any]] = []  # of tokens whose text may be held back
        self._delta_head = b""

    def event(self, kind: str, **fields: Any) -> bytes:
        """An event of the stream."""
        number = self.sequence_number
        self.sequence_number += 1
        return sse(kind, {"type": kind, "sequence_number": number, **fields})

    def add(self, events: Sequence[Event], tokens: Sequence[ScoredToken]) -> bytes:
        """Take what an output adds to the answer. Log-probabilities are those of the text."""
        told = b""
        if self._wants_logprobs:
            self._next_scores += [scored_token(token) for token in tokens if not token.is_end]
        for event in events:
            if isinstance(event, Content):
                told += self._open("message") + self._text(event.text, self._next_scores)
                self._next_scores = []
            elif isinstance(event, Reasoning):
                told += self._open("reasoning") + self._text(event.text, [])
            elif isinstance(event, CallBegin):
                told += self.close() + self._begin_call(event)
            elif isinstance(event, ArgumentsDelta):
                told += self._text(event.text, [])
            else:
                told += self.close()
        if events and not isinstance(events[-1], Content):
            self._next_scores = []
        return told

    def close(self, status: str = "completed") -> bytes:
        """End the item that is open, if there is one."""
        if not self._delta_head:
            return b""
        item, text = self.items[-1], "".join(self._pieces)
        place = self._place
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            told = self.event("response.function_call_arguments.done", **place, arguments=text, name=item["name"])
        else:
            part = item["content"][0]
            part["text"] = text
            extra = {}
            if item["type"] == "message":
                part["logprobs"] = extra["logprobs"] = self._scores
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            told = self.event(f"response.{kind}.done", **place, content_index=0, text=text, **extra)
            told += self.event("response.content_part.done", **place, content_index=0, part=part)
        told += self.event("response.output_item.done", output_index=place["output_index"], item=item)
        self._pieces, self._scores, self._delta_head = [], [], b""
        return told

    def close_all(self, finish_reason: str | None) -> bytes:
        """End the response's items: at least one message."""
        told = self._open("message") if not self.items else b""
        return told + self.close("incomplete" if finish_reason == "length" else "completed")

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _open(self, kind: str) -> bytes:
        """Begin a message, or reasoning, unless that is open."""
        if self._delta_head and self.items[-1]["type"] == kind:
            return b""
        told = self.close()
        is_message = kind == "message"
        item: dict[str, Any] = {"id": f"{'msg' if is_message else 'rs'}_{secrets.token_hex(16)}", "type": kind}
        item["role" if is_message else "summary"] = "assistant" if is_message else []
        part: dict[str, Any] = {"type": "output_text" if is_message else "reasoning_text", "text": ""}
        if is_message:
            part |= {"annotations": [], "logprobs": []}
        self.items.append(item | {"status": "in_progress", "content": []})
        told += self._added(self.items[-1])
        told += self.event("response.content_part.added", **self._place, content_index=0, part=part)
        self.items[-1]["content"] = [part]
        text_kind = "output_text" if is_message else "reasoning_text"
        self._delta_head = self._head(f"response.{text_kind}.delta", {"content_index": 0})
        return told

    def _begin_call(self, begin: CallBegin) -> bytes:
        item = {"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", "call_id": self._prepared.call_id(begin)}
        self.items.append(item | {"name": begin.name, "arguments": "", "status": "in_progress"})
        self._delta_head = self._head("response.function_call_arguments.delta", {})
        return self._added(self.items[-1])

    def _added(self, item: dict[str, Any]) -> bytes:
        return self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _head(self, kind: str, fields: dict[str, Any]) -> bytes:
        """The part of a delta's event before its log-probabilities, number and text."""
        return sse(kind, {"type": kind, **self._place, **fields}).rstrip(b"}\n")

    def _text(self, text: str, scores: list[dict[str, Any]]) -> bytes:
        self._pieces.append(text)
        self._scores += scores
        logprobs = b""
        if self.items[-1]["type"] == "message":
            logprobs = b',"logprobs":' + (_encode(scores) if scores else b"[]")
        number = b',"sequence_number":%d,"delta":' % self.sequence_number
        self.sequence_number += 1
        return self._delta_head + logprobs + number + _encode(text) + b"}\n\n"


class _Response:
    """A request under way."""

    def __init__(
        self,
        server: ServerState,
        body: ResponsesBody,
        generation: Generation,
        prepared: PreparedConversation,
        params: SamplingParams,
    ):
        self.generation = generation
        self._body = body
        self._prepared = prepared
        texts = server.token_texts if body.wants_logprobs else None
        self._answer = prepared.answer(ending(server, (), body, params), texts)
        self._items = _Items(prepared, body.wants_logprobs)
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or server.model_name,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": _format(body)},
            "tool_choice": "auto" if body.tool_choice is None else _dump(body.tool_choice),
            "tools": [_dump(tool) for tool in body.functions],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response as it is now."""
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = None if status == "in_progress" else self._usage()
        return {
            **self._head,
            "status": status,
            "error": error,
            "incomplete_details": reason,
            "output": self._items.items if status != "in_progress" else [],
            "usage": usage,
        }

    def _usage(self) -> dict[str, Any]:
        reasoning = "".join(i["content"][0]["text"] for i in self._items.items if i["type"] == "reasoning")
        num_reasoning = len(self._prepared.tokenizer.encode(reasoning, add_special_tokens=False)) if reasoning else 0
        answer = self._answer
        return TokenUsage(
            len(self._prepared.prompt.token_ids), answer.completion.num_tokens, answer.num_cached, num_reasoning
        ).responses()

    @property
    def _status(self) -> str:
        return "incomplete" if self._answer.finish_reason == "length" else "completed"

    async def whole(self) -> dict[str, Any]:
        """The response, when the answer has ended."""
        async for output in self.generation:
            new = self._answer.read(self.generation, output)
            self._items.add(new.events, new.tokens)
        self._items.close_all(self._answer.finish_reason)
        return self._response(self._status)

    async def stream(self, stream: EventStream) -> bytes:
        """The response as events."""
        items = self._items
        try:
            begin = items.event("response.created", response=self._response("in_progress"))
            await stream.write(begin + items.event("response.in_progress", response=self._response("in_progress")))
            async for output in self.generation:
                new = self._answer.read(self.generation, output)
                if told_events := items.add(new.events, new.tokens):
                    await stream.write(told_events)
            end = items.close_all(self._answer.finish_reason)
            status = self._status
            return end + items.event(f"response.{status}", response=self._response(status))
        except Exception as exception:
            error = told(exception)
            event = items.event("error", code=error.code, message=error.message, param=error.param)
            failed = self._response("failed", {"code": "server_error", "message": error.message})
            return event + items.event("response.failed", response=failed)


def _format(body: ResponsesBody) -> Any:
    form = None if body.text is None else body.text.format
    return {"type": "text"} if form is None else _dump(form)


def _dump(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump(by_alias=True, exclude_none=True)


ENDPOINT = Endpoint("/v1/responses", ResponsesBody, _prepare)
"""The interface, for HTTP and for callers in this process."""
