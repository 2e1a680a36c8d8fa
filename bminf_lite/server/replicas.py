"""Several servers of one model behind one address: each with GPUs of its own, in processes of its own.

The front process parses HTTP and passes requests on. Requests that begin alike go to the same replica, which has the
beginning in its cache, unless that replica has much more to do than the others. A replica that ends costs the requests
that it was answering, and is started again; it gets the adapters that were loaded meanwhile before it is asked anything
else. Whether a request may be made, and what it may ask, each replica decides. The front process does not read the
body of a request without a key, where one is needed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import math
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import h11
import uvicorn
import uvloop
from starlette.types import Message, Receive, Scope, Send

from ..errors import BminfError
from .errors import ApiError
from .http_process import BACKLOG, SilentServer, within_open_files
from .http_protocol import bounded_protocol
from .limits import Limits
from .listener import Listener
from .security import has_key
from .settings import ServerSettings

BEGINNING = 512
"""Characters of a prompt, as JSON, that choose the replica."""
SPARE_REQUESTS, SPARE_SHARE = 4, 1.25
"""A replica is chosen by the beginning of a request while it has at most ``SPARE_SHARE`` times the mean number of
requests, and ``SPARE_REQUESTS`` more."""
MAX_RESTARTS, RESTART_SECONDS = 5, 120.0
"""A server whose replicas end more than ``MAX_RESTARTS`` times within ``RESTART_SECONDS`` ends too."""
READY_SECONDS = 0.2
"""From one question whether a replica is ready to the next."""
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TO_ALL = (LOAD_ADAPTER, UNLOAD_ADAPTER)
"""Paths of requests that every replica must get."""
PROMPT_FIELDS = ("messages", "prompt", "input", "query", "text", "texts")
PR_SET_PDEATHSIG = 1
"""The number of an operation of Linux's prctl."""
HOP_HEADERS = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"content-length", b"expect"}
PIECE = 1 << 16


Answer = tuple[int, Sequence[tuple[bytes, bytes]], bytes]
"""A status, headers and a body."""


@dataclass(eq=False)
class Replica:
    """A server of its own at a port of this machine."""

    number: int
    command: Sequence[str]
    port: int = 0
    process: asyncio.subprocess.Process | None = None
    is_ready: bool = False
    active: int = 0
    """Requests that it is answering."""


@dataclass(eq=False)
class AdapterChange:
    """A request that the replicas with the numbers ``given`` have answered with success."""

    path: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    given: set[int]


class ReplicaFailed(BminfError):
    """A replica does not answer, or ended while it did."""


