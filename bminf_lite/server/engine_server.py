"""The engine's side of the connections to HTTP processes: takes their requests, and tells them what steps brought.

The engine's thread sends at the end of a step; see :mod:`.engine_connection`. One thread reads the messages of all
connections, and sends the rest of messages that did not fit.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec

from ..engine.adapters import AdapterRegistry
from ..engine.core import EngineStats
from ..engine.request import Request
from ..errors import BminfError, QueueFull, UsageError
from ..grammar import Grammar
from ..grammar.matcher import Matcher
from ..request_builder import RequestBuilder
from ..text.prompts import PromptEncoder
from .engine_connection import Connection, ServedCompletion
from .fair_turns import FairTurns
from .pooling_service import PoolingService
from .protocol import (
    AdapterChanged,
    Adapters,
    Admitted,
    Ask,
    Cancel,
    CancelPool,
    ChangeAdapter,
    Failed,
    FromEngine,
    ModelInfo,
    Pool,
    Pooled,
    Ready,
    Refused,
    ServedAdapter,
    ShutDown,
    Stats,
    StatsWanted,
    Submit,
    ToEngine,
)

_READ_BYTES = 1 << 18
_READ_ROUNDS = 4
"""How often sockets are read, while there is something to read, before what was read is handled."""
COMPILERS = 2
"""Grammars that are compiled at a time, one for each client."""
_BREAKS_OFF = "a connection to an HTTP process is closed, because of an error"

_log = logging.getLogger(__name__)


class AdapterStore(Protocol):
    """A model's adapters: :class:`bminf_lite.adapters.ModelAdapters`."""

    registry: AdapterRegistry

    def load(self, name: str, folder: str, replace: bool = False) -> object:
        """Read the adapter in a folder, and enter it. Raises ``BminfError``."""
        ...


class ServedEngine(Protocol):
    """What is served: :class:`bminf_lite.engine.core.Engine`, or a fake one that has no model."""

    failure: BaseException | None

    def submit(self, requests: Sequence[Request]) -> None:
        """Let requests join at the next step, all or none. Raises ``UsageError``, and ``QueueFull``."""
        ...

    def cancel(self, requests: Sequence[Request]) -> None:
        """End requests early."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot."""
        ...

    def after_steps(self, function: Callable[[], None]) -> None:
        """Call a function in the engine's thread when the requests have been told of a step."""
        ...


def add_observations(totals: list[float], values: list[float]) -> list[float]:
    """The sums of what HTTP processes have counted; no totals yet count as zeros."""
    return [t + v for t, v in zip(totals, values, strict=True)] if totals else values


