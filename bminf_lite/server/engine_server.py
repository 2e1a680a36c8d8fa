"""The engine's side of the connections to HTTP processes.

The engine's thread calls :meth:`_Connection.flush` at the end of a step: everything that the step brought for a
connection becomes one message, which is sent without waiting. If the socket is full, because its HTTP process is
behind, nothing more is encoded for it: later steps are joined into the message that follows. So a slow HTTP process
costs the engine nothing, and what waits for it is bounded by the tokens that its requests asked for. One thread reads
the messages of all connections and sends the rest of messages that did not fit.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import count
from typing import Protocol

import msgspec

from ..engine.core import EngineStats
from ..engine.request import Request
from ..errors import BminfError, QueueFull, UsageError
from ..grammar import Grammar
from ..grammar.matcher import GrammarCompiler, Matcher
from ..text.checkpoint_files import load_tokenizer
from .protocol import (
    Admitted,
    Cancel,
    CompletionOutput,
    Failed,
    FrameReader,
    FromEngine,
    GenerationRequest,
    ModelInfo,
    Observed,
    PromptScore,
    Ready,
    Refused,
    ShutDown,
    Stats,
    StepOutputs,
    Submit,
    ToEngine,
    frame,
)

_READ_BYTES = 1 << 18

_log = logging.getLogger(__name__)


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


class _Completion:
    """One of a request's completions: what the engine has generated, and what was sent of it."""

    __slots__ = ("connection", "finish_reason", "id", "num_ready", "num_sent", "request", "told_prompt")

    def __init__(self, connection: _Connection, id: int):
        self.connection = connection
        self.id = id
        self.request: Request
        self.num_ready = 0
        self.num_sent = 0
        self.finish_reason: str | None = None
        self.told_prompt = False

    def on_update(self, request: Request) -> None:
        """Note, in the engine's thread, what can be sent."""
        with self.connection.lock:
            self.num_ready = len(request.output_token_ids)
            self.finish_reason = request.finish_reason
            self.connection.changed[self] = None

    def output(self) -> CompletionOutput:
        """What was not sent yet."""
        request, new = self.request, slice(self.num_sent, self.num_ready)
        output = CompletionOutput(self.id, request.output_token_ids[new], self.finish_reason)
        if request.params.logprobs is not None:
            output.logprobs = request.logprobs[new]
        if request.params.logprobs:
            output.top_logprobs = request.top_logprobs[new]
        if not self.told_prompt:
            output.cached_tokens = request.num_cached_tokens
            output.queue_seconds = max(request.start_time - request.arrival_time, 0.0)
            output.prompt_logprobs = _prompt_scores(request) if request.prompt_logprobs else None
        if self.finish_reason == "error":
            output.error = str(request.error) or type(request.error).__name__
        return output


def _ignore(request: Request) -> None:
    """The ``on_update`` of a request that has ended."""


def _prompt_scores(request: Request) -> list[PromptScore | None]:
    scores = zip(request.prompt_token_logprobs, request.prompt_most_likely, strict=True)
    return [None if value is None or best is None else (value, *best) for value, best in scores]


