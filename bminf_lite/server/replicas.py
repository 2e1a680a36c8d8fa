"""Several servers of one model behind one address: each with GPUs of its own, in processes of its own.

This process keeps the replicas and the front processes (:mod:`.front`), which speak HTTP with clients and pass requests
on. Requests that begin alike go to the same replica, which has the beginning in its cache, unless that replica has more
to do than the others. A replica that ends costs the requests that it was answering, and is started again; it gets the
adapters that were loaded meanwhile before it is asked anything else. Whether a request may be made, and what it may
ask, each replica decides. A front process does not read the body of a request without a key, where one is needed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import msgspec
import uvloop

from ..errors import BminfError
from .front import (
    LOAD_ADAPTER,
    METRICS,
    UNLOAD_ADAPTER,
    Answered,
    Asked,
    End,
    FromFront,
    FromKeeper,
    FrontSettings,
    Ports,
)
from .launcher import default_http_workers, python_command
from .limits import Limits
from .listener import Listener
from .protocol import FrameReader, frame
from .replica_client import Answer, ReplicaFailed, ask, request_bytes
from .settings import ServerSettings

MAX_RESTARTS, RESTART_SECONDS = 5, 120.0
"""A server whose processes end more than ``MAX_RESTARTS`` times within ``RESTART_SECONDS`` ends too."""
READY_SECONDS = 0.2
"""From one question whether a replica is ready to the next."""
END_SECONDS = 3.0
"""How long a front process may take to end beyond the time that its requests have."""
PR_SET_PDEATHSIG = 1
"""The number of an operation of Linux's prctl."""
_READY = request_bytes("GET", b"/health/ready")
_ENGINE = re.compile(r'(?<=[{,])engine="\d+"')


@dataclass(eq=False)
class Replica:
    """A server of its own at a port of this machine."""

    number: int
    command: Sequence[str]
    port: int = 0
    process: asyncio.subprocess.Process | None = None
    is_ready: bool = False


@dataclass(eq=False)
class AdapterChange:
    """A request that the replicas with the numbers ``given`` have answered with success."""

    path: str
    request: bytes
    given: set[int]


