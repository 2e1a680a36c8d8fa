"""A front process of a server with replicas: it speaks HTTP with clients, and passes requests on to the replicas.

Several such processes share the address; each takes the connections that the system gives it, and spreads their
requests over all replicas by itself. The process that keeps the replicas (:mod:`.replicas`) tells them which ports are
ready, and answers what every replica must be asked. A request costs a front process one read of its body's first
fields, and a chunk of an answer is passed on as it is.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol, cast

import msgspec
import uvloop
from starlette.types import Message, Receive, Scope, Send

from .errors import ApiError
from .http_process import SilentServer, http_config, within_open_files
from .limits import Limits
from .protocol import FrameReader, frame
from .replica_client import (
    Answer,
    Connections,
    MalformedRequest,
    ReplicaFailed,
    request_bytes,
)
from .security import has_key

BEGINNING = 512
"""Bytes of a prompt, as JSON, that choose the replica."""
SPARE_REQUESTS, SPARE_SHARE = 4, 1.25
"""How many more requests than the mean the replica may have that the beginning of a request chooses: all front
processes together ``SPARE_REQUESTS``, and that share if no other replica has had the beginning."""
BEGINNINGS = 1 << 14
"""Beginnings that a front process remembers."""
LOAD_ADAPTER, UNLOAD_ADAPTER, METRICS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/metrics"
TO_ALL = (LOAD_ADAPTER, UNLOAD_ADAPTER, METRICS)
"""Paths of requests that every replica must get."""
_NOT_PASSED_ON = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"date"}
"""Headers of an answer that are between a replica and this process."""
_NOTHING = (b"null", b'""', b"[]", b"{}")


# -- between a front process and the one that keeps the replicas -------------------------------------------------------


class Ports(msgspec.Struct, frozen=True, tag=1):
    """The ports of the replicas, 0 for one that is not ready."""

    ports: list[int]


class Asked(msgspec.Struct, frozen=True, tag=2):
    """A request for all replicas: its path, its body, and the whole as it goes to each."""

    number: int
    path: str
    body: bytes
    request: bytes


class Answered(msgspec.Struct, frozen=True, tag=3):
    """The answer to ``Asked``, or a ``problem`` of the replicas."""

    number: int
    status: int = 0
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    problem: str | None = None


class Refused(msgspec.Struct, frozen=True, tag=4):
    """A replica's port takes no connections."""

    port: int


class End(msgspec.Struct, frozen=True, tag=5):
    """Running requests have ``seconds`` to end; then the process ends."""

    seconds: float


FromKeeper = Ports | Answered | End
FromFront = Asked | Refused


class Keeper(Protocol):
    """The process that keeps the replicas, as a front process sees it."""

    async def ask_all(self, path: str, body: bytes, request: bytes) -> Answer:
        """What all replicas answer. Raises ``ReplicaFailed``."""
        ...

    def refused(self, port: int) -> None:
        """A replica's port takes no connections."""
        ...


# -- requests ----------------------------------------------------------------------------------------------------------


class _Beginning(msgspec.Struct):
    """The fields of a request on which depends what a replica's cache has of it."""

    model: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    texts: msgspec.Raw = msgspec.Raw()


_PROMPTS = [field.name for field in msgspec.structs.fields(_Beginning)[2:]]
_decoder = msgspec.json.Decoder(_Beginning)


def beginning_of(body: bytes) -> bytes | None:
    """What requests have in common whose prompts begin alike; None for a body without a prompt."""
    try:
        value = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # no object, no JSON, or too deep: the replica says so
        return None
    prompts = (memoryview(getattr(value, name)) for name in _PROMPTS)
    prompt = next((p for p in prompts if p and p not in _NOTHING), None)
    if prompt is None:
        return None
    return b"\0".join((memoryview(value.model), memoryview(value.cache_salt), prompt[:BEGINNING]))


@dataclass(eq=False)
class Target:
    """A replica, as a front process sees it. ``active`` are the requests that it answers for this process."""

    number: int
    connections: Connections | None = None
    active: int = 0


