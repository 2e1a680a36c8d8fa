"""An engine without a model: it gives every request the tokens of a text, at a set rate, through the real protocol.

It stands in for :class:`bminf_lite.engine.core.Engine` behind :class:`bminf_lite.server.engine_server.EngineServer`, so
that the HTTP path can be measured and tested on a machine without a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from bminf_lite.engine.core import EngineStats
from bminf_lite.engine.request import Request
from bminf_lite.errors import BminfError, QueueFull
from bminf_lite.server.protocol import ModelInfo


class FakeEngine:
    """Gives all running requests a token per step; requests over ``max_num_seqs`` wait.

    ``tokens`` is repeated for each request, from a place that depends on its prompt, up to its ``max_new_tokens``. A
    step takes ``seconds_per_step``, but no less than the work itself; 0 runs as fast as it can. ``fail`` ends the
    engine as a CUDA error would. ``num_tokens`` counts what was generated, and ``busy_seconds`` the thread's CPU time.
    """

    def __init__(
        self, tokens: Sequence[int], max_num_seqs: int = 256, max_queue: int = 1024, seconds_per_step: float = 0.0
    ):
        self.failure: BaseException | None = None
        self.num_tokens = 0
        self.num_steps = 0
        self.busy_seconds = 0.0
        self._tokens = list(tokens)
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._seconds_per_step = seconds_per_step
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._cancelled: list[Request] = []
        self._after_steps: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """As the engine's."""
        with self._wake:
            if len(self._waiting) + len(requests) > self._max_queue:
                raise QueueFull(f"{len(self._waiting):,} requests wait, and {self._max_queue:,} may wait")
            self._waiting += requests
            self._wake.notify()

    def cancel(self, requests: Sequence[Request]) -> None:
        """As the engine's."""
        with self._wake:
            self._cancelled += requests
            self._wake.notify()

    def after_steps(self, function: Callable[[], None]) -> None:
        """As the engine's."""
        self._after_steps.append(function)

    def stats(self) -> EngineStats:
        """As the engine's; each request holds one block."""
        running = len(self._running)
        return EngineStats(len(self._waiting), running, running, 0, 1000 - running, self.num_steps, 0, 0, 0)

    def fail(self, message: str = "CUDA error: an illegal memory access was encountered") -> None:
        """End every request with an error, and report the failure."""
        with self._wake:
            self.failure = BminfError(message)
            self._wake.notify()

    def close(self) -> None:
        """Stop the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        next_step = time.perf_counter()
        while True:
            with self._wake:
                while not (self._waiting or self._running or self._cancelled or self._is_closing or self.failure):
                    self._wake.wait()
                    next_step = time.perf_counter()
                if self._is_closing:
                    return
                self._end_cancelled()
                free = self._max_num_seqs - len(self._running)
                self._running += self._waiting[:free]
                del self._waiting[:free]
            if self.failure is not None:
                self._fail()
                return
            self._step()
            for function in self._after_steps:
                function()
            self.busy_seconds = time.thread_time()
            next_step = max(next_step + self._seconds_per_step, time.perf_counter() - 10 * self._seconds_per_step)
            if self._running and (wait := next_step - time.perf_counter()) > 0:
                time.sleep(wait)

    def _step(self) -> None:
        self.num_steps += 1
        tokens, num_tokens = self._tokens, len(self._tokens)
        self.num_tokens += len(self._running)
        has_ended = False
        for request in self._running:
            request.start_time = request.start_time or time.perf_counter()
            place = request.prompt_token_ids[-1] + len(request.output_tokens)
            request.max_length = len(request.prompt_token_ids) + request.params.max_new_tokens
            top = [(token, -float(token)) for token in range(request.params.logprobs or 0)]
            request.append_token(tokens[place % num_tokens], -1.0, top)
            request.on_update(request)
            has_ended |= request.finish_reason is not None
        if has_ended:
            self._running = [r for r in self._running if r.finish_reason is None]

    def _end_cancelled(self) -> None:
        cancelled = [r for r in self._cancelled if r.finish_reason is None]
        self._cancelled = []
        for request in cancelled:
            request.finish_reason = "cancelled"
            for place in (self._running, self._waiting):
                if request in place:
                    place.remove(request)
            request.on_update(request)

    def _fail(self) -> None:
        with self._wake:
            ended, self._running, self._waiting = [*self._running, *self._waiting], [], []
        for request in ended:
            request.finish_reason, request.error = "error", self.failure
            request.on_update(request)
        for function in self._after_steps:
            function()


def fake_info(folder: str | None, vocab_size: int, context_length: int = 1 << 20) -> ModelInfo:
    """What a fake engine says of its model; ``folder`` holds a tokenizer."""
    return ModelInfo(folder, vocab_size, context_length, False, 0, [], [], {})