@dataclass(eq=False)
class Replicas:
    """The replicas of a server. ``log`` is called with messages for the operator.

    ``commands`` start a replica each; ``{port}`` in one of their arguments stands for the port. ``failure`` is why the
    server ends by itself.
    """

    commands: Sequence[Sequence[str]]
    log: Callable[[str], None]
    replicas: list[Replica] = field(init=False)
    failure: BminfError | None = field(default=None, init=False)
    ends: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    on_change: Callable[[], None] = field(default=lambda: None, init=False)  # of the replicas that are ready
    _exits: deque[float] = field(default_factory=deque, init=False)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)  # of adapters, and of who is ready
    _changes: dict[str, list[AdapterChange]] = field(default_factory=dict, init=False)  # by the adapter's name

    def __post_init__(self) -> None:
        self.replicas = [Replica(number, command) for number, command in enumerate(self.commands)]

    @property
    def ports(self) -> list[int]:
        """The ports of the replicas, 0 for one that is not ready."""
        return [replica.port if replica.is_ready else 0 for replica in self.replicas]

    # -- processes ----------------------------------------------------------------------------------------------------

    async def keep(self, replica: Replica) -> None:
        """Run a replica, and start it again whenever it ends, until the server ends."""
        while not self.ends.is_set():
            for changes in self._changes.values():
                for change in changes:
                    change.given.discard(replica.number)
            replica.port = _free_port()
            command = [argument.replace("{port}", str(replica.port)) for argument in replica.command]
            # A session of its own: what Ctrl-C sends to all processes of a terminal is the business of this one.
            ends_with_parent = _end_with_parent()
            replica.process = await asyncio.create_subprocess_exec(
                *command, preexec_fn=ends_with_parent, start_new_session=ends_with_parent is not None
            )
            if self.ends.is_set():  # after ``stop``, which has not seen this process
                replica.process.terminate()
            asked = asyncio.create_task(self._watch(replica))
            code = await replica.process.wait()
            asked.cancel()
            self._set_ready(replica, False)
            if not self.ends.is_set():
                self.ended(f"replica {replica.number} has ended with {code}; the requests that it answered are lost")

    def ended(self, message: str) -> None:
        """A process has ended, which is said; too many of them end the server."""
        self.log(message)
        now = time.monotonic()
        self._exits.append(now)
        while self._exits[0] < now - RESTART_SECONDS:
            self._exits.popleft()
        if len(self._exits) > MAX_RESTARTS:
            self.failure = BminfError(
                f"replicas have ended {len(self._exits)} times within {RESTART_SECONDS:g} seconds: the messages above "
                "say why"
            )
            self.ends.set()

    def refused(self, port: int) -> None:
        """A port takes no connections: its replica gets no requests until it answers again."""
        for replica in self.replicas:
            if replica.port == port:
                self._set_ready(replica, False)

    def _set_ready(self, replica: Replica, is_ready: bool) -> None:
        if replica.is_ready != is_ready:
            replica.is_ready = is_ready
            self.on_change()

    async def _watch(self, replica: Replica) -> None:
        """Note when a replica is ready, also one that has refused a connection, as long as its process lives."""
        while True:
            await asyncio.sleep(READY_SECONDS)
            if not replica.is_ready:
                with suppress(ReplicaFailed, OSError):
                    status, *_ = await ask(replica.port, _READY)
                    if status == 200:
                        await self._begin(replica)

    async def _begin(self, replica: Replica) -> None:
        """Give a replica the adapters that the others have, and let requests come to it."""
        async with self._changing:
            for name, changes in self._changes.items():
                for change in [change for change in changes if replica.number not in change.given]:
                    status, _, answer = await ask(replica.port, change.request)
                    if status >= 300 and change.path == LOAD_ADAPTER:
                        problem = answer.decode(errors="replace")
                        self.log(f"replica {replica.number} does not load the adapter {name!r}: {problem}")
                    change.given.add(replica.number)
            self._set_ready(replica, True)
        self.log(f"replica {replica.number} is ready")

    def _running(self) -> list[asyncio.subprocess.Process]:
        return [r.process for r in self.replicas if r.process is not None and r.process.returncode is None]

    def kill(self) -> None:
        """End all replicas at once."""
        for process in self._running():
            with suppress(ProcessLookupError):
                process.kill()

    async def stop(self, seconds: float) -> None:
        """End all replicas: those that do not end by themselves are killed after ``seconds``."""
        self.ends.set()
        running = self._running()
        for process in running:
            process.send_signal(signal.SIGTERM)
        waiting = [asyncio.create_task(process.wait()) for process in running]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)
        for process in running:
            if process.returncode is None:
                process.kill()
                await process.wait()

    # -- what all replicas are asked ----------------------------------------------------------------------------------

    async def ask_all(self, path: str, body: bytes, request: bytes) -> Answer:
        """The answer to a request for all replicas: all metrics, or what the first that refuses says, or the first.

        Raises ``ReplicaFailed`` if none is ready.
        """
        if path == METRICS:
            found = await self._answers(request)
            first = next(iter(found.values()))
            if first[0] != 200:
                return first
            return *first[:2], together({number: text.decode() for number, (*_, text) in found.items()}).encode()
        async with self._changing:
            answers = list((await self._answers(request)).values())
            answer = next((one for one in answers if one[0] >= 300), answers[0])
            if answer[0] < 300:
                given = {replica.number for replica in self.replicas if replica.is_ready}
                self._note(AdapterChange(path, request, given), body)
        return answer

    def _note(self, change: AdapterChange, body: bytes) -> None:
        """Keep a change for replicas that start later. A new adapter may need the removal of one of its name."""
        fields = json.loads(body)
        replaces = change.path == UNLOAD_ADAPTER or fields.get("load_inplace")
        before = [] if replaces else self._changes.get(fields["lora_name"], [])
        self._changes[fields["lora_name"]] = [*before, change]

    async def _answers(self, request: bytes) -> dict[int, Answer]:
        """What all ready replicas answer, without those that have just ended. Raises ``ReplicaFailed`` for none."""
        found = {}
        for replica in self.replicas:
            if replica.is_ready:
                try:
                    found[replica.number] = await ask(replica.port, request)
                except (ReplicaFailed, OSError):
                    self._set_ready(replica, False)
        if not found:
            raise ReplicaFailed("no replica is ready")
        return found


def together(texts: Mapping[int, str]) -> str:
    """The metrics of replicas, in Prometheus' text form, as one text: the label ``engine`` is a replica's number.

    The lines of one metric stand together, as the form demands.
    """
    families: dict[str, list[str]] = {}
    for number, text in texts.items():
        lines = families.setdefault("", [])
        for line in text.splitlines():
            if line.startswith("#"):
                lines = families.setdefault(line.split()[2], [])
                if line not in lines:
                    lines.append(line)
            elif line:
                lines.append(_labelled(line, f'engine="{number}"'))
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _labelled(line: str, label: str) -> str:
    name, _, value = line.partition(" ")
    if "{" not in name:
        return f"{name}{{{label}}} {value}"
    return _ENGINE.sub(label, line, 1) if _ENGINE.search(line) else line.replace("{", f"{{{label},", 1)


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
    """The commands of replicas, one on each of ``devices``, from the ``arguments`` of a ``serve`` that has several.

    Without ``--http-workers`` among them, the replicas share the machine's cores.
    """
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
    if not any(argument.startswith("--http-workers") for argument in kept):
        own += ["--http-workers", str(default_http_workers(len(devices)))]
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
    """Serve replicas at a bound address until SIGTERM or SIGINT, with a front process for each of its sockets.

    ``commands`` are those of :class:`Replicas`. Running requests have ``seconds`` to end then; after a second signal
    all processes are killed, and ``SystemExit`` is raised. Raises ``BminfError`` if processes keep ending.
    """
    uvloop.run(_serve(Replicas(commands, log), listener, settings, seconds))


