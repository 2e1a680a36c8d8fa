"""The engine's loop on a stub device: any number of callers, who cancel, fail, read slowly, or close the model."""

from __future__ import annotations

import asyncio
import dis
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue

import pytest
from stub_runner import SIZE, StubRunner, alone, make_config, make_request, windows_of

from bminf_lite.completions import Completion, arun, run
from bminf_lite.engine.core import Engine
from bminf_lite.engine.request import Request
from bminf_lite.errors import QueueFull, UsageError
from bminf_lite.text.text_stream import NewText, TextStream


class StubEngine(Engine):
    """An engine over a stub device, which the test can reach."""

    def __init__(self, blocks: int = 40, ahead: int = 1, **limits: object):
        self.runner: StubRunner | None = None
        self.closed: list[threading.Thread] = []

        def make_runner(blocks):
            self.runner = StubRunner(blocks, self.config, ahead)
            self.runner.before_launch = lambda: self.before_launch()
            return self.runner

        super().__init__(make_config(blocks, **limits), make_runner, block_size=SIZE)
        self.before_launch: Callable[[], None] = lambda: None

    def close(self, timeout: float | None = None) -> None:
        super().close(lambda: self.closed.append(threading.current_thread()), timeout)

    def check(self, request: Request) -> None:
        """The result is that of the request alone."""
        tokens, _ = alone(request, windows_of(self.blocks), self.config.context_length)
        assert request.output_token_ids == tokens and request.finish_reason in ("stop", "length", "context")

    def wait_until_idle(self) -> None:
        wait_until(lambda: not self._has_requests() and not self._in_flight)
        assert self.call(lambda: [pool.num_used for pool in self.blocks.pools]) == [0] * len(self.blocks.pools)
        self.blocks.check([])


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.001)


@pytest.fixture
def engine() -> Iterator[StubEngine]:
    engine = StubEngine()
    yield engine
    engine.close()


def completion(request: Request) -> Completion:
    return Completion(request, TextStream(None))


def tokens_of(engine: Engine, request: Request) -> list[int]:
    return [token for piece in run(engine, [completion(request)], True) for token in piece.token_ids]


def test_a_call_that_does_not_stream_gets_one_piece_per_request(engine):
    """The engine's thread would wait for Python's lock while a caller makes a piece of each of many tokens."""
    request, ended = make_request([1, 2], 20), make_request([3], 20, deadline=time.perf_counter())
    first, second = sorted(run(engine, [completion(request), completion(ended)], False), key=lambda p: len(p.token_ids))
    assert (first.token_ids, first.finish_reason) == ([], "deadline")
    assert second.token_ids == second.result.token_ids == request.output_token_ids and second.result is not None
    engine.check(request)


# -- many callers -----------------------------------------------------------------------------------------------------


def test_64_threads_at_once(engine):
    """Some stop reading early. Everyone else gets what they get alone."""
    failures: list[BaseException] = []

    def caller(number: int) -> None:
        try:
            request = make_request([number % 5, 3, number, 4, 9], 3 + number % 9)
            if number % 4 == 3:
                pieces = run(engine, [completion(request)], True)
                next(pieces)
                pieces.close()
                return
            assert tokens_of(engine, request) == request.output_token_ids
            engine.check(request)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not failures
    engine.wait_until_idle()


def test_asyncio_tasks_share_the_steps(engine):
    async def one(number: int) -> Request:
        request = make_request([number, 1, 2], 12)
        async for piece in arun(engine, [completion(request)], True):
            if number == 3 and len(request.output_token_ids) > 2:
                break
            assert piece.index == 0
        return request

    async def everything() -> list[Request]:
        return await asyncio.gather(*(one(i) for i in range(8)))

    requests = asyncio.run(everything())
    for number, request in enumerate(requests):
        if number != 3:
            engine.check(request)
    assert len(engine.runner.steps) < 8 * 12
    engine.wait_until_idle()


