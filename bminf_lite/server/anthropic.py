"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's form of conversations."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..text.reasoning import Content, Reasoning
from ..text.tool_calls import ArgumentsDelta, CallBegin
from .answer import Event
from .client import Generation
from .conversation import Conversation, PreparedConversation, prepare
from .event_stream import EventStream, unless_in_vain
from .generating import Ending, ending, generation_request, sampling_params, told
from .health import json_response
from .openai.chunks import sse
from .recorder import record_of
from .schemas.anthropic import CreateMessageBody, MessagesBody
from .schemas.base import parse
from .state import ServerState
from .work import respond

_encode = msgspec.json.encode

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def routes(server: ServerState) -> list[Route]:
    """The routes."""

    async def messages(request: Request) -> Response:
        body = parse(CreateMessageBody, await request.body())
        adapter = server.adapter_of(body.model)
        params = sampling_params(server, body, body.max_tokens, "max_tokens")
        record = record_of(request)
        prepared = await unless_in_vain(server.client, request, prepare(server, _conversation(body), record.client))
        wanted = generation_request(
            adapter, prepared.prompt, params, body, grammar=prepared.grammar, is_streamed=body.stream
        )
        work = _Message(
            body,
            ending(server, body.stop_sequences, body, params),
            await server.client.generate(wanted, record=record),
            prepared,
            body.model or server.model_name,
        )
        return await respond(work, request, body.stream)

    async def count_tokens(request: Request) -> Response:
        conversation = _conversation(parse(MessagesBody, await request.body()))
        prepared = await unless_in_vain(
            server.client, request, prepare(server, conversation, record_of(request).client)
        )
        return json_response({"input_tokens": len(prepared.prompt.token_ids)})

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


def _conversation(body: MessagesBody) -> Conversation:
    choice = body.tool_choice
    messages = body.plain_messages
    last = messages[-1]
    return Conversation(
        messages,
        [tool.plain() for tool in body.functions],
        body.choice,
        body.structures,
        body.template_variables,
        choice is None or not choice.disable_parallel_tool_use,
        continues_last=last["role"] == "assistant" and "tool_calls" not in last,
        split_special_tokens=body.split_special_tokens,
    )


class _Blocks:
    """The content blocks of a message while it arrives, and the events that tell of them."""

    def __init__(self, prepared: PreparedConversation):
        self.blocks: list[dict[str, Any]] = []
        self._prepared = prepared
        self._pieces: list[str] = []
        self._is_open = False

    def add(self, events: Sequence[Event]) -> bytes:
        """Take what an output adds to the answer."""
        told_events = b""
        for event in events:
            if isinstance(event, Content):
                told_events += self._open("text") + self._delta("text_delta", "text", event.text)
            elif isinstance(event, Reasoning):
                told_events += self._open("thinking") + self._delta("thinking_delta", "thinking", event.text)
            elif isinstance(event, CallBegin):
                told_events += self.close() + self._begin(
                    {"type": "tool_use", "id": self._prepared.call_id(event), "name": event.name}
                )
            elif isinstance(event, ArgumentsDelta):
                told_events += self._delta("input_json_delta", "partial_json", event.text)
            else:
                told_events += self.close()
        return told_events

    def close(self) -> bytes:
        """End the block that is open, if there is one."""
        if not self._is_open:
            return b""
        block, text, index = self.blocks[-1], "".join(self._pieces), len(self.blocks) - 1
        told_events = b""
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            delta = {"type": "signature_delta", "signature": ""}
            told_events = sse("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta})
        self._pieces, self._is_open = [], False
        return told_events + sse("content_block_stop", {"type": "content_block_stop", "index": index})

    def _open(self, kind: str) -> bytes:
        """Begin a block of text or thinking, unless it is open."""
        if self._is_open and self.blocks[-1]["type"] == kind:
            return b""
        return self.close() + self._begin({"type": kind} | ({"signature": ""} if kind == "thinking" else {}))

    def _begin(self, block: dict[str, Any]) -> bytes:
        empty: dict[str, Any] = {"input": {}} if block["type"] == "tool_use" else {block["type"]: ""}
        self.blocks.append(block)
        self._is_open = True
        start = {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": {**block, **empty}}
        return sse("content_block_start", start)

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        self._pieces.append(text)
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"'
        return head % (len(self.blocks) - 1) + f'{kind}","{key}":'.encode() + _encode(text) + b"}}\n\n"


def _arguments(text: str) -> Any:
    """A call's arguments as an object. What a model wrote instead of one is kept as text."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"not_json": text}


class _Message:
    """A request under way."""

    def __init__(
        self,
        body: CreateMessageBody,
        ending: Ending,
        generation: Generation,
        prepared: PreparedConversation,
        model: str,
    ):
        self.generation = generation
        self._answer = prepared.answer(ending)
        self._blocks = _Blocks(prepared)
        self._num_prompt = len(prepared.prompt.token_ids)
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}

    def _usage(self) -> dict[str, int]:
        cached = self._answer.num_cached
        return {
            "input_tokens": self._num_prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._answer.completion.num_tokens,
        }

    def _ending(self) -> dict[str, Any]:
        found = self._answer.completion.found_stop if self._answer.finish_reason == "stop" else None
        reason = "stop_sequence" if found is not None else _STOP_REASONS[self._answer.finish_reason or "stop"]
        return {"stop_reason": reason, "stop_sequence": found}

    async def whole(self) -> dict[str, Any]:
        """The response, when the answer has ended."""
        async for output in self.generation:
            self._blocks.add(self._answer.read(self.generation, output).events)
        self._blocks.close()
        return {**self._head, "content": self._blocks.blocks, **self._ending(), "usage": self._usage()}

    async def stream(self, stream: EventStream) -> bytes:
        """The response as events."""
        has_begun = False
        try:
            async for output in self.generation:
                new = self._answer.read(self.generation, output)
                told_events = self._blocks.add(new.events)
                if not has_begun:
                    told_events, has_begun = self._start() + told_events, True
                if told_events:
                    await stream.write(told_events)
            usage = self._usage()
            delta = {"type": "message_delta", "delta": self._ending(), "usage": usage}
            end = self._blocks.close() + sse("message_delta", delta)
            return end + sse("message_stop", {"type": "message_stop"})
        except Exception as exception:
            return b"event: error\ndata: " + told(exception).anthropic_body() + b"\n\n"

    def _start(self) -> bytes:
        empty: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage() | {"output_tokens": 0},
        }
        return sse("message_start", {"type": "message_start", "message": {**self._head, **empty}})
