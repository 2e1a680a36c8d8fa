"""A request that generates, while it is under way, and its answer: whole, or as a stream of events."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .client import Generation
from .errors import api_error
from .event_stream import EventStream, EventStreamResponse, cancelled_on_disconnect, unless_in_vain
from .health import json_response
from .recorder import record_of
from .request_record import RequestRecord
from .schemas.base import parse
from .schemas.chat import ChatBody
from .schemas.completions import CompletionBody
from .schemas.responses import ResponsesBody
from .state import ServerState

B = TypeVar("B", ChatBody, CompletionBody, ResponsesBody)


class Work(Protocol):
    """What an interface makes of a generation."""

    generation: Generation

    async def whole(self) -> dict[str, Any]:
        """The response, when all completions have ended."""
        ...

    async def stream(self, stream: EventStream) -> bytes:
        """Write the response as events, and return the last of them, or an error."""
        ...


async def respond(work: Work, request: Request, is_streamed: bool | None) -> Response:
    """The answer to a request whose body was read. The generation is cancelled when the client goes away."""
    if is_streamed:
        return EventStreamResponse(work.generation, work.stream)
    async with work.generation, cancelled_on_disconnect(request.receive, work.generation):
        return json_response(await work.whole())


@dataclass(frozen=True)
class Endpoint(Generic[B]):
    """An interface that generates: its path, its body, and ``prepare``, which checks and submits a request."""

    path: str
    body_type: type[B]
    prepare: Callable[[ServerState, B, RequestRecord], Coroutine[Any, Any, Work]]

    def route(self, server: ServerState) -> Route:
        """The POST route."""

        async def handle(request: Request) -> Response:
            body = parse(self.body_type, await request.body())
            work = await unless_in_vain(server.client, request, self.prepare(server, body, record_of(request)))
            return await respond(work, request, body.stream)

        return Route(self.path, handle, methods=["POST"])

    async def answer(self, server: ServerState, body: bytes) -> dict[str, Any]:
        """The whole response to a body, without HTTP. Cancelling the task cancels the generation.

        Raises ``ApiError`` or ``BminfError`` where a client would get an error.
        """
        record = server.observer.begin(self.path, secrets.token_hex(16), server.model_name)
        status = 500
        try:
            work = await self.prepare(server, parse(self.body_type, body), record)
            async with work.generation:
                response = await work.whole()
            status = 200
            return response
        except Exception as error:
            status = api_error(error).status
            raise
        finally:
            record.end(status)
