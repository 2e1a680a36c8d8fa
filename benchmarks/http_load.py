"""A load on a server: many requests at once, each over a connection of its own, with as little work as asyncio allows.

A load client runs in processes of its own, so that it takes no time from the server. The times that it reports are
those of ``time.perf_counter``, which all processes of a machine share on Linux.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_TAIL_BYTES = 512
"""The last bytes of an answer, which are kept: they hold its usage and its end."""
_CONNECTING = 32
"""Connections that a client opens at a time."""


class Exchange(asyncio.Protocol):
    """One request and its answer, whose connection is closed at the end.

    ``started``, ``first`` and ``ended`` are the times when the request was sent, and when the first event of a stream
    and the end of the answer came.
    """

    def __init__(self, request: bytes):
        self.num_events = 0
        self.num_bytes = 0
        self.started = 0.0
        self.first = 0.0
        self.ended = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._head = b""
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def send(self) -> None:
        """Send the request."""
        self.started = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._head = self._head or data[:64]
        self.num_bytes += len(data)
        if events := data.count(b"data: {"):
            self.first = self.first or time.perf_counter()
            self.num_events += events
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if b"data: [DONE]" in self._tail:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    @property
    def num_tokens(self) -> int:
        """The completion's tokens, as the answer's usage says."""
        found = _COMPLETION_TOKENS.search(self._tail)
        return int(found[1]) if found else 0

    def _end(self) -> None:
        if self.done.done():
            return
        self.ended = time.perf_counter()
        if b" 200 " in self._head and (self.first == 0 or b"[DONE]" in self._tail):
            self.done.set_result(None)
        else:
            self.done.set_exception(ConnectionError(f"the server's answer is {self._head!r} ... {self._tail!r}"))
        self._transport.close()


def completion_request(port: int, body: Mapping[str, Any], keep_alive: bool = False) -> bytes:
    """A request to ``/v1/completions``. The connection ends with the answer unless it is to be kept."""
    content = json.dumps(body).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        f"host: 127.0.0.1:{port}",
        "content-type: application/json",
        f"connection: {'keep-alive' if keep_alive else 'close'}",
        f"content-length: {len(content)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + content


async def connect(port: int, requests: Sequence[bytes]) -> list[Exchange]:
    """An open connection for each request, made in groups that fit a system's shortest queue of new connections."""
    loop = asyncio.get_running_loop()
    exchanges: list[Exchange] = []
    for first in range(0, len(requests), _CONNECTING):
        made = await asyncio.gather(
            *(
                loop.create_connection(lambda request=request: Exchange(request), "127.0.0.1", port)  # type: ignore[misc]
                for request in requests[first : first + _CONNECTING]
            )
        )
        exchanges += [exchange for _, exchange in made]
    return exchanges


async def run(exchanges: Sequence[Exchange]) -> None:
    """Send all requests at once, and wait for all answers. Raises ``ConnectionError`` for one that is not whole."""
    for exchange in exchanges:
        exchange.send()
    await asyncio.gather(*(exchange.done for exchange in exchanges))
