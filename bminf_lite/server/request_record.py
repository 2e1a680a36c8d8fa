"""What the metrics and the log learn of a request while it is served.

An endpoint calls :meth:`Observer.begin`, then :meth:`RequestRecord.add_prompt` for each prompt, ``tokens`` and
``finished`` for what arrives of its completions, and ``end`` in every case. These calls are made once per chunk of a
stream, so they only do arithmetic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timezone
from time import perf_counter, time
from typing import Any

from .metrics import Observations
from .request_log import RequestLog

SEND_SECONDS = 0.2
"""How long counts wait in an HTTP process until they are sent to the engine's process."""


class Observer:
    """The metrics and the log of one HTTP process.

    ``send`` gets newly counted values, soon after they were counted, in the event loop.
    """

    def __init__(self, context_length: int, send: Callable[[list[float]], None], log: RequestLog | None = None):
        self.observations = Observations(context_length)
        self._send = send
        self._log = log
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, route: str, request_id: str, model: str, client: str = "") -> RequestRecord:
        """A request of ``client`` has arrived."""
        return RequestRecord(self, route, request_id, model, client)

    def counted(self) -> None:
        """Something was counted: send it soon."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SEND_SECONDS, self.flush)

    def flush(self) -> None:
        """Send what was counted now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._send(self.observations.take())

    def write(self, fields: dict[str, Any]) -> None:
        """Write a line of the log, if there is one."""
        if self._log is not None:
            self._log.write(fields)

    def close(self) -> None:
        """Send and write what waits."""
        self.flush()
        if self._log is not None:
            self._log.close()


class _Completion:
    __slots__ = (
        "end_time",
        "finish_reason",
        "first_token_time",
        "last_token_time",
        "num_tokens",
        "prompt_tokens",
        "queue_seconds",
    )

    def __init__(self, prompt_tokens: int):
        self.prompt_tokens = prompt_tokens
        self.num_tokens = 0
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self.queue_seconds = 0.0
        self.end_time = 0.0
        self.finish_reason: str | None = None


class RequestRecord:
    """One HTTP request: its prompts, and ``n`` completions of each, which are numbered in order.

    ``client`` tells whose requests take turns with others'. It is not logged.
    """

    __slots__ = (
        "_completions",
        "_ended",
        "_observer",
        "_prompt_tokens",
        "_start",
        "_time",
        "cached_tokens",
        "client",
        "model",
        "request_id",
        "route",
    )

    def __init__(self, observer: Observer, route: str, request_id: str, model: str, client: str = ""):
        self.route = route
        self.request_id = request_id
        self.model = model
        self.client = client
        self.cached_tokens = 0
        self._observer = observer
        self._completions: list[_Completion] = []
        self._prompt_tokens = 0
        self._ended = False
        self._start = perf_counter()
        self._time = time()

    def add_prompt(self, prompt_tokens: int, n: int = 1, max_tokens: int | None = None) -> None:
        """A prompt of ``prompt_tokens`` with ``n`` completions is sent to the engine."""
        self._prompt_tokens += prompt_tokens
        self._completions += [_Completion(prompt_tokens) for _ in range(n)]
        observations = self._observer.observations
        observations.n.observe(observations.values, n)
        if max_tokens is not None:
            observations.max_tokens.observe(observations.values, max_tokens)
        self._observer.counted()

    def tokens(self, completion: int, count: int, cached_tokens: int = 0, queue_seconds: float = 0.0) -> None:
        """``count`` new tokens of a completion have arrived.

        With the first of them the engine says how many tokens of the prompt were cached, and how long it waited.
        """
        if not count:
            return
        now = perf_counter()
        state = self._completions[completion]
        observations = self._observer.observations
        values = observations.values
        if state.num_tokens:
            observations.inter_token_latency.observe(values, (now - state.last_token_time) / count, count)
        else:
            self.cached_tokens += cached_tokens
            state.queue_seconds = queue_seconds
            state.first_token_time = now
            observations.time_to_first_token.observe(values, now - self._start)
        state.last_token_time = now
        state.num_tokens += count
        observations.add_tokens(count)
        self._observer.counted()

    def finished(self, completion: int, reason: str) -> None:
        """A completion has ended: by the engine's finish reason, or ``stop`` where a stop text was found.

        Both may happen, if a stop text is in the last tokens; the last call counts.
        """
        state = self._completions[completion]
        if state.finish_reason is None:
            state.end_time = perf_counter()
        state.finish_reason = reason

    def _count(self, state: _Completion) -> None:
        """Count a completion that has ended."""
        assert state.finish_reason is not None
        observations = self._observer.observations
        values = observations.values
        observations.add_finished(state.finish_reason)
        observations.e2e_latency.observe(values, state.end_time - self._start)
        observations.prompt_tokens.observe(values, state.prompt_tokens)
        observations.generation_tokens.observe(values, state.num_tokens)
        if state.num_tokens:
            decode = state.last_token_time - state.first_token_time
            prefill = max(state.first_token_time - self._start - state.queue_seconds, 0.0)
            observations.queue_time.observe(values, state.queue_seconds)
            observations.prefill_time.observe(values, prefill)
            observations.decode_time.observe(values, decode)
            observations.inference_time.observe(values, prefill + decode)
            if state.num_tokens > 1:
                observations.time_per_output_token.observe(values, decode / (state.num_tokens - 1))
        self._observer.counted()

    def end(self, status: int) -> None:
        """The request was answered with an HTTP status, or its client has gone. Only the first call counts.

        Completions that have not ended are counted as cancelled, or as errors if the status is 500 or more.
        """
        if self._ended:
            return
        self._ended = True
        reasons: dict[str, int] = {}
        for i, completion in enumerate(self._completions):
            if completion.finish_reason is None:
                self.finished(i, "error" if status >= 500 else "cancelled")
            self._count(completion)
            reason = completion.finish_reason or ""
            reasons[reason] = reasons.get(reason, 0) + 1
        first = [c.first_token_time for c in self._completions if c.num_tokens]
        self._observer.write(
            {
                "time": datetime.fromtimestamp(self._time, timezone.utc).isoformat(timespec="milliseconds"),
                "id": self.request_id,
                "route": self.route,
                "model": self.model,
                "status": status,
                "prompt_tokens": self._prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "output_tokens": sum(c.num_tokens for c in self._completions),
                "finish_reasons": reasons,
                "first_token_seconds": round(min(first) - self._start, 6) if first else None,
                "seconds": round(perf_counter() - self._start, 6),
            }
        )