def test_a_cancelled_task_cancels_its_request():
    engine = StubEngine(max_num_seqs=1)

    async def everything() -> None:
        request = make_request([1], 30)
        task = asyncio.create_task(anext(arun(engine, [completion(make_request([2], 30)), completion(request)], True)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    engine.before_launch = lambda: time.sleep(0.005)
    asyncio.run(everything())
    engine.wait_until_idle()
    engine.close()


def test_a_loop_that_ended_does_not_stop_others(engine):
    """asyncio.run ends while its request is under way: telling it fails, and only it ends."""
    engine.before_launch = lambda: time.sleep(0.002)
    other = make_request([5, 6], 20)

    async def leave() -> None:
        pieces = arun(engine, [completion(lost)], True)
        await anext(pieces)

    lost = make_request([1, 2], 25)
    asyncio.run(leave())
    assert tokens_of(engine, other)
    engine.check(other)
    engine.wait_until_idle()
    assert lost.finish_reason in ("cancelled", "error")


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 2])
def test_cancel_at_every_point_of_a_life(ahead):
    """While it waits, after each launch, and after its end; a request beside it is not disturbed."""
    for point in range(14):
        engine = StubEngine(12, ahead, max_num_seqs=2)
        victim, beside = make_request([4, 4, 4, 4, 4, 4, 4, 4, 4], 5), make_request([7, 1], 9)
        launches = iter(range(100))

        def cancel(point=point, engine=engine, victim=victim, launches=launches) -> None:
            if next(launches) == point:
                engine.cancel([victim])

        engine.before_launch = cancel
        ended: SimpleQueue[Request] = SimpleQueue()
        for request in (victim, beside):
            request.on_update = lambda r, ended=ended: ended.put(r) if r.finish_reason else None
        engine.submit([victim, beside])
        if point == 0:
            engine.cancel([victim])
        assert {ended.get(timeout=300), ended.get(timeout=300)} == {victim, beside}
        engine.check(beside)
        tokens, _ = alone(victim, (None,), 32)
        assert victim.output_token_ids == tokens[: len(victim.output_token_ids)]
        assert victim.finish_reason == ("cancelled" if len(victim.output_token_ids) < 5 else "length")
        engine.wait_until_idle()
        engine.close()


def test_an_exception_in_a_callback_ends_that_request_only(engine):
    def broken(request: Request) -> None:
        told.append(request.finish_reason)
        if len(request.output_token_ids) == 3:
            raise ZeroDivisionError("the caller's own")

    told: list[str | None] = []
    bad, good = make_request([1, 2, 3], 12), make_request([3, 2, 1], 12)
    bad.on_update = broken
    engine.submit([bad])
    tokens_of(engine, good)
    engine.check(good)
    wait_until(lambda: bad.finish_reason is not None)
    engine.wait_until_idle()
    assert bad.finish_reason == "error" and isinstance(bad.error, ZeroDivisionError)
    assert told == [None, None, None, "error"]


def test_an_error_of_the_device_reaches_every_caller_and_the_engine_lives_on(engine):
    def fail() -> None:
        if len(engine.runner.steps) == 4:
            engine.before_launch = lambda: None
            raise MemoryError("none left")

    engine.before_launch = fail
    failures: list[BaseException] = []

    def caller(number: int) -> None:
        try:
            tokens_of(engine, make_request([number], 25))
        except MemoryError as error:
            failures.append(error)

    is_held, all_wait = threading.Event(), threading.Event()
    threads = [threading.Thread(target=engine.call, args=(lambda: is_held.set() or all_wait.wait(300),))]
    threads[0].start()
    assert is_held.wait(300)
    threads += [threading.Thread(target=caller, args=(i,)) for i in range(6)]
    for thread in threads[1:]:
        thread.start()
    while engine.stats().waiting < 6:  # all join before the first step
        time.sleep(0.001)
    all_wait.set()
    for thread in threads:
        thread.join(300)
    assert len(failures) >= 4, "four run at a time; those that came later see nothing of it"
    again = make_request([1, 2, 3, 4, 5, 6, 7, 8, 9], 5)
    tokens_of(engine, again)
    engine.check(again)
    assert again.num_cached_tokens == 0, "what an error leaves behind is not reused"
    engine.wait_until_idle()