@dataclass(eq=False)
class Replicas:
    """The replicas of a server, as an ASGI application. ``log`` is called with messages for the operator.

    ``key_digests`` are those of :class:`.Security`. ``commands`` start a replica each; ``{port}`` in one of their
    arguments stands for the port.
    """

    commands: Sequence[Sequence[str]]
    limits: Limits
    log: Callable[[str], None]
    key_digests: Sequence[bytes] = ()
    replicas: list[Replica] = field(init=False)
    failure: BminfError | None = field(default=None, init=False)
    _exits: deque[float] = field(default_factory=deque, init=False)
    _ends: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)  # of adapters, and of who is ready
    _changes: dict[str, list[AdapterChange]] = field(default_factory=dict, init=False)  # by the adapter's name

    def __post_init__(self) -> None:
        self.replicas = [Replica(number, command) for number, command in enumerate(self.commands)]

    # -- processes ----------------------------------------------------------------------------------------------------

    async def keep(self, replica: Replica) -> None:
        """Run a replica, and start it again whenever it ends, until the server ends."""
        while not self._ends.is_set():
            for changes in self._changes.values():
                for change in changes:
                    change.given.discard(replica.number)
            replica.port = _free_port()
            command = [argument.replace("{port}", str(replica.port)) for argument in replica.command]
            replica.process = await asyncio.create_subprocess_exec(*command, preexec_fn=_end_with_parent())
            if self._ends.is_set():  # after ``stop``, which has not seen this process
                replica.process.terminate()
            asked = asyncio.create_task(self._watch(replica))
            code = await replica.process.wait()
            asked.cancel()
            replica.is_ready = False
            if self._ends.is_set():
                return
            self.log(f"replica {replica.number} has ended with {code}; the requests that it answered are lost")
            now = time.monotonic()
            self._exits.append(now)
            while self._exits[0] < now - RESTART_SECONDS:
                self._exits.popleft()
            if len(self._exits) > MAX_RESTARTS:
                self.failure = BminfError(
                    f"replicas have ended {len(self._exits)} times within {RESTART_SECONDS:g} seconds: the messages "
                    "above say why"
                )
                self._ends.set()

    async def _watch(self, replica: Replica) -> None:
        """Note when a replica is ready, also one that has refused a connection, as long as its process lives."""
        while True:
            await asyncio.sleep(READY_SECONDS)
            if not replica.is_ready:
                with suppress(ReplicaFailed, OSError):
                    status, *_ = await ask(replica.port, "/health/ready")
                    if status == 200:
                        await self._begin(replica)

    async def _begin(self, replica: Replica) -> None:
        """Give a replica the adapters that the others have, and let requests come to it."""
        async with self._changing:
            for name, changes in self._changes.items():
                for change in [change for change in changes if replica.number not in change.given]:
                    status, _, answer = await ask(replica.port, change.path, "POST", change.headers, change.body)
                    if status >= 300 and change.path == LOAD_ADAPTER:
                        problem = answer.decode(errors="replace")
                        self.log(f"replica {replica.number} does not load the adapter {name!r}: {problem}")
                    change.given.add(replica.number)
            replica.is_ready = True
        self.log(f"replica {replica.number} is ready")

    async def stop(self, seconds: float) -> None:
        """End all replicas: those that do not end by themselves are killed after ``seconds``."""
        self._ends.set()
        running = [r.process for r in self.replicas if r.process is not None and r.process.returncode is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        waiting = [asyncio.create_task(process.wait()) for process in running]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)
        for process in running:
            if process.returncode is None:
                process.kill()
                await process.wait()

    # -- requests -----------------------------------------------------------------------------------------------------

    def choose(self, beginning: bytes | None) -> Replica:
        """The replica for a request. Raises ``ReplicaFailed`` if none is ready."""
        ready = [replica for replica in self.replicas if replica.is_ready]
        if not ready:
            raise ReplicaFailed("no replica is ready")
        least = min(ready, key=lambda replica: replica.active)
        if beginning is None:
            return least
        preferred = max(
            ready, key=lambda r: blake2b(beginning, digest_size=8, salt=r.number.to_bytes(8, "big")).digest()
        )
        mean = sum(replica.active for replica in ready) / len(ready)
        return preferred if preferred.active <= SPARE_SHARE * mean + SPARE_REQUESTS else least

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back."""
        assert scope["type"] == "http"
        body: bytes | None = b""
        if has_key(self.key_digests, dict(scope["headers"])):
            body = await _body(receive, self.limits.body)
        else:  # a replica says what the path needs, and the connection with the rest of the request is closed
            send = _closing_refused(send)
        if body is None:
            error = ApiError(413, f"the body has more than {self.limits.body:,} bytes", code="body_too_large")
            await error.response(scope)(scope, receive, send)
            return
        while not await self._answered(scope, body, receive, send):
            pass

    async def _answered(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> bool:
        """Whether the request was answered; not so if the chosen replica had just ended, so that nothing was asked."""
        try:
            if scope["path"] in TO_ALL:
                await self._to_all(body, scope, send)
            elif scope["path"] == "/metrics":
                await self._metrics(scope, send)
            else:
                replica = self.choose(beginning_of(body) if body else None)
                try:
                    await self._forward(replica, scope, body, receive, send)
                except ConnectionRefusedError:
                    replica.is_ready = False
                    return False
        except ReplicaFailed as error:
            await ApiError(503, str(error), code="replica_failed").response(scope)(scope, receive, send)
        except h11.LocalProtocolError as error:
            await ApiError(400, f"the request is not HTTP: {error}").response(scope)(scope, receive, send)
        return True

    async def _forward(self, replica: Replica, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        replica.active += 1
        has_begun = False
        gone = asyncio.create_task(_disconnected(receive))
        try:
            answer = exchange(replica.port, scope["method"], _target(scope), scope["headers"], body)
            async for event in _until(answer, gone):
                if isinstance(event, h11.Response):
                    headers = [(name, value) for name, value in event.headers if name not in HOP_HEADERS - KEPT]
                    await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
                    has_begun = True
                else:
                    await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            if has_begun and not gone.done():
                await send({"type": "http.response.body", "body": b""})
        except ReplicaFailed:
            if not has_begun:
                raise
            # An answer that was begun is cut off, as one of a server that ends.
            raise ConnectionResetError(f"replica {replica.number} ended during an answer") from None
        finally:
            replica.active -= 1
            gone.cancel()

    async def _to_all(self, body: bytes, scope: Scope, send: Send) -> None:
        """Ask every ready replica, and answer as the first that refuses does, or the first."""
        async with self._changing:
            found = await self._ask_all(_target(scope), scope["method"], scope["headers"], body)
            status, headers, answer = next((one for one in found if one[0] >= 300), found[0])
            if status < 300:
                given = {replica.number for replica in self.replicas if replica.is_ready}
                self._note(AdapterChange(scope["path"], scope["headers"], body, given))
        await _answer(send, status, headers, answer)

    def _note(self, change: AdapterChange) -> None:
        """Keep a change for replicas that start later. A new adapter may need the removal of one of its name."""
        fields = json.loads(change.body)
        replaces = change.path == UNLOAD_ADAPTER or fields.get("load_inplace")
        before = [] if replaces else self._changes.get(fields["lora_name"], [])
        self._changes[fields["lora_name"]] = [*before, change]

    async def _metrics(self, scope: Scope, send: Send) -> None:
        """The sums of the replicas' metrics."""
        found = await self._ask_all(_target(scope), "GET", scope["headers"])
        status, headers, _ = found[0]
        texts = [body.decode() for _, _, body in found]
        await _answer(send, status, headers, (summed(texts) if status == 200 else texts[0]).encode())

    async def _ask_all(
        self, target: bytes, method: str, headers: Sequence[tuple[bytes, bytes]], body: bytes = b""
    ) -> list[Answer]:
        """What all ready replicas answer, without those that have just ended. Raises ``ReplicaFailed`` for none."""
        found = []
        for replica in self.replicas:
            if replica.is_ready:
                try:
                    found.append(await ask(replica.port, target, method, headers, body))
                except (ReplicaFailed, OSError):
                    replica.is_ready = False
        if not found:
            raise ReplicaFailed("no replica is ready")
        return found


