"""Runs a server: binds its address, starts HTTP processes beside the engine, watches over them, and ends in order."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType

import msgspec

from ..api import Model
from ..errors import BminfError, UsageError
from ..text.tool_calls import tool_format
from .client import EngineFailure
from .engine_server import AdapterStore, EngineServer, ServedEngine
from .http_process import LAST_WORDS_SECONDS
from .limits import DEFAULT_LIMITS, Limits
from .listener import Address, Listener
from .model_info import model_info, pooling_service
from .pooling_service import PoolingService
from .protocol import ModelInfo
from .request_log import checked_path
from .security import OPEN_PATHS, Security, digests, is_loopback
from .settings import ServerSettings

MAX_RESTARTS = 5
RESTART_SECONDS = 60.0
"""The server gives up when more than ``MAX_RESTARTS`` of its HTTP processes end within this many seconds."""
CORES_PER_HTTP_PROCESS = 4
_MAX_SHUTDOWN_SECONDS = 1_000_000
"""Eleven days, which every clock can wait for."""
_KILL_SECONDS = 3.0
"""After its time for a shutdown has passed, an HTTP process has this long before it is killed."""


def require_safe(address: Address, settings: ServerSettings, allow_unauthenticated: bool) -> None:
    """Raise ``UsageError`` for a server that others than this machine reach and that asks for no key."""
    if settings.security.key_digests or allow_unauthenticated or is_loopback(address.host):
        return
    raise UsageError(
        f"the address {address.host} can be reached from other machines, and the server would ask for no key: give "
        "--api-key-file, listen at 127.0.0.1 behind a proxy that checks its users, or insist with "
        "--allow-unauthenticated"
    )


# -- events, which the main thread waits for ---------------------------------------------------------------------------


class _Signalled:
    """The operator wants an end."""


@dataclass(frozen=True)
class _Exited:
    worker: _HttpProcess


@dataclass(frozen=True)
class _Failed:
    error: BaseException


def python_command(module: str) -> list[str]:
    """The command of a process that runs ``main`` of a module of this package.

    It imports from this process's ``sys.path``, whatever its environment and working directory hold. What Ctrl-C sends
    to all processes of a terminal is the business of this one, also while the other imports.
    """
    ignores = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    return [sys.executable, "-I", "-c", f"{ignores}; sys.path[:] = {sys.path!r}; from {module} import main; main()"]


class _HttpProcess:
    """One HTTP process; ``on_exit`` is called in a thread when it has ended."""

    def __init__(
        self,
        engine: socket.socket,
        listener: socket.socket,
        settings: bytes,
        on_exit: Callable[[_HttpProcess], None],
    ):
        self.listener = listener
        fds = engine.fileno(), listener.fileno()
        with engine:
            self._process = subprocess.Popen(
                [*python_command("bminf_lite.server.http_process"), *map(str, fds)], stdin=subprocess.PIPE, pass_fds=fds
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(settings)
        self._on_exit = on_exit
        threading.Thread(target=self._wait, name="bminf-lite-http-process", daemon=True).start()

    def _wait(self) -> None:
        self._process.wait()
        self._on_exit(self)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


@dataclass(eq=False)
class Launcher:
    """The processes of one server. ``log`` is called with messages for the operator."""

    engine: ServedEngine
    info: ModelInfo
    listener: Listener
    settings: ServerSettings
    shutdown_seconds: float
    log: Callable[[str], None]
    adapters: AdapterStore | None = None
    pooling: PoolingService | None = None
    _events: SimpleQueue[_Signalled | _Exited | _Failed] = field(default_factory=SimpleQueue, init=False)
    _workers: list[_HttpProcess] = field(default_factory=list, init=False)
    _exits: deque[float] = field(default_factory=deque, init=False)
    _ends_at_once: bool = field(default=True, init=False)

    def run(self, warm_up: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT, and return when what runs then has ended, or its time is over.

        ``warm_up`` prepares the engine while HTTP processes start. A second signal, or one before the engine is ready,
        raises ``SystemExit`` at once. Raises ``EngineFailure`` if the engine fails, and ``BminfError`` if HTTP
        processes keep ending.
        """
        server = EngineServer(
            self.engine,
            self.info,
            lambda error: self._events.put(_Failed(error)),
            adapters=self.adapters,
            pooling=self.pooling,
        )
        self._server = server
        with closing(server), self._signals():
            try:
                self.listener.listen()
                self._workers += [self._start(sock) for sock in self.listener.sockets]
                warm_up()
                server.set_ready()
                self._watch()
            finally:
                self.listener.close()
                for worker in self._workers:
                    worker.kill()

    def _start(self, listener: socket.socket) -> _HttpProcess:
        settings = msgspec.msgpack.encode(self.settings)
        return _HttpProcess(self._server.connect(), listener, settings, lambda w: self._events.put(_Exited(w)))

    def _watch(self) -> None:
        self._ends_at_once = False
        while True:
            event = self._events.get()
            if isinstance(event, _Signalled):
                self._shut_down(self.shutdown_seconds)
                return
            if isinstance(event, _Failed):
                message = f"the engine has failed: {event.error}"
                self.log(f"{message}; the server ends")
                self._shut_down(0)
                raise EngineFailure(message) from event.error
            self._restart(event.worker)

    def _restart(self, worker: _HttpProcess) -> None:
        """Replace an HTTP process that has ended; the engine has cancelled its requests."""
        now = time.monotonic()
        self._exits.append(now)
        while self._exits[0] < now - RESTART_SECONDS:
            self._exits.popleft()
        self._workers.remove(worker)
        self.log(f"HTTP process {worker.pid} has ended with {worker.exit_code}; its requests are lost")
        if len(self._exits) > MAX_RESTARTS:
            raise BminfError(
                f"HTTP processes have ended {len(self._exits)} times within {RESTART_SECONDS:g} seconds: the messages "
                "above say why"
            )
        self._workers.append(self._start(worker.listener))

    def _shut_down(self, seconds: float) -> None:
        """Let HTTP processes finish what runs."""
        self.listener.close()
        self._server.shut_down_clients(seconds)
        latest = time.monotonic() + seconds + LAST_WORDS_SECONDS + _KILL_SECONDS
        while self._workers:
            try:
                event = self._events.get(timeout=max(latest - time.monotonic(), 0.001))
            except Empty:
                self.log(f"{len(self._workers)} HTTP processes do not end, and are killed")
                return
            if isinstance(event, _Exited):
                self._workers.remove(event.worker)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT become events, where Python lets a thread have signals: in the main one."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            if self._ends_at_once:
                raise SystemExit(128 + number)
            self._ends_at_once = True
            self._events.put(_Signalled())

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_http_workers(replicas: int = 1) -> int:
    """HTTP processes for this machine's cores, each of ``replicas`` that share them; docs/server_design.md says why."""
    return max(1, min(4, num_cores() // (CORES_PER_HTTP_PROCESS * replicas)))


def default_front_processes(replicas: int) -> int:
    """Front processes for this machine's cores: two for a replica, but no more than one for four cores."""
    return max(1, min(2 * replicas, num_cores() // CORES_PER_HTTP_PROCESS))


def launch(
    model: Model,
    listener: Listener,
    settings: ServerSettings,
    shutdown_seconds: float,
    log: Callable[[str], None],
) -> None:
    """Serve a loaded model at a bound address; see :meth:`Launcher.run`."""

    def warm_up() -> None:
        model.warm_up()
        gc.collect()
        gc.freeze()  # a collection that visits all modules would delay the engine's steps by tens of milliseconds
        log(f"{', '.join(settings.served_model_names)} is served at {listener.url}")

    try:
        require_other_names(model, settings.served_model_names)
        info, store, pooling = model_info(model), model.adapter_store, pooling_service(model)
        Launcher(model.engine, info, listener, settings, shutdown_seconds, log, store, pooling).run(warm_up)
    finally:
        gc.unfreeze()


def serve(
    model: Model,
    host: str = Address.host,
    port: int = Address.port,
    *,
    served_model_name: str | Sequence[str] | None = None,
    api_keys: Sequence[str] = (),
    allow_unauthenticated: bool = False,
    allowed_hosts: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    limits: Limits = DEFAULT_LIMITS,
    http_workers: int | None = None,
    request_log: str | None = None,
    tool_call_format: str | None = None,
    seed: int | None = None,
    split_special_tokens: bool = False,
    shutdown_timeout: float = 30.0,
    log: Callable[[str], None] = lambda message: print(message, file=sys.stderr, flush=True),
) -> None:
    """Serve a loaded model over HTTP, with OpenAI's interface, until SIGTERM or Ctrl-C.

    - ``host``, ``port``: where to listen; port 0 takes a free one. An address that other machines reach needs
      ``api_keys``, unless ``allow_unauthenticated`` is set.
    - ``served_model_name``: the name of the model in requests, or several; by default that of its folder.
    - ``allowed_hosts``, ``allowed_origins``: see :class:`.security.Security`. ``limits``: see :class:`.limits.Limits`.
    - ``http_workers``: processes that speak HTTP; the default follows from the machine's cores.
    - ``request_log``: a file that gets a line of JSON for each request, ``-`` for stderr; see :mod:`.request_log`.
    - ``tool_call_format``: how the model writes calls of functions, one of
      :data:`bminf_lite.text.tool_calls.TOOL_FORMATS`; by default what the chat template and the vocabulary tell.
    - ``seed``: the seed of requests that give none, 0 to 2**64 - 1, so that the same request gets the same answer; by
      default each draws one at random.
    - ``split_special_tokens``: the default of the requests' field of this name. With True, prompts, and what users and
      tools say in conversations, are text, also where they spell control tokens such as ``<|im_end|>``.
    - ``shutdown_timeout``: seconds in which running requests may end after a signal. A second signal ends at once.
    - ``log`` takes messages for the operator, by default to stderr.

    The model stays loaded. Raises ``UsageError`` for an address that cannot be used, and ``EngineFailure`` if the
    device fails, after which the process should end.
    """
    security = Security(digests(api_keys), OPEN_PATHS, tuple(allowed_hosts), tuple(allowed_origins))
    names, form = model_names(served_model_name, model.folder), checked_format(tool_call_format)
    seconds = checked_seconds(shutdown_timeout)
    settings = ServerSettings(names, security, limits, checked_path(request_log), form, seed, split_special_tokens)
    address = Address(host, port)
    require_safe(address, settings, allow_unauthenticated)
    with closing(Listener(address, default_http_workers() if http_workers is None else http_workers)) as listener:
        launch(model, listener, settings, seconds, log)


def checked_format(name: str | None) -> str | None:
    """The name of a form of tool calls. Raises ``UsageError`` for an unknown one."""
    return None if name is None else tool_format(name).name


def model_names(names: str | Sequence[str] | None, folder: Path | None) -> tuple[str, ...]:
    """The names of the model in requests; by default that of its folder."""
    names = (names,) if isinstance(names, str) else tuple(names or ())
    return names or ("model" if folder is None else folder.absolute().name or "model",)


def require_other_names(model: Model, names: Sequence[str]) -> None:
    """Raise ``UsageError`` for an adapter that has a name of the model."""
    if equal := sorted(model.adapters.keys() & set(names)):
        raise UsageError(f"the adapter {equal[0]!r} has the name of the model; choose another name for one of them")


def checked_seconds(value: float) -> float:
    """The time for a shutdown. Raises ``UsageError`` unless it is a number of seconds, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MAX_SHUTDOWN_SECONDS:
        wanted = f"must be a number of seconds, 0 to {_MAX_SHUTDOWN_SECONDS:,}"
        raise UsageError(f"shutdown_timeout is {value!r}, but {wanted}")
    return value