def test_an_error_after_a_request_has_ended_still_tells_its_caller(engine):
    """The step that ends two requests fails between them: neither caller waits for ever, and no row is lost."""
    ended = [make_request([i], 2) for i in range(2)]
    engine.before_launch = lambda: setattr(engine.runner, "remove", raises(RuntimeError("in the middle of a step")))
    results: SimpleQueue[Request] = SimpleQueue()
    for request in ended:
        request.on_update = lambda r: results.put(r) if r.finish_reason else None
    engine.submit(ended)
    assert {results.get(timeout=60), results.get(timeout=60)} == set(ended)
    engine.before_launch = lambda: None
    del engine.runner.remove
    engine.wait_until_idle()
    assert len(engine.runner.free_rows) == engine.config.max_num_seqs and not engine._untold


def test_a_device_that_cannot_start_is_an_error_of_the_call():
    tries: list[int] = []

    def start() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise MemoryError("no room")

    engine = StubEngine()
    engine._on_start = start
    with pytest.raises(MemoryError, match="no room"):
        tokens_of(engine, make_request([1]))
    assert tokens_of(engine, make_request([1]))
    engine.close()


def test_ctrl_c_ends_the_call_and_its_requests(engine, request):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    sent = make_request([1, 2], 29)

    def interrupt_once() -> None:
        if len(sent.output_token_ids) >= 5 and sent.finish_reason is None:
            engine.before_launch = lambda: wait_until(lambda: not engine._messages.empty())  # for its cancellation
            os.kill(os.getpid(), signal.SIGINT)

    engine.before_launch = interrupt_once
    with pytest.raises(KeyboardInterrupt):
        tokens_of(engine, sent)
    engine.before_launch = lambda: None
    engine.wait_until_idle()
    assert sent.finish_reason == "cancelled"
    assert tokens_of(engine, make_request([1, 2], 3))


def interrupted_at(point: int, work: Callable[[], object]) -> bool:
    """Do ``work`` with Ctrl-C where the engine's code looks for signals the ``point``-th time; whether there is one."""
    previous: dict[object, str] = {}
    left = point

    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.endswith(("core.py", "threading.py")):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, previous[frame] = previous.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
            left -= before.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    with suppress(KeyboardInterrupt):
        work()
    sys.settrace(None)
    return left <= 0


