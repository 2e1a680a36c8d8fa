"""Responses of server-sent events. A chunk goes to ASGI's ``send`` directly; a token needs no task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .client import EngineClient, Generation

T = TypeVar("T")

RAW_SEND = "bminf_lite.send"
"""The key of a scope under which the outermost application leaves the server's own ``send``.

Chunks go there directly. The layers between only have to see that a response starts and ends.
"""


class EventStream:
    """What a streaming response writes to."""

    def __init__(self, send: Send):
        self._send = send

    async def write(self, chunk: bytes) -> None:
        """Send bytes, which hold whole events (``data: ...`` and an empty line).

        Returns when the connection can take more, so a slow client's tokens are joined while this waits.
        """
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})


class EventStreamResponse(Response):
    """A response that ``write_events`` writes. The generation is cancelled when the client goes away.

    ``write_events`` returns the last bytes of the stream, which are sent together with the end of the response.
    """

    def __init__(
        self,
        generation: Generation,
        write_events: Callable[[EventStream], Awaitable[bytes]],
        headers: dict[str, str] | None = None,
    ):
        super().__init__(headers={"cache-control": "no-cache", **(headers or {})}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._generation = generation
        self._write_events = write_events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers and the events."""
        with suppress(ClientDisconnect):
            async with self._generation, cancelled_on_disconnect(receive, self._generation):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                end = await self._write_events(EventStream(scope.get(RAW_SEND, send)))
                await send({"type": "http.response.body", "body": end, "more_body": False})


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Cancel a generation, which ends its iteration, when the client goes away. The request's body must be read.

    Raises ``ClientDisconnect`` at the end if the client has gone.
    """
    watcher = asyncio.ensure_future(_watch(receive, generation))
    try:
        yield
    finally:
        watcher.cancel()
    if watcher.done():
        raise ClientDisconnect


async def unless_in_vain(engine: EngineClient, request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away or the engine ends. The body must be read.

    Raises ``ClientDisconnect`` if the client has gone before, and ``EngineFailure`` if the engine has ended.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((task, watcher, engine.has_ended), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            engine.require_engine()
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def answered(request: Request, answer: asyncio.Future[T]) -> T:
    """The result of ``answer``, which is cancelled when the client goes away. The body must be read.

    Raises ``ClientDisconnect`` if the client has gone before. It takes one task less than :func:`unless_in_vain`.
    """
    watcher = asyncio.ensure_future(_gone(request.receive))
    watcher.add_done_callback(lambda _: answer.cancel())
    try:
        return await answer
    except asyncio.CancelledError:
        if watcher.done():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _watch(receive: Receive, generation: Generation) -> None:
    await _gone(receive)
    generation.cancel()
