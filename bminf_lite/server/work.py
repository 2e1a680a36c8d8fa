"""A request that generates, while it is under way, and its answer: whole, or as a stream of events."""

from __future__ import annotations

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from .client import Generation
from .event_stream import EventStream, EventStreamResponse, cancelled_on_disconnect
from .health import json_response


class Work(Protocol):
    """What an interface makes of a generation."""

    generation: Generation

    async def whole(self) -> dict[str, Any]:
        """The response, when all completions have ended."""
        ...

    async def stream(self, stream: EventStream) -> None:
        """Write the response as events, an error included."""
        ...


async def respond(work: Work, request: Request, is_streamed: bool | None) -> Response:
    """The answer to a request whose body was read. The generation is cancelled when the client goes away."""
    if is_streamed:
        return EventStreamResponse(work.generation, work.stream)
    async with work.generation, cancelled_on_disconnect(request.receive, work.generation):
        return json_response(await work.whole())
