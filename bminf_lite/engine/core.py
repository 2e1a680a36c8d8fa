"""The loop that runs all requests of a model, in the one thread that calls its device.

Callers in any thread leave messages: a request, a cancellation, or a function to run between two steps. The loop reads
them, launches steps until the device has enough of them, waits for the oldest, and tells each caller about its tokens.
It sleeps while nothing is to be done.

Ctrl-C may interrupt a caller between any two operations, and the garbage collector may close a stream in any thread. So
a message is left by one operation that is written in C, without a lock that could stay locked.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, TypeVar

from ..backend.values import BLOCK_SIZE
from ..errors import BminfError, QueueFull, UsageError
from .block_manager import BlockManager
from .config import EngineConfig
from .drafts import Drafter
from .pooling import PoolingQueue, PoolingRequest
from .request import Request
from .scheduler import Rows, Scheduler
from .step import Step, StepResult

T = TypeVar("T")


class Launched(Protocol):
    """A step that the device computes."""

    @property
    def waits_for_tokens(self) -> bool:
        """Whether :meth:`sample` must be called once all earlier steps are fetched. No step may start before that."""
        ...

    def sample(self) -> None:
        """Start to choose the step's tokens, unless that has started."""
        ...

    def fetch(self) -> StepResult:
        """Its result; waits for the device."""
        ...


class Runner(Rows, Protocol):
    """What runs steps; see :class:`.ModelRunner`."""

    max_steps_in_flight: int

    def launch(self, step: Step) -> Launched:
        """Start a step."""
        ...

    def drafter(self) -> Drafter:
        """What guesses the next tokens of requests."""
        ...

    def warm_up(self) -> None:
        """Take all memory that steps may need, and prepare them."""
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