def test_ctrl_c_at_every_moment_leaves_the_engine_to_others(engine):
    """No lock stays locked, and no request stays counted."""
    interrupted_at(-1, lambda: tokens_of(engine, make_request([1], 1)))  # Python 3.12 traces the second time
    point = 1
    while interrupted_at(point, lambda: tokens_of(engine, make_request([2], 1))):
        point += 1
        other = threading.Thread(target=tokens_of, args=(engine, make_request([3], 1)), daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive(), f"at point {point}"
        assert engine.stats().waiting == 0
    assert point > 20


def test_a_thread_that_cannot_start_is_an_error_of_each_call(monkeypatch):
    engine = StubEngine()
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start new thread"):
        patched.setattr(threading.Thread, "start", raises(RuntimeError("can't start new thread")))
        tokens_of(engine, make_request([1]))
    assert tokens_of(engine, make_request([1]))
    engine.close()


def raises(error: BaseException) -> Callable[..., None]:
    def function(*arguments: object) -> None:
        raise error

    return function


def test_close_with_requests_under_way():
    engine = StubEngine(max_num_seqs=2)
    engine.before_launch = lambda: wait_until(lambda: engine._closing)
    failures: SimpleQueue[BaseException] = SimpleQueue()

    def caller(number: int) -> None:
        try:
            tokens_of(engine, make_request([number], 25))
        except UsageError as error:
            failures.put(error)

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    wait_until(lambda: engine.stats().running > 0)
    engine.close()
    engine.close()
    assert engine.runner.closed and len(engine.closed) == 1 and engine.closed[0].name == "bminf-lite-engine"
    for thread in threads:
        thread.join(300)
    for _ in threads:
        assert "the model is closed" in str(failures.get(timeout=300))
    for call in (lambda: tokens_of(engine, make_request([1])), lambda: engine.call(lambda: 1)):
        with pytest.raises(UsageError, match="the model is closed"):
            call()
    engine.cancel([make_request([1])])


def test_closing_waits_no_longer_than_it_is_told():
    """The garbage collector may close an engine in a thread that holds what the engine waits for."""
    engine, lock = StubEngine(), threading.Lock()
    engine.call(lambda: 1)
    engine.after_steps(lambda: lock.acquire() and lock.release())
    with lock:
        engine.close(timeout=0.05)
        assert engine._thread is not None and engine._thread.is_alive()
    engine.close()
    assert not engine._thread.is_alive() and len(engine.closed) == 1


def test_closing_an_engine_that_has_done_nothing_starts_no_thread():
    engine = StubEngine()
    engine.close()
    engine.close()
    assert engine._thread is None and engine.closed == [threading.current_thread()]


def test_a_caller_who_stops_reading_neither_stops_others_nor_takes_more_than_its_tokens(engine):
    slow = make_request([9, 9], 30)
    unread = run(engine, [completion(slow)], True)
    next(unread)
    for i in range(12):
        other = make_request([i], 9)
        tokens_of(engine, other)
        engine.check(other)
    assert slow.finish_reason == "length", "its tokens were computed and wait"
    assert [slow.output_token_ids[0], *(t for p in unread for t in p.token_ids)] == slow.output_token_ids


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_request_that_never_fits_is_refused_at_once(engine):
    small = StubEngine(6)
    with pytest.raises(UsageError, match=r"prompt 0 can never run: 21 tokens need 6 blocks of 4 tokens.* has 5"):
        small.submit([make_request([1] * 9, 12)])
    assert small._thread is None
    fits = make_request([1] * 9, 11)
    tokens_of(small, fits)
    small.check(fits)
    small.close()


def test_the_queue_has_a_bound(engine):
    bounded = StubEngine(max_queue=3, max_num_seqs=1)
    may_go_on = threading.Event()
    bounded.before_launch = lambda: may_go_on.wait(300)
    bounded.submit([make_request([1], 20)])
    wait_until(lambda: bounded.stats().running == 1)
    bounded.submit([make_request([i, 1, 2], 2) for i in range(3)])
    with pytest.raises(QueueFull, match=r"3 requests wait, and 1 more would exceed the bound of 3 \(max_queue\)"):
        bounded.submit([make_request([1])])
    assert bounded.stats().waiting == 3 and bounded.stats().queued_tokens == 9
    may_go_on.set()
    bounded.close()


def test_a_forked_process_is_told(engine):
    tokens_of(engine, make_request([1], 2))

    under_way = run(engine, [completion(make_request([2], 20))], every_token=True)
    next(under_way)

    def child(results: multiprocessing.SimpleQueue) -> None:
        for call in (lambda: engine.submit([make_request([1])]), lambda: list(under_way)):
            with pytest.raises(UsageError) as found:
                call()
            results.put(str(found.value))
        engine.cancel([])
        engine.close()
        os._exit(0)

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=child, args=(results,))
    process.start()
    process.join(300)
    assert process.exitcode == 0 and not engine.closed
    assert "forked" in results.get() and "forked" in results.get()
    assert len(list(under_way)) == 19 and tokens_of(engine, make_request([1], 2))


# -- the thread -------------------------------------------------------------------------------------------------------


def test_every_call_to_the_device_comes_from_one_thread(engine):
    seen: set[threading.Thread] = set()
    engine.before_launch = lambda: seen.add(threading.current_thread())
    threads = [threading.Thread(target=tokens_of, args=(engine, make_request([i], 3))) for i in range(4)]
    for thread in threads:
        thread.start()
    seen.add(engine.call(threading.current_thread))
    for thread in threads:
        thread.join(300)
    assert {t.name for t in seen} == {"bminf-lite-engine"} and len(seen) == 1
    assert engine.call(lambda: engine.call(lambda: 5)) == 5
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 / 0)


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_idle_engine_keeps_nothing_of_its_last_request(ahead):
    engine = StubEngine(ahead=ahead)

    class Marker:
        pass

    marker = Marker()
    kept = weakref.ref(marker)
    request = make_request([1], 2)
    request.on_update = lambda r, marker=marker: None
    tokens_of(engine, make_request([2], 5))
    engine.submit([request])
    wait_until(lambda last=request: last.finish_reason is not None)
    del marker, request
    engine.runner.steps.clear()
    wait_until(lambda: kept() is None)
    engine.close()


