"""HTTP/1.1 to the replicas of a server, with little work for a request: connections that are kept, and one write each.

An answer is passed on as it arrives. What arrives while its reader is busy is joined, so that a reader that is behind
has fewer and longer pieces; beyond :data:`MOST_WAITING` bytes the connection is read no more until they are taken.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import cast

import httptools

from ..errors import BminfError

Headers = Sequence[tuple[bytes, bytes]]
Answer = tuple[int, Headers, bytes]
"""A status, headers and a body."""
MOST_WAITING = 1 << 18
CONNECTING = 64
"""Connections to one replica that are opened at a time: more might not fit the system's queue of new ones."""
_NOT_PASSED_ON = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"content-length", b"expect"}
"""Headers of a request that are between a client and the server that it reaches."""


class ReplicaFailed(BminfError):
    """A replica does not answer, or ended while it did."""


class MalformedRequest(BminfError):
    """A request that would not be one any more if it were passed on."""


def request_bytes(method: str, target: bytes, headers: Headers = (), body: bytes = b"") -> bytes:
    """A request as it goes to a replica. Raises ``MalformedRequest`` for a line break where none may be.

    HEAD becomes GET: the answer's headers are the same, and its reader drops the body.
    """
    lines = [b"%s %s HTTP/1.1" % (b"GET" if method == "HEAD" else method.encode(), target)]
    lines += [name + b": " + value for name, value in headers if name not in _NOT_PASSED_ON]
    if not any(name == b"host" for name, _ in headers):
        lines.append(b"host: 127.0.0.1")
    lines.append(b"content-length: %d\r\n\r\n" % len(body))
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1 or b"\0" in head:
        raise MalformedRequest("the request is not HTTP: a line of its head has a character that none may have")
    return head + body


class ReplicaConnection(asyncio.Protocol):
    """One connection to a replica, for one request at a time: :meth:`send`, :meth:`begun`, and :meth:`read`.

    ``status`` and ``headers`` are those of the answer that has begun.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_open = False
        self.idle_since = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._size = 0
        self._has_begun = False
        self._is_complete = True
        self._is_kept = False
        self._is_paused = False
        self._reader: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    def send(self, request: bytes) -> None:
        """Send a request. The answer to the one before must have been read."""
        self.headers, self._has_begun, self._is_complete = [], False, False
        self._transport.write(request)

    async def begun(self) -> None:
        """Wait until the answer has begun. Raises ``ReplicaFailed``."""
        while not self._has_begun:
            await self._arrival()

    async def read(self) -> tuple[bytes, bool]:
        """What has arrived of the body since the last call, at least a byte or its end; whether that is all.

        Raises ``ReplicaFailed``.
        """
        while not self._pieces and not self._is_complete:
            await self._arrival()
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._size = [], 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return body, self._is_complete

    @property
    def can_be_kept(self) -> bool:
        """Whether another request can be sent: the last one's answer is complete, and the replica keeps it open."""
        return self.is_open and self._is_complete and self._is_kept

    def close(self) -> None:
        """Close it, which ends what the replica does for an answer that is not complete."""
        self.is_open = False
        self._transport.abort()
        self._wake()

    async def _arrival(self) -> None:
        if not self.is_open:
            raise ReplicaFailed("the replica that answered this request has ended; send the request again")
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- what asyncio calls -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._wake()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            return
        if self._size > MOST_WAITING and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    # -- what httptools calls -----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status, self._has_begun = self._parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        self._is_complete, self._is_kept = True, bool(self._parser.should_keep_alive())


async def connect(port: int) -> ReplicaConnection:
    """A new connection. Raises ``ConnectionRefusedError`` if nothing listens there, ``ReplicaFailed`` otherwise."""
    try:
        _, made = await asyncio.get_running_loop().create_connection(ReplicaConnection, "127.0.0.1", port)
    except ConnectionRefusedError:
        raise
    except OSError as error:
        problem = error.strerror or error
        raise ReplicaFailed(f"the replica cannot be reached ({problem}); send the request again") from None
    return made


class Connections:
    """The connections to the replica at a port, of which ``most`` are kept while they are idle.

    The replica closes a connection after ``idle_seconds``; here it counts as old after half of them, so that no request
    meets its end.
    """

    def __init__(self, port: int, idle_seconds: float, most: int):
        self.port = port
        self._idle: deque[ReplicaConnection] = deque(maxlen=most)
        self._idle_seconds = idle_seconds / 2
        self._opening = asyncio.Semaphore(CONNECTING)

    async def take(self) -> ReplicaConnection:
        """A connection for a request; :meth:`give` it back. Raises what :func:`connect` does."""
        oldest = time.monotonic() - self._idle_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since > oldest:
                return connection
            connection.close()
        async with self._opening:
            return await connect(self.port)

    def give(self, connection: ReplicaConnection) -> None:
        """Take a connection back, to be used again if it can be."""
        if not connection.can_be_kept or len(self._idle) == self._idle.maxlen:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def close(self) -> None:
        """Close those that are idle."""
        while self._idle:
            self._idle.pop().close()


async def ask(port: int, request: bytes) -> Answer:
    """A replica's whole answer, over a connection of its own. Raises what :func:`connect` does."""
    connection = await connect(port)
    try:
        connection.send(request)
        await connection.begun()
        pieces, is_complete = [], False
        while not is_complete:
            piece, is_complete = await connection.read()
            pieces.append(piece)
        return connection.status, connection.headers, b"".join(pieces)
    finally:
        connection.close()
