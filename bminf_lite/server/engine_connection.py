"""What the engine's process keeps for one HTTP process: its socket, its completions, and what was sent of them.

The engine's thread calls :meth:`Connection.flush` at the end of a step: everything that the step brought for a
connection becomes one message, which is sent without waiting. If the socket is full, because its HTTP process is
behind, nothing more is encoded for it: later steps are joined into the message that follows. So a slow HTTP process
costs the engine nothing, and what waits for it is bounded by the tokens that its requests asked for.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ..engine.pooling import PoolingRequest
from ..engine.request import Request
from ..text.text_stream import TokenScores
from .protocol import CompletionOutput, FrameReader, FromEngine, StepOutputs, ToEngine, frame

WHOLE_TOKENS = 32
"""Tokens of a completion that are sent together if its answer is read as a whole: for counts of what is generated."""


class ServedCompletion:
    """One of a request's completions: what the engine has generated, and what was sent of it.

    Of one that ``is_whole`` the first token is sent, for the time that it took, then :data:`WHOLE_TOKENS` together, and
    the end; on a connection that reads all answers as a whole, the end alone.
    """

    __slots__ = ("connection", "finish_reason", "id", "is_whole", "num_ready", "num_sent", "request", "told_prompt")

    def __init__(self, connection: Connection, id: int, request: Request, is_whole: bool):
        self.connection = connection
        self.id = id
        self.request = request
        self.is_whole = is_whole
        self.num_ready = 0
        self.num_sent = 0
        self.finish_reason: str | None = None
        self.told_prompt = False

    def on_update(self, request: Request) -> None:
        """Note, in the engine's thread, what can be sent."""
        if self.is_whole and request.finish_reason is None:
            num_noted = self.num_ready
            if self.connection.reads_whole or (num_noted and len(request.output_tokens) < num_noted + WHOLE_TOKENS):
                return
        with self.connection.lock:
            self.num_ready = len(request.output_tokens)
            self.finish_reason = request.finish_reason
            self.connection.changed[self] = None

    def output(self) -> CompletionOutput:
        """What was not sent yet."""
        request, new = self.request, slice(self.num_sent, self.num_ready)
        output = CompletionOutput(self.id, request.output_tokens[new].tolist(), self.finish_reason)
        if request.params.logprobs is not None:
            output.logprobs = request.logprobs[new].tolist()
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


def _prompt_scores(request: Request) -> list[TokenScores | None]:
    scores = zip(request.prompt_token_logprobs, request.prompt_top_logprobs, strict=True)
    return [None if value is None or top is None else (value, top) for value, top in scores]


class Connection:
    """The socket to one HTTP process. ``changed`` holds the completions of which something was not sent.

    The engine's thread notes what changed and sends; another thread sends what did not fit, by :meth:`send_rest`.
    ``wake`` is called to tell it that something waits. ``lock`` guards the socket and ``changed``.
    With ``seconds_between`` over 0, for a client whose answers are read as a whole, the end of a completion is sent at
    once, and the tokens of one that goes on only that often; not at all, unless the client may end it by its text.
    """

    def __init__(self, sock: socket.socket, wake: Callable[[], None], seconds_between: float = 0.0):
        self.socket = sock
        self.frames = FrameReader(ToEngine)
        self.completions: dict[int, ServedCompletion] = {}
        self.pooled: dict[int, PoolingRequest] = {}  # texts that become vectors
        self.asked: dict[int, list[Request]] = {}  # questions about texts
        self.compiling: set[int] = set()  # the first ids of requests whose grammar is being compiled
        self.changed: dict[ServedCompletion, None] = {}
        self.is_open = True
        self.lock = threading.Lock()
        self._wake = wake
        self._unsent = b""
        self._seconds_between = seconds_between
        self._next_time = 0.0

    @property
    def reads_whole(self) -> bool:
        """Whether answers are read as a whole."""
        return self._seconds_between > 0

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
            changed = self._due()
            if not changed:
                return
            ids, token_ids, outputs = [], [], []
            for completion in changed:
                request, is_plain = completion.request, completion.finish_reason is None and completion.told_prompt
                if is_plain and completion.num_ready == completion.num_sent + 1 and request.params.logprobs is None:
                    ids.append(completion.id)
                    token_ids.append(request.output_tokens[completion.num_sent])
                else:
                    outputs.append(completion.output())
                    completion.told_prompt = True
                    if completion.finish_reason is not None:
                        self.completions.pop(completion.id, None)
                        request.on_update = _ignore  # the two refer to each other no more, and are freed now
                completion.num_sent = completion.num_ready
            self._send(frame(StepOutputs(ids, token_ids, outputs)))

    def _due(self) -> dict[ServedCompletion, None]:
        """Take what is to be sent now from what has changed."""
        if self._seconds_between:
            now = time.perf_counter()
            if now < self._next_time:
                ended = [completion for completion in self.changed if completion.finish_reason is not None]
                for completion in ended:
                    del self.changed[completion]
                return dict.fromkeys(ended)
            self._next_time = now + self._seconds_between
        changed, self.changed = self.changed, {}
        return changed

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
            self._wake()