async def _serve(replicas: Replicas, listener: Listener, settings: ServerSettings, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    insisted = []

    def signalled(number: int) -> None:
        if replicas.ends.is_set():
            insisted.append(number)
            replicas.kill()
            fronts.kill()
        replicas.ends.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    listener.listen()
    replicas.log(f"{len(replicas.replicas)} replicas are served at {listener.url}")
    fronts = Fronts(replicas, settings.limits, settings.security.key_digests, len(listener.sockets))
    keepers = [asyncio.create_task(replicas.keep(replica)) for replica in replicas.replicas]
    keepers += [asyncio.create_task(fronts.keep(sock)) for sock in listener.sockets]
    ends = asyncio.create_task(replicas.ends.wait())
    try:
        await asyncio.wait([ends, *keepers], return_when=asyncio.FIRST_COMPLETED)  # a keeper ends first if it fails
    finally:
        replicas.ends.set()
        listener.close()
        await fronts.stop(seconds)
        await replicas.stop(seconds)
        kept = await asyncio.gather(*keepers, return_exceptions=True)  # all of them: no process stays behind
    if failed := [error for error in kept if error is not None]:
        raise failed[0]
    if insisted:
        raise SystemExit(128 + insisted[0])
    if replicas.failure is not None:
        raise replicas.failure


def _itself(link: _FrontLink) -> _FrontLink:
    return link


@dataclass(eq=False)
class Fronts:
    """The ``count`` front processes of a server, each of which gets :class:`.FrontSettings`."""

    replicas: Replicas
    limits: Limits
    key_digests: Sequence[bytes]
    count: int
    _links: dict[_FrontLink, asyncio.subprocess.Process] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.replicas.on_change = self._tell

    async def keep(self, listener: socket.socket) -> None:
        """Run a front process for a socket, and start another whenever it ends, until the server ends."""
        settings = FrontSettings(self.limits, tuple(self.key_digests), len(self.replicas.replicas), self.count)
        while not self.replicas.ends.is_set():
            ours, theirs = socket.socketpair()
            with theirs:
                fds = theirs.fileno(), listener.fileno()
                command = [*python_command("bminf_lite.server.front"), *map(str, fds)]
                try:
                    process = await asyncio.create_subprocess_exec(
                        *command, stdin=asyncio.subprocess.PIPE, pass_fds=fds
                    )
                except BaseException:
                    ours.close()
                    raise
            link = _FrontLink(self.replicas)
            await asyncio.get_running_loop().create_connection(partial(_itself, link), sock=ours)
            self._links[link] = process
            assert process.stdin is not None
            process.stdin.write(msgspec.msgpack.encode(settings))
            process.stdin.close()
            if self.replicas.ends.is_set():  # after ``stop``, which has not seen this process
                link.send(End(0.0))
            code_of_exit = await process.wait()
            del self._links[link]
            link.close()
            if not self.replicas.ends.is_set():
                self.replicas.ended(f"front process {process.pid} has ended with {code_of_exit}; its requests are lost")

    async def stop(self, seconds: float) -> None:
        """Let the front processes end what runs; those that do not end are killed after ``seconds`` and some more."""
        waiting = []
        for link, process in self._links.items():
            link.send(End(seconds))
            waiting.append(asyncio.create_task(process.wait()))
        if waiting:
            await asyncio.wait(waiting, timeout=seconds + END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the front processes at once."""
        for process in self._links.values():
            with suppress(ProcessLookupError):
                process.kill()

    def _tell(self) -> None:
        for link in self._links:
            link.send(Ports(self.replicas.ports))


class _FrontLink(asyncio.Protocol):
    """The socket to a front process, which learns at once which replicas are ready."""

    def __init__(self, replicas: Replicas):
        self._replicas = replicas
        self._frames = FrameReader(FromFront)
        self._answering: set[asyncio.Task[None]] = set()

    def send(self, message: FromKeeper) -> None:
        """Send a message, unless the process has ended."""
        if not self._transport.is_closing():
            self._transport.write(frame(message))

    def close(self) -> None:
        """Close the socket."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self.send(Ports(self._replicas.ports))

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if isinstance(message, Asked):
                task = asyncio.create_task(self._answer(message))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            else:
                self._replicas.refused(message.port)

    async def _answer(self, asked: Asked) -> None:
        try:
            status, headers, body = await self._replicas.ask_all(asked.path, asked.body, asked.request)
            self.send(Answered(asked.number, status, list(headers), body))
        except ReplicaFailed as error:
            self.send(Answered(asked.number, problem=str(error)))