class Front:
    """The ASGI application of a front process, of which there are ``processes``."""

    def __init__(
        self, keeper: Keeper, limits: Limits, replicas: int, processes: int = 1, key_digests: Sequence[bytes] = ()
    ):
        self.targets = [Target(number) for number in range(replicas)]
        self._keeper = keeper
        self._limits = limits
        self._key_digests = key_digests
        self._spare = max(SPARE_REQUESTS // processes, 1)
        self._had: OrderedDict[bytes, int] = OrderedDict()  # by beginning, a bit for each replica that has had it

    def set_ports(self, ports: Sequence[int]) -> None:
        """Note which replicas are ready: those whose port is not 0."""
        for target, port in zip(self.targets, ports, strict=True):
            old = target.connections
            if old is not None and old.port != port:
                old.close()
            if not port:
                target.connections = None
            elif old is None or old.port != port:
                most = max(self._limits.connections // len(self.targets), 1)
                target.connections = Connections(port, self._limits.idle_seconds, most)

    def choose(self, beginning: bytes | None) -> Target:
        """The replica for a request. Raises ``ReplicaFailed`` if none is ready.

        The beginning's own replica is the same in all processes. It gets the request unless it has more to do than the
        others; some more, if it alone has the beginning in its cache.
        """
        ready = [target for target in self.targets if target.connections is not None]
        if not ready:
            raise ReplicaFailed("no replica is ready")
        least = min(ready, key=lambda target: target.active)
        if beginning is None:
            return least
        digest = blake2b(beginning, digest_size=8).digest()
        own = max(ready, key=lambda t: blake2b(digest, digest_size=8, salt=t.number.to_bytes(8, "big")).digest())
        had = self._had.pop(digest, 0)
        share = SPARE_SHARE if had == 1 << own.number else 1.0
        mean = sum(target.active for target in ready) / len(ready)
        chosen = own if own.active <= share * mean + self._spare else least
        self._had[digest] = had | 1 << chosen.number
        if len(self._had) > BEGINNINGS:
            self._had.popitem(last=False)
        return chosen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back."""
        assert scope["type"] == "http"
        body: bytes | None = b""
        if not self._key_digests or has_key(self._key_digests, dict(scope["headers"])):
            body = await _body(receive, self._limits.body)
        else:  # a replica says what the path needs, and the connection with the rest of the request is closed
            send = _closing_refused(send)
        try:
            if body is None:
                raise ApiError(413, f"the body has more than {self._limits.body:,} bytes", code="body_too_large")
            request = request_bytes(scope["method"], _target(scope), scope["headers"], body)
            if scope["path"] in TO_ALL:
                await _answer(send, *await self._keeper.ask_all(scope["path"], body, request))
                return
            beginning = beginning_of(body) if body else None
            while not await self._forward(self.choose(beginning), request, receive, send):
                pass
        except ApiError as error:
            await error.response(scope)(scope, receive, send)
        except ReplicaFailed as error:
            await ApiError(503, str(error), code="replica_failed").response(scope)(scope, receive, send)
        except MalformedRequest as error:
            await ApiError(400, str(error)).response(scope)(scope, receive, send)

    async def _forward(self, target: Target, request: bytes, receive: Receive, send: Send) -> bool:
        """Whether the request was answered; not so if the replica had just ended, so that nothing was asked."""
        connections = target.connections
        assert connections is not None
        target.active += 1
        try:
            await _pass_on(connections, request, receive, send)
        except ConnectionRefusedError:
            if target.connections is connections:
                target.connections = None
                self._keeper.refused(connections.port)
            return False
        finally:
            target.active -= 1
        return True


async def _pass_on(connections: Connections, request: bytes, receive: Receive, send: Send) -> None:
    """Send a request to a replica, and its answer to the client, as it comes; if the client goes away, end it.

    Raises ``ConnectionRefusedError`` before anything was asked, ``ReplicaFailed`` before anything was answered, and
    ``ConnectionResetError``, which cuts the client's connection, for an answer that ends early.
    """
    connection = await connections.take()
    gone = asyncio.ensure_future(_disconnected(receive))

    def leave(_: object) -> None:
        connection.close()

    gone.add_done_callback(leave)
    has_begun = is_complete = False
    try:
        connection.send(request)
        await connection.begun()
        headers = [header for header in connection.headers if header[0] not in _NOT_PASSED_ON]
        await send({"type": "http.response.start", "status": connection.status, "headers": headers})
        has_begun = True
        while not is_complete:
            body, is_complete = await connection.read()
            if is_complete:
                gone.remove_done_callback(leave)
                connections.give(connection)
            await send({"type": "http.response.body", "body": body, "more_body": not is_complete})
    except ReplicaFailed:
        if gone.done():
            return
        if has_begun:
            raise ConnectionResetError("a replica ended during an answer") from None
        raise
    finally:
        if not is_complete:
            connection.close()
        gone.remove_done_callback(leave)
        gone.cancel()


def _closing_refused(send: Send) -> Send:
    """``send`` that closes the connection behind a refusal."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return sending


async def _answer(send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
    own = [(name, value) for name, value in headers if name not in _NOT_PASSED_ON and name != b"content-length"]
    own.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive, most: int) -> bytes | None:
    """The body of a request; None if it is longer than ``most`` bytes."""
    pieces, size = [], 0
    while True:
        message = await receive()
        piece = message.get("body", b"")
        pieces.append(piece)
        size += len(piece)
        if size > most:
            return None
        if not message.get("more_body"):
            return b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _target(scope: Scope) -> bytes:
    path: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    return path + (b"?" + query if query else b"")


# -- the process -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrontSettings:
    """The arguments of :class:`Front` in a front process, which reads them from its standard input."""

    limits: Limits
    key_digests: tuple[bytes, ...]
    replicas: int
    processes: int


class KeeperLink(asyncio.Protocol):
    """The socket to the process that keeps the replicas: a :class:`Keeper`."""

    def __init__(self, on_ports: Callable[[Sequence[int]], None], on_end: Callable[[float], None]):
        self._on_ports = on_ports
        self._on_end = on_end
        self._frames = FrameReader(FromKeeper)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._next_number = 0

    async def ask_all(self, path: str, body: bytes, request: bytes) -> Answer:
        """See :class:`Keeper`."""
        number, self._next_number = self._next_number, self._next_number + 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._transport.write(frame(Asked(number, path, body, request)))
        try:
            return await answer
        finally:
            del self._asked[number]

    def refused(self, port: int) -> None:
        """See :class:`Keeper`."""
        self._transport.write(frame(Refused(port)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if isinstance(message, Ports):
                self._on_ports(message.ports)
            elif isinstance(message, End):
                self._on_end(message.seconds)
            elif (answer := self._asked.get(message.number)) is not None and not answer.done():
                if message.problem is None:
                    answer.set_result((message.status, message.headers, message.body))
                else:
                    answer.set_exception(ReplicaFailed(message.problem))

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end(0.0)


async def serve_front(keeper: socket.socket, listener: socket.socket, settings: FrontSettings) -> None:
    """Serve the connections of ``listener`` until the process that keeps the replicas wants an end, or has ended."""
    keeper.setblocking(False)

    def end(seconds: float) -> None:
        config.timeout_graceful_shutdown = math.ceil(seconds)
        server.should_exit = True

    link = KeeperLink(lambda ports: front.set_ports(ports), end)
    front = Front(link, settings.limits, settings.replicas, settings.processes, settings.key_digests)
    config = http_config(front, settings.limits)
    server = SilentServer(config)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=keeper)
    gc.collect()
    gc.freeze()  # what is there now stays, so the collector need not look at it again
    await server.serve(sockets=[listener])


def main() -> None:
    """``python -c ... KEEPER_FD LISTENER_FD``, with :class:`FrontSettings` as MessagePack on stdin."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=FrontSettings)
    settings = replace(settings, limits=within_open_files(settings.limits, files_each=3))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of every client that does not speak HTTP
    keeper, listener = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    uvloop.run(serve_front(keeper, listener, settings))