@dataclass(frozen=True)
class EngineStats:
    """What the engine does now, and what it has done since the model was loaded.

    Blocks are those of the group of layers with tokens that has the fewest available: ``blocks_used`` are held by
    requests, ``blocks_cached`` are held by none and may be reused, ``blocks_free`` are the rest. ``cached_tokens`` of
    ``prompt_tokens`` came from the cache. In ``drafts`` checks of a request ``draft_tokens`` were checked and
    ``accepted_tokens`` accepted; ``accepted_per_position`` has the checks that accepted the first draft, the second,
    and so on. ``queued_tokens`` are those of prompts that no step has begun to compute, of all requests.
    ``texts`` became vectors, of ``text_tokens`` tokens.
    """

    waiting: int
    running: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    queued_tokens: int = 0
    texts: int = 0
    text_tokens: int = 0

    @property
    def tokens_per_check(self) -> float:
        """Tokens that a check of a request brought in the mean, the one behind its accepted drafts included."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0


class Engine:
    """Requests in, tokens out, for every thread of the process.

    ``on_start`` is called in the engine's thread before anything else, and ``make_runner`` when the first request
    comes. A request's ``on_update`` is called there too, so it must be quick.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_runner: Callable[[BlockManager], Runner],
        on_start: Callable[[], None] = lambda: None,
        block_size: int = BLOCK_SIZE,
        make_pooling: Callable[[], PoolingQueue] | None = None,
    ):
        self.config = config
        self.blocks = BlockManager(
            config.cache_layout.groups,
            config.num_blocks,
            config.num_source_blocks,
            max_piece=config.max_num_batched_tokens,
            prefix_cache=config.prefix_cache,
            block_size=block_size,
        )
        self._make_runner = make_runner
        self._on_start = on_start
        self._on_close: Callable[[], None] = lambda: None
        self._make_pooling = make_pooling
        self._pooling: PoolingQueue | None = None
        self._runner: Runner | None = None
        self._scheduler: Scheduler | None = None
        self._in_flight: deque[tuple[Step, Launched]] = deque()
        self._num_steps = 0
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._messages: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._arriving: deque[Sequence[Request]] = deque()
        self._untold: dict[Request, None] = {}  # requests whose caller was not told of their end
        self._closing = False
        self._has_started = False
        self._after_steps: list[Callable[[], None]] = []
        self.failure: BaseException | None = None
        """The last error that ended all requests, other than a lack of memory; the device may be of no more use."""

    # -- called in any thread -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Let requests join at the next step, all or none.

        Raises ``UsageError`` for a request that could never fit in the cache, after :meth:`close`, and in a process
        that was forked from the one that made the engine; ``QueueFull`` for too many waiting requests.
        """
        if not self.config.generates:
            raise UsageError("this model makes vectors of texts, and generates none: ask for embeddings or scores")
        for request in requests:
            self._require_fit(request)
        self._open()
        with self._lock:  # so that two callers do not take the same places in the queue
            waiting = self._num_waiting
            if waiting + len(requests) > self.config.max_queue:
                raise QueueFull(
                    f"{waiting:,} requests wait, and {len(requests):,} more would exceed the bound of "
                    f"{self.config.max_queue:,} (max_queue): wait until some are done, or raise the bound"
                )
            self._arriving.append(requests)
        self._post(_wake)

    def pool(self, request: PoolingRequest) -> None:
        """Make vectors of whole texts, beside the requests that generate: one batch of texts between two steps.

        Raises ``UsageError`` for a model that makes none, and as :meth:`submit`; ``QueueFull`` for too many texts.
        """
        if self._make_pooling is None:
            raise UsageError("this model makes no vectors of texts: load an embedding model")
        self._open()
        waiting = self._pooling.num_waiting if self._pooling else 0
        if waiting and waiting + len(request.texts) > self.config.max_queue:
            raise QueueFull(
                f"{waiting:,} texts wait, and {len(request.texts):,} more would exceed the bound of "
                f"{self.config.max_queue:,} (max_queue): wait until some are done, or raise the bound"
            )
        self._post(lambda: self._add_texts(request))

    def cancel(self, requests: Sequence[Request]) -> None:
        """End requests early. Their blocks are free at the next step. No effect on those that have ended."""
        requests = [r for r in requests if r.finish_reason is None]
        if requests and os.getpid() == self._process and self._thread is not None and not self._closing:
            self._messages.put(lambda: self._cancel(requests))

    def require_process(self) -> None:
        """Raise ``UsageError`` in a process that was forked from the one that made the engine."""
        if os.getpid() != self._process:
            raise UsageError(
                "this process was forked from the one that loaded the model, and has neither its engine nor its "
                'device: load the model here, or start processes with multiprocessing.get_context("spawn")'
            )

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps, and return its result or raise its error."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                self._start()
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._open()
        self._post(run)
        return future.result()

    def warm_up(self) -> None:
        """Take all memory of the cache and capture the steps now, so that requests wait for neither.

        Raises ``OutOfMemory``, and ``UsageError`` as :meth:`submit` does.
        """
        if self.config.generates:
            self.call(lambda: self._ready()[1].warm_up())
        if self._make_pooling is not None:
            self.call(lambda: self._ready_for_texts().warm_up())

    def stats(self) -> EngineStats:
        """A snapshot, which does not wait for the engine."""
        scheduler, pooling = self._scheduler, self._pooling
        pool = min(self.blocks.block_pools, key=lambda p: p.num_available, default=None)
        cached, used = (pool.num_idle, pool.num_used) if pool else (0, 0)
        return EngineStats(
            waiting=self._num_waiting + (pooling.num_waiting if pooling else 0),
            running=len(scheduler.running if scheduler else ()),
            blocks_used=used,
            blocks_cached=cached,
            blocks_free=pool.num_blocks - 1 - used - cached if pool else 0,
            steps=self._num_steps,
            preemptions=scheduler.num_preemptions if scheduler else 0,
            prompt_tokens=scheduler.num_prompt_tokens if scheduler else 0,
            cached_tokens=scheduler.num_cached_tokens if scheduler else 0,
            drafts=scheduler.num_drafts if scheduler else 0,
            draft_tokens=scheduler.num_draft_tokens if scheduler else 0,
            accepted_tokens=scheduler.num_accepted_tokens if scheduler else 0,
            accepted_per_position=tuple(scheduler.num_accepted_per_position) if scheduler else (),
            queued_tokens=self._num_queued_tokens,
            texts=pooling.num_texts if pooling else 0,
            text_tokens=pooling.num_tokens if pooling else 0,
        )

    def after_steps(self, function: Callable[[], None]) -> None:
        """Let the engine's thread call ``function`` after each step's updates; it must be quick."""
        self._after_steps.append(function)

    def close(self, on_close: Callable[[], None] = lambda: None, timeout: float | None = None) -> None:
        """End all requests with an error, give the memory back and stop the thread. May be called again.

        At the end the thread calls ``on_close``; if nothing has started it, the caller does. The caller waits for the
        end, for ``timeout`` seconds at most if that is given.
        """
        if os.getpid() != self._process:
            return  # the thread and the device belong to the parent
        with self._lock:
            if not self._closing:
                self._on_close = on_close
            first, self._closing = not self._closing, True
        if self._thread is None:
            if first:
                on_close()
        else:
            self._messages.put(_wake)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout)
        self._make_pooling = None
        self._make_runner = _no_runner  # so that a closed engine does not keep the model's weights

    @property
    def _num_waiting(self) -> int:
        arriving = sum(len(requests) for requests in self._arriving.copy())
        return arriving + len(self._scheduler.waiting if self._scheduler else ())

    @property
    def _num_queued_tokens(self) -> int:
        scheduler = self._scheduler
        requests = [request for arriving in self._arriving.copy() for request in arriving]
        requests += [*scheduler.waiting, *scheduler.running] if scheduler else []
        return sum(n for request in requests if (n := request.num_uncomputed_tokens) > 1)

    def _open(self) -> None:
        """Check that the engine can take messages, and start its thread."""
        self.require_process()
        with self._lock:
            if self._closing:
                raise closed_error()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="bminf-lite-engine", daemon=True)
                thread.start()
                self._thread = thread

    def _post(self, message: Callable[[], None]) -> None:
        """Leave a message. The engine's thread reads all that are there before ``_closing`` is set, perhaps others."""
        self._messages.put(message)
        if self._closing:
            raise closed_error()

    def _require_fit(self, request: Request) -> None:
        length = request.limit_length(self.config.context_length)
        piece = length if request.whole_prompt else 0
        reason = self.blocks.shortage(length, len(request.source_token_ids), piece)
        if reason is not None:
            raise UsageError(
                f"prompt {request.index} can never run: {reason}. Shorten the prompt (here "
                f"{len(request.prompt_token_ids):,} tokens), lower max_new_tokens (here "
                f"{request.params.max_new_tokens:,}), or load the model with more memory or kv_cache='int8'"
            )

    # -- called in the engine's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        self._thread = threading.current_thread()
        closing = False
        while not closing:
            is_busy = self._in_flight or self._has_requests() or (self._pooling and self._pooling.has_work)
            messages = [] if is_busy else [self._messages.get()]
            closing = self._closing
            while not self._messages.empty():
                messages.append(self._messages.get())
            steps = [] if closing else [self._advance, self._advance_texts]
            for work in (self._add_arrived, *messages, *steps, self._end_step):
                try:
                    work()
                except BaseException as error:  # noqa: PERF203, the thread must live on
                    self.failure = self.failure if isinstance(error, MemoryError) else error
                    self._fail(error)
            del messages, work  # an idle engine keeps no request
        self._fail(closed_error())
        try:
            self._end_step()
            if self._pooling is not None:
                self._pooling.close()
            if self._runner is not None:
                self._runner.close()
        finally:
            self._runner = self._pooling = None
            self._on_close()

    def _start(self) -> None:
        if not self._has_started:
            self._on_start()
            self._has_started = True

    def _ready(self) -> tuple[Scheduler, Runner]:
        """The scheduler and the runner, which are made when they are first needed."""
        if self._runner is None or self._scheduler is None:
            self._runner = self._make_runner(self.blocks)
            drafter = self._runner.drafter() if self.config.num_draft_tokens else None
            self._scheduler = Scheduler(self.config, self.blocks, self._runner, drafter)
        return self._scheduler, self._runner

    def _has_requests(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_requests

    def _advance(self) -> None:
        """Launch the steps that the device should have, and handle the result of the oldest.

        If the device is idle, the next step is launched first, and then callers are told of their tokens.
        """
        scheduler, runner = self._scheduler, self._runner
        if scheduler is None or runner is None:
            return
        self._tell(scheduler.end_overdue(time.perf_counter()))
        in_flight = self._in_flight
        self._launch(scheduler, runner)
        if in_flight:
            step, launched = in_flight.popleft()
            updated = scheduler.postprocess(step, launched.fetch())
            try:
                if len(in_flight) == 1:
                    in_flight[0][1].sample()
                elif runner.max_steps_in_flight and not in_flight and scheduler.running:
                    self._add_arrived()
                    self._launch(scheduler, runner)  # the device is idle, so callers are told later
            finally:
                self._tell(updated)
        elif scheduler.has_requests:
            raise BminfError("the scheduler has requests and plans no step: this is a bug in bminf-lite")

    def _launch(self, scheduler: Scheduler, runner: Runner) -> None:
        """Launch steps until the device has enough of them, or the next one cannot be planned yet."""
        in_flight = self._in_flight
        while (
            len(in_flight) <= runner.max_steps_in_flight
            and not (in_flight and in_flight[-1][1].waits_for_tokens)
            and (step := scheduler.schedule())
        ):
            in_flight.append((step, runner.launch(step)))
            self._num_steps += 1

    def _add_arrived(self) -> None:
        """Called in every turn: if Ctrl-C interrupts a caller before it wakes the thread, its cancellation wakes it."""
        while self._arriving:
            self._add(self._arriving[0])
            self._arriving.popleft()

    def _add(self, requests: Sequence[Request]) -> None:
        try:
            self._start()
            scheduler, _ = self._ready()
            for request in requests:
                if request.finish_reason is None:
                    self._untold[request] = None
                    scheduler.add(request)
        except BaseException as error:
            for request in requests:
                self._end_with_error(request, error)
            self._tell(requests)

    def _add_texts(self, request: PoolingRequest) -> None:
        try:
            self._start()
            self._ready_for_texts().add(request)
        except BaseException as error:
            request.error = error
            request.on_update(request)

    def _ready_for_texts(self) -> PoolingQueue:
        """The queue of texts, which is made when it is first needed."""
        if self._pooling is None:
            assert self._make_pooling is not None
            self._pooling = self._make_pooling()
        return self._pooling

    def _advance_texts(self) -> None:
        """Compute a batch of texts, if some wait."""
        if self._pooling is not None:
            self._pooling.advance()

    def _cancel(self, requests: Sequence[Request]) -> None:
        if self._scheduler is not None:
            self._tell([r for r in requests if self._scheduler.end(r, "cancelled")])

    def _end_with_error(self, request: Request, error: BaseException) -> None:
        """End a request, also one that the scheduler does not have."""
        if self._scheduler is None or not self._scheduler.end(request, "error", error):
            request.finish_reason, request.error = "error", error

    def _fail(self, error: BaseException) -> None:
        """End all requests. What the steps in flight leave in the cache is not used."""
        self._in_flight.clear()
        if self._pooling is not None:
            self._pooling.fail(error)
        if self._scheduler is not None:
            self._scheduler.reset()
        for request in self._untold:
            if request.finish_reason is None:
                request.finish_reason, request.error = "error", error
        self._tell(list(self._untold))

    def _end_step(self) -> None:
        for function in self._after_steps:
            function()

    def _tell(self, requests: Sequence[Request]) -> None:
        """Call the requests' ``on_update``. An error in it ends that request, and it is called once more to say so."""
        for request in requests:
            try:
                request.on_update(request)
            except BaseException as error:
                self._end_with_error(request, error)
                with suppress(BaseException):
                    request.on_update(request)
            if request.finish_reason is not None:
                self._untold.pop(request, None)


def _wake() -> None:
    """A message that only ends the sleep of the engine's thread."""


def _no_runner(blocks: BlockManager) -> Runner:
    raise closed_error()


def closed_error() -> UsageError:
    """The error of every use of a closed model."""
    return UsageError("the model is closed: load it again")