class _Connection:
    """The socket to one HTTP process. ``changed`` holds the completions of which something was not sent.

    ``lock`` guards both: the engine's thread notes and sends, and the reading thread sends what did not fit.
    """

    def __init__(self, server: EngineServer, sock: socket.socket):
        self.socket = sock
        self.frames = FrameReader(ToEngine)
        self.completions: dict[int, _Completion] = {}
        self.compiling: set[int] = set()  # the first ids of requests whose grammar is being compiled
        self.changed: dict[_Completion, None] = {}
        self.is_open = True
        self.lock = threading.Lock()
        self._server = server
        self._unsent = b""

    @property
    def has_unsent(self) -> bool:
        """Whether the rest of a message waits until the socket takes it."""
        return bool(self._unsent)

    def send(self, *messages: FromEngine) -> None:
        """Send messages that are not about completions, behind what was not sent yet."""
        with self.lock:
            self._send(b"".join(map(frame, messages)))

    def flush(self) -> None:
        """Send what is new of all completions, unless an earlier message still waits."""
        with self.lock:
            if self._unsent or not self.changed:
                return
            changed, self.changed = self.changed, {}
            ids, token_ids, outputs = [], [], []
            for completion in changed:
                request, is_plain = completion.request, completion.finish_reason is None and completion.told_prompt
                if is_plain and completion.num_ready == completion.num_sent + 1 and request.params.logprobs is None:
                    ids.append(completion.id)
                    token_ids.append(request.output_token_ids[completion.num_sent])
                else:
                    outputs.append(completion.output())
                    completion.told_prompt = True
                    if completion.finish_reason is not None:
                        self.completions.pop(completion.id, None)
                        request.on_update = _ignore  # the two refer to each other no more, and are freed now
                completion.num_sent = completion.num_ready
            self._send(frame(StepOutputs(ids, token_ids, outputs)))

    def send_rest(self) -> None:
        """Send what did not fit before, and then what has become new since. The socket can take something."""
        with self.lock:
            rest, self._unsent = self._unsent, b""
            self._send(rest)
        self.flush()

    def break_off(self) -> None:
        """Let both sides find the connection closed."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _send(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        sent = 0
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            pass
        except OSError:
            return  # the reading thread finds the connection closed
        if sent < len(data):
            self._unsent = data[sent:]
            self._server.wake()


def add_observations(totals: list[float], values: list[float]) -> list[float]:
    """The sums of what HTTP processes have counted; no totals yet count as zeros."""
    return [t + v for t, v in zip(totals, values, strict=True)] if totals else values


class EngineServer:
    """Serves an engine to HTTP processes, or to threads of this one, over sockets.

    ``on_failure`` is called in the engine's thread, once, when the engine has failed.
    """

    def __init__(
        self,
        engine: ServedEngine,
        info: ModelInfo,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ):
        self._engine = engine
        self._info = info
        self._eos_ids = frozenset(info.eos_ids)
        self._on_failure = on_failure
        self._is_ready = False
        self._has_failed = False
        self._connections: list[_Connection] = []
        self._observed: list[float] = []
        self._lock = threading.Lock()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._is_closing = False
        self._admission = threading.Lock()  # of requests, which two threads admit and cancel
        self._compilers = ThreadPoolExecutor(1, "bminf-lite-grammars")
        self._thread = threading.Thread(target=self._run, name="bminf-lite-connections", daemon=True)
        self._thread.start()
        engine.after_steps(self._after_step)

    def connect(self) -> socket.socket:
        """A new connection; returns the end that a client reads."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = _Connection(self, ours)
        with self._lock:
            self._connections.append(connection)
            connection.send(self._info)
            if self._is_ready:
                connection.send(Ready())
        self.wake()
        return theirs

    def set_ready(self) -> None:
        """Tell all clients that the engine is warm."""
        with self._lock:
            self._is_ready = True
            for connection in self._connections:
                connection.send(Ready())

    def shut_down_clients(self, seconds: float) -> None:
        """Ask all HTTP processes to end, with so much time for running requests."""
        for connection in list(self._connections):
            connection.send(ShutDown(seconds))

    def close(self) -> None:
        """Cancel what runs and close all connections."""
        self._is_closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._compilers.shutdown(wait=False, cancel_futures=True)

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
                    _log.exception("a connection to an HTTP process is closed, because of an error")
                    connection.break_off()

    # -- in the thread that reads -------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            watched: dict[_Connection, int] = {}
            while not self._is_closing:
                self._watch(selector, watched)
                for key, events in selector.select():
                    connection: _Connection | None = key.data
                    if connection is None:
                        with suppress(BlockingIOError):
                            self._wake_reader.recv(4096)
                        continue
                    try:
                        if events & selectors.EVENT_WRITE:
                            connection.send_rest()
                        if events & selectors.EVENT_READ:
                            self._read(connection)
                    except Exception:
                        _log.exception("a connection to an HTTP process is closed, because of an error")
                        self._drop(connection)
        for connection in list(self._connections):
            self._drop(connection)
            connection.socket.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _watch(self, selector: selectors.BaseSelector, watched: dict[_Connection, int]) -> None:
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

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_READ_BYTES)
            messages = connection.frames.feed(data)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError):
            data, messages = b"", []
        if not data:
            self._drop(connection)
        answers: list[
            FromEngine
        ] = []  # sent at the end, because the engine's thread begins a step while this one sends
        for message in messages:
            if isinstance(message, Submit):
                answers += self._submit(connection, message)
            elif isinstance(message, Cancel):
                self._cancel(connection, message.ids)
            elif isinstance(message, Observed):
                self._observed = add_observations(self._observed, message.values)
            else:
                answers.append(Stats(message.number, self._engine.stats(), self._observed))
        if answers:
            connection.send(*answers)

    def _drop(self, connection: _Connection) -> None:
        """The client has gone: its requests are of no use to anyone."""
        connection.is_open = False
        with self._lock:
            self._connections = [c for c in self._connections if c is not connection]
        with self._admission:
            ids = [*connection.completions, *connection.compiling]
        self._cancel(connection, ids)

    def _submit(self, connection: _Connection, submit: Submit) -> list[Admitted | Refused]:
        """Submit a request, and return the answer; a thread of its own answers when it has compiled a grammar."""
        if submit.request.grammar is None:
            with self._admission:
                return [self._admit(connection, submit, [None] * submit.request.n)]
        connection.compiling.add(submit.first_id)
        self._compilers.submit(self._compile, connection, submit, submit.request.grammar)
        return []

    def _compile(self, connection: _Connection, submit: Submit, grammar: Grammar) -> None:
        """Admit a request with a grammar, unless it was cancelled meanwhile."""
        eos_ids = self._eos_ids.union(submit.request.stop_token_ids)
        problem = ""
        matchers: list[Matcher] = []
        try:
            matchers = [self._grammars.matcher(grammar, eos_ids) for _ in range(submit.request.n)]
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

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        if self._info.folder is None:
            raise UsageError("a grammar needs a tokenizer, and this model was made without one")
        vocab_size = self._info.vocab_size
        return GrammarCompiler(load_tokenizer(self._info.folder, vocab_size), vocab_size)

    def _admit(self, connection: _Connection, submit: Submit, matchers: Sequence[Matcher | None]) -> Admitted | Refused:
        """Let a request join the engine's, and return the answer."""
        first_id = submit.first_id
        try:
            requests = self._requests(submit.request, submit.first_index)
            for id, request, matcher in zip(count(first_id), requests, matchers, strict=False):
                request.matcher = matcher
                completion = _Completion(connection, id)
                completion.request = request
                request.on_update = completion.on_update
                connection.completions[completion.id] = completion
            self._engine.submit(requests)
        except BminfError as error:
            for index in range(submit.request.n):
                connection.completions.pop(first_id + index, None)
            return Refused(first_id, str(error), isinstance(error, QueueFull))
        return Admitted(first_id)

    def _requests(self, wanted: GenerationRequest, first_index: int) -> list[Request]:
        """The engine's form of a request. Raises ``UsageError`` for what does not fit the model."""
        info, ids = self._info, wanted.prompt_token_ids
        for tokens in (ids, wanted.target_token_ids):
            if tokens and not 0 <= min(tokens) <= max(tokens) < info.vocab_size:
                raise UsageError(f"the prompt has token ids outside the vocabulary of {info.vocab_size:,} tokens")
        eos_ids = self._eos_ids.union(wanted.stop_token_ids)
        params = wanted.params.with_seed()
        params.check_model(info.vocab_size, eos_ids)
        source: Sequence[int] = ()
        if info.is_encoder_decoder:
            source, ids = ids, [*info.decoder_start_token_ids, *wanted.target_token_ids]
        longest = info.max_source_length if info.is_encoder_decoder else info.context_length - 1
        if not 0 < len(wanted.prompt_token_ids) <= longest or not 0 < len(ids) < info.context_length:
            raise UsageError(
                f"the prompt has {len(wanted.prompt_token_ids):,} tokens, but the model takes 1 to {longest:,}"
            )
        deadline = None if wanted.deadline is None else time.perf_counter() + wanted.deadline
        return [
            Request(
                index, ids, params, eos_ids, source, priority=wanted.priority, deadline=deadline,
                cache_salt=wanted.cache_salt, prompt_logprobs=wanted.prompt_logprobs, is_streamed=wanted.is_streamed,
            )
            for index in range(first_index, first_index + wanted.n)
        ]  # fmt: skip

    def _cancel(self, connection: _Connection, ids: Sequence[int]) -> None:
        with self._admission:
            connection.compiling.difference_update(ids)
            found = [connection.completions.pop(id, None) for id in ids]
        self._engine.cancel([completion.request for completion in found if completion is not None])
