"""uvicorn's HTTP protocol with the bounds that it does not have: on headers, on time, and on connections.

It also answers requests of HTTP/1.0 and requests that ask for an upgrade as HTTP demands.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .errors import ApiError
from .http_parser import RequestParser
from .limits import Limits

_ANSWER_SECONDS = 1.0
"""How long the answer to a refused connection may take to leave."""


class _UnchunkedCycle(RequestResponseCycle):
    """A request of HTTP/1.0 and its answer. An answer without a length ends with the connection (RFC 9112, 6.1)."""

    _is_unframed = False

    async def send(self, message: Any) -> None:
        """Send the start of the answer, or a part of its body."""
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._is_unframed = b"content-length" not in names
            self.chunked_encoding = False if self._is_unframed else None
        elif self._is_unframed:
            self.expected_content_length = len(message.get("body", b""))  # of this part: uvicorn counts
        await super().send(message)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. :func:`bounded_protocol` sets ``limits``.

    One timer at a time watches the client: for the end of the headers, then for the end of the body. Another one runs
    while the client reads nothing of what waits for it.
    """

    limits: Limits

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.parser: Any = RequestParser(self)
        self._header_bytes = 0
        self._is_reading_headers = True
        self._request_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a connection over the bound, and give the client time for its first request."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(ApiError(503, "too many connections are open: try again later", code="too_many_connections"))
            return
        self._watch_request(self.limits.header_seconds, "the request's headers")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._unwatch_request()
        self._unwatch_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, within the bound on headers."""
        if self.transport.is_closing():
            return
        if self._is_reading_headers and self._request_timer is None:  # the first bytes after an idle time
            self._watch_request(self.limits.header_seconds, "the request's headers")
        if self._is_reading_headers:
            self._header_bytes += len(data)
        super().data_received(data)  # sets the count to 0 if the headers end in these bytes
        if self._header_bytes > self.limits.headers:
            self._refuse(ApiError(431, f"the headers are longer than {self.limits.headers:,} bytes"))

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_reading_headers = True

    def on_headers_complete(self) -> None:
        """Pass the request on if its headers are within the bound, and wait for its body."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.headers:
            self._refuse(ApiError(431, f"the headers are longer than {self.limits.headers:,} bytes"))
            return
        self._is_reading_headers = False
        self._header_bytes = 0
        self._watch_request(self.limits.body_seconds, "the request's body")
        is_new = self.parser.get_http_version() != "1.0"
        self.expect_100_continue &= is_new  # a client of HTTP/1.0 would take it for the answer
        super().on_headers_complete()
        if not is_new:
            self.cycle.__class__ = _UnchunkedCycle  # its task has not begun

    def on_body(self, body: bytes) -> None:
        """Part of a body, unless the request was refused."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request is here."""
        self._unwatch_request()
        self._is_reading_headers = True
        if not self.transport.is_closing():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        self._refuse(ApiError(400, "this is not a valid HTTP request", code="invalid_http"))

    def pause_writing(self) -> None:
        """More waits for the client than it reads: it has some time to read on."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.limits.stalled_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read what waited."""
        self._unwatch_stall()
        super().resume_writing()

    def _watch_request(self, seconds: float, what: str) -> None:
        self._unwatch_request()
        self._request_timer = self.loop.call_later(seconds, self._too_slow, what, seconds)

    def _unwatch_request(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _unwatch_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _too_slow(self, what: str, seconds: float) -> None:
        self._request_timer = None
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self.pipeline or (is_answering and self._is_reading_headers):
            self._watch_request(seconds, what)  # a client may wait for the answer before, and reading may be paused
        else:
            self._refuse(ApiError(408, f"{what} took longer than {seconds:g} seconds", code="timeout"))

    @property
    def _answer_has_begun(self) -> bool:
        """Whether the request that is being read, or the one before it whose answer goes on, has an answer."""
        if self.cycle is None or not self.cycle.response_started:
            return False
        return not (self._is_reading_headers and self.cycle.response_complete)

    def _refuse(self, error: ApiError) -> None:
        """Answer without a route, and close the connection."""
        if self.transport.is_closing():
            return
        if self.pipeline or self._answer_has_begun:
            self.transport.close()  # another answer would be read as part of it
            return
        body = error.body()
        lines = (b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close")
        self.transport.write(STATUS_LINE[error.status] + b"\r\n".join((*lines, b"", body)))
        self.transport.close()
        self.loop.call_later(_ANSWER_SECONDS, self.transport.abort)


def bounded_protocol(limits: Limits) -> type[BoundedHttpProtocol]:
    """The protocol with these limits, as uvicorn takes it: a class."""
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), {"limits": limits})