def test_an_idle_engine_sleeps(engine):
    tokens_of(engine, make_request([1], 2))
    engine.wait_until_idle()
    before = engine.call(time.thread_time)
    time.sleep(0.2)
    assert engine.call(time.thread_time) - before < 0.02


def test_a_request_joins_while_others_run_and_leaves_when_it_is_done(engine):
    long, short = make_request([1], 25), make_request([2], 3)
    engine.before_launch = lambda: wait_until(
        lambda: len(long.output_token_ids) < 3 or bool(engine.stats().waiting or short.start_time)
    )
    pieces = run(engine, [completion(long)], True)
    next(pieces)
    tokens_of(engine, short)
    list(pieces)
    assert long.first_token_time < short.first_token_time <= short.last_token_time < long.last_token_time
    for request in (long, short):
        engine.check(request)


class StopsAtTheThirdToken(TextStream):
    def push(self, token_ids, finish_reason=None, logprobs=None, top_logprobs=None):
        super().push(token_ids)
        return NewText("", [], "stop" if self.num_tokens == 3 else finish_reason)


def test_a_stop_string_cancels_its_request_while_others_of_the_call_go_on(engine):
    stopped, other = make_request([1], 29), make_request([2], 29)
    seen = threading.Event()
    engine.before_launch = lambda: wait_until(
        lambda: len(stopped.output_token_ids) < 4 or not engine._messages.empty() or seen.is_set()
    )
    results = {}
    completions = [Completion(stopped, StopsAtTheThirdToken(None)), completion(other)]
    for piece in run(engine, completions, True):
        if piece.result is not None:
            results[len(results)] = piece.result
            if len(results) == 1:
                wait_until(lambda: engine.stats().running == 1)
                assert (stopped.finish_reason, other.finish_reason) == ("cancelled", None)
                seen.set()
    assert (results[0].finish_reason, len(results[0].token_ids)) == ("stop", 3)
    assert results[0].token_ids == stopped.output_token_ids[:3]
    engine.check(other)


def test_a_deadline_ends_a_request(engine):
    engine.before_launch = lambda: time.sleep(0.01)
    request = make_request([1], 30, deadline=time.perf_counter() + 0.1)
    *_, last = run(engine, [completion(request)], True)
    assert last.result.finish_reason == "deadline" and len(last.result.token_ids) < 30


def test_statistics(engine):
    for _ in range(2):
        tokens_of(engine, make_request([3, 1, 4, 1, 5, 9, 2, 6, 5], 2))
    engine.wait_until_idle()
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (18, 8)
    assert (stats.waiting, stats.running, stats.blocks_used, stats.blocks_cached, stats.blocks_free) == (0, 0, 0, 3, 36)
    assert stats.steps == len(engine.runner.steps) > 0


def test_what_is_called_after_steps_finds_every_update_told(engine):
    """Also after a step that fails, and after the last one of a closed engine."""
    told: list[int] = []
    seen: list[tuple[int, str | None]] = []
    request = make_request([1], 4, on_update=lambda request: told.append(len(request.output_token_ids)))
    engine.after_steps(lambda: seen.append((len(told), request.finish_reason)))
    engine.submit([request])
    wait_until(lambda: request.finish_reason is not None)
    wait_until(lambda: seen[-1] == (len(told), request.finish_reason))
    count = len(seen)
    engine.close()
    assert len(seen) > count


def test_an_error_after_a_step_reaches_every_caller_and_the_engine_lives_on(engine):
    steps = iter(range(100))
    engine.after_steps(lambda: 1 / 0 if next(steps) == 3 else None)
    with pytest.raises(ZeroDivisionError):
        tokens_of(engine, make_request([1], 9))
    assert isinstance(engine.failure, ZeroDivisionError)
    request = make_request([1], 4)
    tokens_of(engine, request)
    engine.check(request)


@pytest.mark.parametrize(("error", "is_failure"), [(RuntimeError("illegal access"), True), (MemoryError(), False)])
def test_a_failure_is_what_the_device_may_not_survive(engine, error, is_failure):
    def fail() -> None:
        engine.before_launch = lambda: None
        raise error

    engine.before_launch = fail
    with pytest.raises(type(error)):
        tokens_of(engine, make_request([1], 4))
    assert engine.failure is (error if is_failure else None)
