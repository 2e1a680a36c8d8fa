"""``/v1/chat/completions``: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import Route

from ...engine.sampling_params import SamplingParams
from ...text.reasoning import Content, Reasoning
from ...text.text_stream import ScoredToken
from ...text.tool_calls import ArgumentsDelta, CallBegin, CallEnd
from ..answer import Event, call_number
from ..client import Generation, Output
from ..conversation import Conversation, PreparedConversation, prepare
from ..event_stream import EventStream
from ..generating import check_count, check_model, ending, generation_request, sampling_params
from ..request_record import RequestRecord
from ..schemas.chat import ChatBody
from ..schemas.messages import plain_tool
from ..state import ServerState
from ..work import Endpoint
from .chunks import TokenUsage, chunk_end, head, reports_usage, scored_token, write_chunks

_encode = msgspec.json.encode


def routes(server: ServerState) -> list[Route]:
    """The route."""
    return [ENDPOINT.route(server)]


async def _prepare(server: ServerState, body: ChatBody, record: RequestRecord) -> _Chat:
    """Check a request as far as HTTP can, and submit it."""
    adapter = check_model(server, body.model)
    check_count(server, "n", body.n or 1)
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(server, body, getattr(body, field), field, logprobs)
    conversation = Conversation(
        [message.plain() for message in body.messages],
        [plain_tool(tool.function) for tool in body.tools or ()],
        body.choice,
        body.structures,
        body.template_variables,
        body.parallel_tool_calls is not False,
        body.separate_reasoning is not False,
        bool(body.continue_final_message),
        body.add_generation_prompt is not False,
        bool(body.add_special_tokens),
        body.split_special_tokens,
    )
    prepared = await prepare(server, conversation, record.client)
    request = generation_request(
        adapter,
        prepared.prompt,
        params,
        body,
        body.n or 1,
        grammar=prepared.grammar,
        is_streamed=body.stream,
        ends_by_text=prepared.ends_by_text(body.stop),
    )
    return _Chat(server, body, await server.client.generate(request, record=record), prepared, params)


class _Chat:
    """A request under way."""

    def __init__(
        self,
        server: ServerState,
        body: ChatBody,
        generation: Generation,
        prepared: PreparedConversation,
        params: SamplingParams,
    ):
        self.generation = generation
        self._body = body
        self._prepared = prepared
        texts = server.token_texts if body.logprobs else None
        self._answers = [prepared.answer(ending(server, body.stop, body, params), texts) for _ in range(body.n or 1)]
        self._shows_reasoning = body.include_reasoning is not False
        self._head = head("chatcmpl", "chat.completion", body.model or server.model_name)

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens so far."""
        generated = sum(answer.completion.num_tokens for answer in self._answers)
        return TokenUsage(len(self._prepared.prompt.token_ids), generated, self._answers[0].num_cached).openai()

    async def whole(self) -> dict[str, Any]:
        """The response, when all answers have ended."""
        events: list[list[Event]] = [[] for _ in self._answers]
        tokens: list[list[ScoredToken]] = [[] for _ in self._answers]
        async for output in self.generation:
            new = self._answers[output.index].read(self.generation, output)
            events[output.index] += new.events
            tokens[output.index] += new.tokens
        choices = [
            {
                "index": index,
                "message": self._message(events[index]),
                "logprobs": self._logprobs(tokens[index]),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for index, answer in enumerate(self._answers)
        ]
        return {**self._head, "choices": choices, "usage": self.usage}

    def _message(self, events: Sequence[Event]) -> dict[str, Any]:
        content = "".join(event.text for event in events if isinstance(event, Content))
        calls = [
            {
                "id": self._prepared.call_id(begin),
                "type": "function",
                "function": {"name": begin.name, "arguments": arguments_of(events, call_number(begin))},
            }
            for begin in events
            if isinstance(begin, CallBegin)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        if reasoning and self._shows_reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        """OpenAI's form. The end-of-sequence token is no part of the content."""
        if not self._body.logprobs:
            return None
        return {"content": [scored_token(token) for token in tokens if not token.is_end], "refusal": None}

    async def stream(self, stream: EventStream) -> bytes:
        """The response as events. A chunk of content is bytes around the text."""
        has_usage = reports_usage(self._body.stream_options)
        self._head["object"] = "chat.completion.chunk"
        start = b"data: " + _encode(self._head)[:-1] + b',"choices":[{"index":'
        heads = [start + b'%d,"delta":' % index for index in range(len(self._answers))]
        end = chunk_end(self._body.stream_options, lambda: self.usage)
        has_begun = [False] * len(self._answers)

        def chunk(output: Output) -> bytes:
            index, answer = output.index, self._answers[output.index]
            new = answer.read(self.generation, output)
            tail = b',"logprobs":null,"finish_reason":null}]' + end()
            deltas = [delta for event in new.events if (delta := self._delta(event))]
            begin = b"" if has_begun[index] else heads[index] + b'{"role":"assistant","content":""}' + tail
            has_begun[index] = True
            if self._body.logprobs and (deltas or any(not token.is_end for token in new.tokens)):
                scores = b',"logprobs":' + _encode(self._logprobs(new.tokens))
                first = deltas.pop(0) if deltas else b'{"content":""}'
                begin += heads[index] + first + scores + b',"finish_reason":null}]' + end()
            chunks = b"".join([begin, *(heads[index] + delta + tail for delta in deltas)])
            if new.finish_reason is None:
                return chunks
            ended = (new.finish_reason, answer.stop_reason)
            reason = b',"finish_reason":%b,"stop_reason":%b}]' % tuple(map(_encode, ended))
            return chunks + heads[index] + b'{},"logprobs":null' + reason + end()

        def last() -> dict[str, Any]:
            return {**self._head, "choices": [], "usage": self.usage} if has_usage else {}

        return await write_chunks(stream, self.generation, chunk, last)

    def _delta(self, event: Event) -> bytes:
        """The ``delta`` of a chunk; empty for what has no chunk."""
        if isinstance(event, Content):
            return b'{"content":' + _encode(event.text) + b"}"
        if isinstance(event, Reasoning):
            return b'{"reasoning_content":' + _encode(event.text) + b"}" if self._shows_reasoning else b""
        if isinstance(event, CallEnd):
            return b""
        call: dict[str, Any] = {"index": call_number(event)}
        if isinstance(event, ArgumentsDelta):
            call["function"] = {"arguments": event.text}
        else:
            function = {"name": event.name, "arguments": ""}
            call |= {"id": self._prepared.call_id(event), "type": "function", "function": function}
        return _encode({"tool_calls": [call]})


def arguments_of(events: Sequence[Event], number: int) -> str:
    """The whole arguments of a call."""
    return "".join(event.text for event in events if isinstance(event, ArgumentsDelta) and call_number(event) == number)


ENDPOINT = Endpoint("/v1/chat/completions", ChatBody, _prepare)
"""The interface, for HTTP and for callers in this process."""