def _closing_refused(send: Send) -> Send:
    """``send`` that closes the connection behind a refusal."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return sending


KEPT = {b"content-length"}
"""Headers of an answer that are passed on, since its body is."""


async def _answer(send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
    own = [(name, value) for name, value in headers if name not in HOP_HEADERS]
    own.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body})


def beginning_of(body: bytes) -> bytes | None:
    """What requests have in common whose prompts begin alike; None for a body without a prompt."""
    try:
        value = json.loads(body)
        prompt = next((value[name] for name in PROMPT_FIELDS if value.get(name)), None)
        return None if prompt is None else json.dumps(prompt)[:BEGINNING].encode()
    except (AttributeError, ValueError, RecursionError):  # no object, no JSON, or too deep: the replica says so
        return None


def summed(texts: Sequence[str]) -> str:
    """Metrics in Prometheus' text form whose values are the sums of those of the same names and labels."""
    totals: dict[str, float] = {}
    for text in texts:
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                totals[name] = totals.get(name, 0.0) + float(value)
    lines, seen = [], set()
    for line in (line for text in texts for line in text.splitlines()):
        name = line if not line or line.startswith("#") else line.rpartition(" ")[0]
        if name not in seen:
            seen.add(name)
            lines.append(f"{name} {totals[name]:.17g}" if name in totals else name)
    return "\n".join(lines) + "\n"