class EngineServer:
    """Serves an engine to HTTP processes, or to threads of this one, over sockets.

    ``on_failure`` is called in the engine's thread, once, when the engine has failed. ``adapters`` are those of the
    model, if it has room for some. ``pooling`` makes vectors of texts, for a model that does.
    """

    def __init__(
        self,
        engine: ServedEngine,
        info: ModelInfo,
        on_failure: Callable[[BaseException], None] = lambda error: None,
        adapters: AdapterStore | None = None,
        pooling: PoolingService | None = None,
    ):
        self._adapters = adapters
        self._engine = engine
        self._pooling = pooling
        self._info = info
        self._prompts = prompts = PromptEncoder(None if info.folder is None else Path(info.folder), info)
        registry = None if adapters is None else adapters.registry
        self._builder = RequestBuilder(info, info.eos_ids, lambda: prompts.tokenizer, registry)
        self._on_failure = on_failure
        self._is_ready = False
        self._has_failed = False
        self._connections: list[Connection] = []
        self._observed: list[float] = []
        self._lock = threading.Lock()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._is_closing = False
        self._admission = threading.Lock()  # of requests, which two threads admit and cancel
        self._turns: FairTurns[tuple[Connection, Submit]] = FairTurns(COMPILERS, COMPILERS - 1)
        self._compilers = ThreadPoolExecutor(COMPILERS, "bminf-lite-grammars")
        self._loader = ThreadPoolExecutor(1, "bminf-lite-adapters")
        self._thread = threading.Thread(target=self._run, name="bminf-lite-connections", daemon=True)
        self._thread.start()
        engine.after_steps(self._after_step)

    def connect(self, seconds_between: float = 0.0) -> socket.socket:
        """A new connection; returns the end that a client reads. ``seconds_between`` is :class:`.Connection`'s."""
        ours, theirs = socket.socketpair()
        self.serve(ours, seconds_between)
        return theirs

    def serve(self, sock: socket.socket, seconds_between: float = 0.0) -> None:
        """Serve the client at the other end of a socket; see :meth:`connect`."""
        sock.setblocking(False)
        connection = Connection(sock, self.wake, seconds_between)
        with self._lock:
            self._connections.append(connection)
            connection.send(self._info)
            if self._adapters is not None:
                connection.send(self._listed_adapters())
            if self._is_ready:
                connection.send(Ready())
        self.wake()

    def set_ready(self) -> None:
        """Tell all clients that the engine is warm."""
        with self._lock:
            self._is_ready = True
            for connection in self._connections:
                connection.send(Ready())

    def shut_down_clients(self, seconds: float) -> None:
        """Ask all HTTP processes to end, with ``seconds`` for running requests."""
        for connection in list(self._connections):
            connection.send(ShutDown(seconds))

    def close(self) -> None:
        """Cancel what runs and close all connections."""
        self._is_closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for pool in (self._compilers, self._loader):
            pool.shutdown(wait=False, cancel_futures=True)

    def wake(self) -> None:
        """Let the reading thread look at its connections again."""
        with suppress(BlockingIOError, OSError):
            self._wake_writer.send(b"\0")

    # -- in the engine's thread ---------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        failure = self._engine.failure
        if failure is not None and not self._has_failed:
            self._has_failed = True
            for connection in self._connections:
                connection.send(Failed(str(failure) or type(failure).__name__))
            self._on_failure(failure)
        for connection in self._connections:
            if connection.changed:
                try:
                    connection.flush()
                except Exception:  # which must not end the engine's thread
                    _log.exception(_BREAKS_OFF)
                    connection.break_off()

    # -- in the thread that reads -------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            watched: dict[Connection, int] = {}
            while not self._is_closing:
                self._watch(selector, watched)
                self._handle(self._received(selector))
        for connection in list(self._connections):
            self._drop(connection)
            connection.socket.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _watch(self, selector: selectors.BaseSelector, watched: dict[Connection, int]) -> None:
        """Watch each open connection for what can be read, and for room where something waits to be sent."""
        for connection in [c for c in watched if not c.is_open]:
            selector.unregister(connection.socket)
            connection.socket.close()
            del watched[connection]
        for connection in list(self._connections):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
            if watched.get(connection) == events:
                continue
            if connection in watched:
                selector.modify(connection.socket, events, connection)
            else:
                selector.register(connection.socket, events, connection)
            watched[connection] = events

    def _received(self, selector: selectors.BaseSelector) -> list[tuple[Connection, ToEngine | None]]:
        """Wait for messages, and read all that are there; None is the end of a connection.

        The engine's thread begins a step with the requests that it has when this thread waits for a socket or uses one.
        Therefore all sockets are read before the first request is handled, and answers are sent after the last.
        """
        received: list[tuple[Connection, ToEngine | None]] = []
        ready = selector.select()
        for _ in range(_READ_ROUNDS):
            for key, events in ready:
                received += self._read(key.data, events)
            ready = selector.select(0)
            if not ready:
                break
        return received

    def _read(self, connection: Connection | None, events: int) -> list[tuple[Connection, ToEngine | None]]:
        if connection is None:
            with suppress(BlockingIOError):
                self._wake_reader.recv(4096)
            return []
        try:
            if events & selectors.EVENT_WRITE:
                connection.send_rest()
            if not events & selectors.EVENT_READ:
                return []
            data = connection.socket.recv(_READ_BYTES)
            messages = connection.frames.feed(data)
        except BlockingIOError:
            return []
        except (OSError, msgspec.MsgspecError):
            return [(connection, None)]
        except Exception:
            _log.exception(_BREAKS_OFF)
            return [(connection, None)]
        return [(connection, message) for message in messages] if data else [(connection, None)]

    def _handle(self, received: Sequence[tuple[Connection, ToEngine | None]]) -> None:
        answers: dict[Connection, list[FromEngine]] = {}
        for connection, message in received:
            with self._dropped_on_error(connection):
                if message is None:
                    self._drop(connection)
                elif answer := self._answer(connection, message):
                    answers.setdefault(connection, []).append(answer)
        for connection, messages in answers.items():
            with self._dropped_on_error(connection):
                connection.send(*messages)

    @contextmanager
    def _dropped_on_error(self, connection: Connection) -> Iterator[None]:
        """An error in the messages of one connection does not end the thread, which others need."""
        try:
            yield
        except Exception:
            _log.exception(_BREAKS_OFF)
            self._drop(connection)

    def _answer(self, connection: Connection, message: ToEngine) -> FromEngine | None:
        """Do what a message says; returns what is to be sent, unless that comes later."""
        if isinstance(message, Submit):
            return self._submit(connection, message)
        if isinstance(message, StatsWanted):
            return Stats(message.number, self._engine.stats(), self._observed)
        if isinstance(message, Pool):
            return self._pool(connection, message)
        if isinstance(message, Ask):
            return self._ask(connection, message)
        if isinstance(message, Cancel):
            self._cancel(connection, message.ids)
        elif isinstance(message, ChangeAdapter):
            with suppress(RuntimeError):  # the server is closing
                self._loader.submit(self._change_adapter, connection, message)
        elif isinstance(message, CancelPool):
            self._cancel_texts(connection, [message.id])
        else:
            self._observed = add_observations(self._observed, message.values)
        return None

    def _listed_adapters(self) -> Adapters:
        assert self._adapters is not None
        return Adapters([ServedAdapter(adapter.name, adapter.source) for adapter in self._adapters.registry])

    def _change_adapter(self, connection: Connection, change: ChangeAdapter) -> None:
        """Load or unload an adapter, tell all clients which there are, and answer the one that asked."""
        problem = None
        try:
            if self._adapters is None:
                raise UsageError("the model has no room for adapters")
            if change.folder is None:
                self._adapters.registry.remove(change.name)
            else:
                self._adapters.load(change.name, change.folder, change.replace)
            with self._lock:
                for other in self._connections:
                    other.send(self._listed_adapters())
        except BminfError as error:
            problem = str(error)
        except Exception as error:  # the client must hear of it
            _log.exception("an adapter cannot be loaded")
            problem = f"{type(error).__name__}: {error}"
        connection.send(AdapterChanged(change.number, problem))

    def _drop(self, connection: Connection) -> None:
        """Forget a client that has gone, and cancel its requests."""
        connection.is_open = False
        with self._lock:
            self._connections = [c for c in self._connections if c is not connection]
        with self._admission:
            ids = [*connection.completions, *connection.compiling]
        self._cancel(connection, ids)
        self._cancel_texts(connection, [*connection.pooled, *connection.asked])

    def _pool(self, connection: Connection, message: Pool) -> Pooled | None:
        """Let texts wait for the engine; what it makes of them is sent in its thread."""
        if self._pooling is None:
            return Pooled(message.id, b"", 0, "this model makes no vectors of texts")

        def send(answer: Pooled) -> None:
            if connection.pooled.pop(answer.id, None) is not None:  # otherwise it was cancelled
                connection.send(answer)

        try:
            request = connection.pooled[message.id] = self._pooling.request(message, send)
            self._pooling.submit(request)
        except BminfError as error:
            connection.pooled.pop(message.id, None)
            return Pooled(message.id, b"", 0, str(error), isinstance(error, QueueFull))
        return None

    def _ask(self, connection: Connection, message: Ask) -> Pooled | None:
        """Let questions join the engine's requests; the answers are sent in its thread."""
        if self._pooling is None:
            return Pooled(message.id, b"", 0, "this model answers no questions about texts")

        def send(answer: Pooled) -> None:
            connection.asked.pop(answer.id, None)
            connection.send(answer)

        connection.asked[message.id] = requests = []
        try:
            requests += self._pooling.ask(message, send).requests
        except BminfError as error:
            connection.asked.pop(message.id, None)
            return Pooled(message.id, b"", 0, str(error), isinstance(error, QueueFull))
        return None

    def _cancel_texts(self, connection: Connection, ids: Sequence[int]) -> None:
        for id in ids:
            if (questions := connection.asked.pop(id, None)) is not None:
                self._engine.cancel(questions)
            if (request := connection.pooled.pop(id, None)) is not None:
                request.is_cancelled = True

    def _submit(self, connection: Connection, submit: Submit) -> Admitted | Refused | None:
        """Submit a request, and return the answer. None with a grammar: a thread that compiles it answers then."""
        if submit.request.grammar is None:
            with self._admission:
                return self._admit(connection, submit)
        if not self._turns.is_idle and (matchers := self._builder.kept_matchers(submit.request)) is not None:
            with self._admission:
                return self._admit(connection, submit, matchers)
        connection.compiling.add(submit.first_id)
        self._turns.add(submit.client, (connection, submit))
        self._start_compiling()
        return None

    def _start_compiling(self) -> None:
        while (started := self._turns.start()) is not None:
            client, (connection, submit) = started
            with suppress(RuntimeError):  # the server is closing
                self._compilers.submit(self._take_turn, client, connection, submit)

    def _take_turn(self, client: str, connection: Connection, submit: Submit) -> None:
        try:
            if submit.first_id in connection.compiling and submit.request.grammar is not None:
                self._compile(connection, submit, submit.request.grammar)
        finally:
            self._turns.end(client)
            self._start_compiling()

    def _compile(self, connection: Connection, submit: Submit, grammar: Grammar) -> None:
        """Admit a request with a grammar, unless it was cancelled meanwhile."""
        problem = ""
        matchers: list[Matcher | None] = []
        try:
            matchers = self._builder.matchers(submit.request)
        except BminfError as error:
            problem = str(error)
        except Exception as error:  # of the library; the client must hear of it
            problem = f"the {grammar.name} cannot be compiled: {type(error).__name__}: {error}"
        with self._admission:
            if submit.first_id not in connection.compiling:
                return
            connection.compiling.remove(submit.first_id)
            if problem:
                connection.send(Refused(submit.first_id, problem, False))
            else:
                connection.send(self._admit(connection, submit, matchers))

    def _admit(
        self, connection: Connection, submit: Submit, matchers: Sequence[Matcher | None] | None = None
    ) -> Admitted | Refused:
        """Let a request join the engine's, and return the answer."""
        first_id = submit.first_id
        try:
            wanted = replace(submit.request, prompt=self._prompts.encode(submit.request.prompt))
            requests = self._builder.build(wanted, first_index=submit.first_index, matchers=matchers)
            is_whole = (connection.reads_whole or not wanted.is_streamed) and not wanted.ends_by_text
            for id, request in zip(count(first_id), requests, strict=False):
                completion = ServedCompletion(connection, id, request, is_whole)
                request.on_update = completion.on_update
                connection.completions[completion.id] = completion
            self._engine.submit(requests)
        except BminfError as error:
            for index in range(submit.request.n):
                connection.completions.pop(first_id + index, None)
            return Refused(first_id, str(error), isinstance(error, QueueFull))
        return Admitted(first_id)

    def _cancel(self, connection: Connection, ids: Sequence[int]) -> None:
        with self._admission:
            connection.compiling.difference_update(ids)
            found = [connection.completions.pop(id, None) for id in ids]
        self._engine.cancel([completion.request for completion in found if completion is not None])
