"""httptools' parser of requests, for a server that never changes to another protocol."""

from __future__ import annotations

from typing import Any

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")


class RequestParser:
    """Parses requests and calls ``protocol``, as ``httptools.HttpRequestParser`` does, but ignores wishes to upgrade.

    A server that does not upgrade a request answers it as any other (RFC 9110, section 7.8). httptools stops at the end
    of the headers of a request that asks for an upgrade, because another protocol might follow. Here a new parser then
    reads the body. It is given a head that has nothing but the length of that body.
    """

    def __init__(self, protocol: Any):
        self._protocol = protocol
        self._framing: list[bytes] = []
        self._skips_head = False
        self._parser = self._new_parser()

    def feed_data(self, data: bytes) -> None:
        """Parse what arrived. Raises ``httptools.HttpParserError`` for what is not HTTP."""
        while data:
            data = self._feed(data)

    def get_method(self) -> bytes:
        """The method of the request whose headers are complete."""
        method: bytes = self._parser.get_method()
        return method

    def get_http_version(self) -> str:
        """``1.1`` or ``1.0``."""
        version: str = self._parser.get_http_version()
        return version

    def should_keep_alive(self) -> bool:
        """Whether the client keeps the connection open for another request."""
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        """Whether the connection changes its protocol: never."""
        return False

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # the answer to the request before is sent
        return parser

    def _feed(self, data: bytes) -> bytes:
        """Parse up to the headers of a request that asks for an upgrade; returns what follows them."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._read_on()
            return data[stop.args[0] :]
        return b""

    def _read_on(self) -> None:
        connection = b"keep-alive" if self.should_keep_alive() else b"close"
        lines = [b"POST / HTTP/" + self.get_http_version().encode(), *self._framing, b"connection: " + connection]
        self._parser = self._new_parser()
        self._skips_head = True
        self._parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")
        self._skips_head = False

    # -- what httptools calls -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        if not self._skips_head:
            self._framing = []
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Part of the target."""
        if not self._skips_head:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        if not self._skips_head:
            if name.lower() in _FRAMING:
                self._framing.append(name + b": " + value)
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers have ended."""
        if not self._skips_head:
            self._protocol.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        """The request has ended, unless httptools has only stopped before its body."""
        if not self._parser.should_upgrade():
            self._protocol.on_message_complete()