async def exchange(
    port: int, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> AsyncIterator[Any]:
    """Ask a replica; yields ``h11.Response`` and then ``h11.Data``. Raises ``ReplicaFailed`` if it ends before that."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        raise
    except OSError as error:
        raise ReplicaFailed(
            f"the replica cannot be reached ({error.strerror or error}); send the request again"
        ) from None
    connection = h11.Connection(h11.CLIENT)
    own = [(name, value.strip()) for name, value in headers if name not in HOP_HEADERS]
    own += [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    if not any(name == b"host" for name, _ in own):
        own.append((b"host", b"127.0.0.1"))
    try:
        request = connection.send(h11.Request(method=method, target=target, headers=own))
        writer.write((request or b"") + (connection.send(h11.Data(body)) or b""))
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(PIECE))
            elif isinstance(event, h11.EndOfMessage):
                return
            elif isinstance(event, (h11.Response, h11.Data)):
                yield event
            elif isinstance(event, h11.ConnectionClosed):
                raise ReplicaFailed("the replica that answered this request has ended; send the request again")
    except (OSError, h11.RemoteProtocolError):
        raise ReplicaFailed("the replica that answered this request has ended; send the request again") from None
    finally:
        writer.close()


async def ask(
    port: int, target: str | bytes, method: str = "GET", headers: Sequence[tuple[bytes, bytes]] = (), body: bytes = b""
) -> Answer:
    """The status, headers and body of a replica's answer."""
    status, found, pieces = 0, [], []
    path = target.encode() if isinstance(target, str) else target
    async for event in exchange(port, method, path, headers, body):
        if isinstance(event, h11.Response):
            status, found = event.status_code, list(event.headers)
        else:
            pieces.append(bytes(event.data))
    return status, found, b"".join(pieces)


async def _until(events: AsyncIterator[Any], gone: asyncio.Task[None]) -> AsyncIterator[Any]:
    """Events until there are no more, or the client is gone: the connection to the replica is closed then."""
    iterator, following = aiter(events), None
    try:
        while True:
            following = asyncio.ensure_future(anext(iterator, None))
            await asyncio.wait((following, gone), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            event = following.result()
            if event is None:
                return
            yield event
    finally:
        if following is not None:
            following.cancel()  # unless it is done
        with suppress(RuntimeError):
            await iterator.aclose()  # type: ignore[attr-defined]


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


def _end_with_parent() -> Callable[[], object] | None:
    """What a new process runs so that SIGTERM reaches it when this one is killed; else its GPU would stay taken."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def replica_commands(arguments: Sequence[str], devices: Sequence[str]) -> list[list[str]]:
    """The commands of replicas, one on each of ``devices``, from the ``arguments`` of a ``serve`` that has several."""
    taken = {"--replicas": 1, "--host": 1, "--port": 1, "--device": 1, "--allow-unauthenticated": 0}
    kept: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        name, has_value, _ = argument.partition("=")
        if name not in taken:
            kept.append(argument)
        elif taken[name] and not has_value:
            next(waiting, None)
    own = [sys.executable, "-m", "bminf_lite", *kept, "--host", "127.0.0.1", "--port", "{port}"]
    if any(argument.startswith("--keyless") for argument in kept):
        own += ["--keyless", "/health/ready"]  # which the front process asks
    return [[*own, "--device", device] for device in devices]


def serve_replicas(
    commands: Sequence[Sequence[str]],
    listener: Listener,
    settings: ServerSettings,
    seconds: float,
    log: Callable[[str], None],
) -> None:
    """Serve replicas at a bound address until SIGTERM or SIGINT; see :class:`Replicas`.

    Running requests have ``seconds`` to end then. Raises ``BminfError`` if replicas keep ending.
    """
    uvloop.run(_serve(Replicas(commands, settings.limits, log, settings.security.key_digests), listener, seconds))


async def _serve(app: Replicas, listener: Listener, seconds: float) -> None:
    limits = within_open_files(app.limits, files_each=2)  # each connection may have one to a replica
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of every client that does not speak HTTP
    config = uvicorn.Config(
        app,
        http=bounded_protocol(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(limits.idle_seconds),
        timeout_graceful_shutdown=math.ceil(seconds),
    )
    server = SilentServer(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, app._ends.set)
    listener.listen()
    app.log(f"{len(app.replicas)} replicas are served at {listener.url}")
    keepers = [asyncio.create_task(app.keep(replica)) for replica in app.replicas]
    serving = asyncio.create_task(server.serve(sockets=listener.sockets))
    try:
        await app._ends.wait()
    finally:
        server.should_exit = True
        await serving
        await app.stop(seconds)
        for keeper in keepers:
            await keeper
    if app.failure is not None:
        raise app.failure
