"""Gives each request that works with the model a record, for metrics and log, and an id that its answer names."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import path_of
from .event_stream import RAW_SEND
from .request_record import Observer, RequestRecord

_RECORD = "bminf_lite.record"
CLIENT_CLOSED_REQUEST = 499
"""What the log calls the status of a request whose client has gone before the answer began; nginx calls it so too."""


def record_of(request: Request) -> RequestRecord:
    """The record of a request."""
    record = request.scope[_RECORD]
    assert isinstance(record, RequestRecord)
    return record


class Recorder:
    """An ASGI application around another, which records its POST requests and those that are refused.

    With ``by_key`` a client is known by its key, which each then needs, else by its address.
    """

    def __init__(self, app: ASGIApp, observer: Observer, model: str, paths: Iterable[str], by_key: bool = False):
        self._app = app
        self._observer = observer
        self._model = model
        self._paths = frozenset(paths)
        self._by_key = by_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Record a request, and pass it on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        path = path_of(scope)
        route = path if path in self._paths else "unknown"  # what a client makes up does not go into a log
        record = scope[_RECORD] = self._observer.begin(
            route, secrets.token_hex(16), self._model, self._client_of(scope)
        )
        status = CLIENT_CLOSED_REQUEST

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.request_id.encode())]
            await send(message)

        scope[RAW_SEND] = send
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            record.end(status)

    def _client_of(self, scope: Scope) -> str:
        if self._by_key:
            headers = dict(scope["headers"])
            return (headers.get(b"authorization") or headers.get(b"x-api-key") or b"").decode("latin-1")
        return scope["client"][0] if scope.get("client") else ""
