"""The seam between HTTP code and engine: requests through the real protocol to an engine without a model."""

from __future__ import annotations

import asyncio
import gc
import select
import socket
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import pytest

pytest.importorskip("msgspec", reason="the extra [serve] is not installed")

from client_kit import connected, read, until
from fake_engine import FakeEngine, fake_info

from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.errors import QueueFull
from bminf_lite.request_builder import GenerationRequest
from bminf_lite.server import generating
from bminf_lite.server.client import (
    CompletionFailed,
    EngineClient,
    EngineFailure,
    Generation,
    Output,
    RequestRefused,
)
from bminf_lite.server.engine_server import EngineServer
from bminf_lite.server.protocol import Admitted, FrameReader, FromEngine, StepOutputs, Submit, ToEngine, frame
from bminf_lite.text.prompts import EncodedPrompt
from bminf_lite.text.text_stream import TextStream

VOCAB_SIZE = 2048


def run(test: Callable[[EngineClient, FakeEngine], Awaitable[None]], **options: float) -> None:
    async def main() -> None:
        engine = FakeEngine(range(VOCAB_SIZE), **options)
        async with connected(engine, fake_info(None, VOCAB_SIZE, context_length=512)) as client:
            await asyncio.wait_for(test(client, engine), 300)

    asyncio.run(main())


def wanted(tokens: int, n: int = 1, prompt: tuple[int, ...] = (5, 7), **options: object) -> GenerationRequest:
    return GenerationRequest(
        EncodedPrompt(list(prompt)), SamplingParams(max_new_tokens=tokens, **options), n, is_streamed=True
    )


def test_every_token_arrives_once_and_in_order():
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        generations = [await client.generate(wanted(50, n, prompt=(start,))) for n, start in ((1, 3), (3, 900))]
        for generation, n, start in zip(generations, (1, 3), (3, 900), strict=True):
            expected = list(range(start, start + 50))
            assert await read(generation) == dict.fromkeys(range(n), expected)
            assert generation.has_ended
        assert client.num_running == 0

    run(test)


def test_what_has_ended_is_freed_at_once(monkeypatch):
    """Without the garbage collector: a grammar's lexer counts the completions that it serves."""
    submit, requests = FakeEngine.submit, []

    def submit_and_remember(engine, submitted):
        requests.extend(map(weakref.ref, submitted))
        submit(engine, submitted)

    monkeypatch.setattr(FakeEngine, "submit", submit_and_remember)

    async def test(client: EngineClient, engine: FakeEngine) -> None:
        assert len(await read(await client.generate(wanted(5, 3)))) == 3
        async with await client.generate(wanted(1000)):
            pass
        await until(lambda: not any(request() for request in requests))
        assert len(requests) == 4

    gc.collect()
    gc.disable()
    try:
        run(test)
    finally:
        gc.enable()


def test_requests_of_one_generation_are_numbered_on():
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        generation = await client.generate(wanted(2, 2, (10,)), wanted(3, 1, (20,)))
        assert await read(generation) == {0: [10, 11], 1: [10, 11], 2: [20, 21, 22]}

    run(test)


def test_requests_that_come_together_reach_the_engine_before_any_is_answered():
    """Also those of several HTTP processes. So one step begins all of them, and not the first alone."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(300)
        ours.sendall(frame(fake_info(None, VOCAB_SIZE)))
        client = await EngineClient.connect(theirs)
        tasks = [asyncio.create_task(client.generate(wanted(5))) for _ in range(8)]
        data = await asyncio.to_thread(ours.recv, 1 << 16)
        assert [type(message) for message in FrameReader(ToEngine).feed(data)] == [Submit] * 8

        engine = FakeEngine(range(VOCAB_SIZE))
        server = EngineServer(engine, fake_info(None, VOCAB_SIZE))
        ends = [server.connect() for _ in range(3)]
        is_held, may_go_on, answered = threading.Event(), threading.Event(), []

        def submit(requests: Sequence[Request]) -> None:
            if is_held.is_set():
                answered.append(select.select(ends[1:], [], [], 0)[0])
            is_held.set()
            assert may_go_on.wait(300)

        engine.submit = submit
        for end in ends:
            end.settimeout(300)
            assert end.recv(1 << 16)  # the facts of the model
        ends[0].sendall(frame(Submit(0, 0, wanted(5))))
        assert is_held.wait(300)
        for end in ends[1:]:  # while the thread that reads is held
            end.sendall(data)
        may_go_on.set()
        for end in ends[1:]:
            assert [type(message) for message in FrameReader(FromEngine).feed(end.recv(1 << 16))] == [Admitted] * 8
        assert answered == [[]] * 16  # nothing could be read at any of them
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        client.close()
        server.close()
        engine.close()
        for end in (ours, *ends):
            end.close()

    asyncio.run(main())


def test_a_connection_that_is_given_up_is_closed():
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(60)
            connecting = asyncio.create_task(EngineClient.connect(theirs))  # which waits for the facts of the model
            await asyncio.sleep(0.01)
            connecting.cancel()
            await asyncio.wait([connecting])
            assert connecting.cancelled()
            assert await asyncio.to_thread(ours.recv, 1) == b""

    asyncio.run(main())


def test_tokens_behind_a_slow_reader_are_joined():
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        generation = await client.generate(wanted(400, logprobs=1))
        await until(lambda: client.num_running == 0)
        output = generation.take()
        assert output is not None and output.finish_reason == "length"
        assert len(output.token_ids) == 400 == len(output.logprobs or ()) == len(output.top_logprobs or ())
        assert [o async for o in generation] == []

    run(test)


def test_an_http_process_that_is_behind_gets_joined_steps():
    """The engine neither waits for it nor encodes a message per step, and every token arrives once."""
    engine = FakeEngine(range(VOCAB_SIZE))
    server = EngineServer(engine, fake_info(None, VOCAB_SIZE, context_length=1 << 20))
    end = server.connect()
    end.settimeout(300)
    server._connections[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # whatever the default is
    length, count = 40_000, 4
    for first_id in range(count):
        end.sendall(frame(Submit(first_id, 0, wanted(length))))
    while engine.stats().running or engine.num_tokens < length * count:
        time.sleep(0.01)  # nothing is read, until the engine is done
    reader, tokens, num_messages = FrameReader(FromEngine), {i: [] for i in range(count)}, 0
    while not all(len(got) == length for got in tokens.values()):
        for message in reader.feed(end.recv(1 << 14)):
            if isinstance(message, StepOutputs):
                num_messages += 1
                for id, token in zip(message.ids, message.token_ids, strict=True):
                    tokens[id].append(token)
                for output in message.outputs:
                    tokens[output.id] += output.token_ids
    assert all(got == [(7 + i) % VOCAB_SIZE for i in range(length)] for got in tokens.values())
    assert num_messages < length / 2
    end.close()
    server.close()
    engine.close()


def test_cancelling_ends_the_request_in_the_engine():
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        async with await client.generate(wanted(100_000, 3)) as generation:
            await anext(generation)
            assert (await client.stats()).stats.running == 3
            generation.cancel(1)
            await until(lambda: engine.stats().running == 2)
        await until(lambda: engine.stats().running == 0)
        assert generation.has_ended and client.num_running == 0

    run(test, seconds_per_step=0.002)


def test_a_cancelled_reader_wakes():
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        generation = await client.generate(wanted(10))
        reading = asyncio.ensure_future(read(generation))
        await asyncio.sleep(0.01)
        generation.cancel()
        assert await reading == {}

    run(test, max_num_seqs=0)


def test_refusals():
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        with pytest.raises(RequestRefused, match="whole number from 0 to 2047"):
            await client.generate(wanted(1, prompt=(VOCAB_SIZE,)))
        with pytest.raises(RequestRefused, match="too long: it has 512 tokens"):
            await client.generate(wanted(1, prompt=(1,) * 512))
        with pytest.raises(QueueFull, match="may wait"):
            await client.generate(wanted(1), wanted(1, n=10_000))
        await until(lambda: engine.stats().running == engine.stats().waiting == client.num_running == 0)

    run(test)


def test_a_failed_engine_ends_everything():
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        generation = await client.generate(wanted(100_000))
        engine.fail("CUDA error: misaligned address")
        with pytest.raises(EngineFailure, match="misaligned"):
            await read(generation)
        assert client.failure is not None and client.num_running == 0
        with pytest.raises(EngineFailure, match="misaligned"):
            await client.generate(wanted(1))
        with pytest.raises(EngineFailure, match="misaligned"):
            await client.stats()

    run(test, seconds_per_step=0.002)


@pytest.mark.parametrize("by", ["the engine", "its process"])
def test_tokens_before_an_error_are_not_lost(by: str):
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        generation = await client.generate(wanted(100_000, logprobs=0))
        completion = generation.completions[0]
        await until(lambda: len(completion.token_ids) > 2)
        if by == "the engine":
            engine.fail("CUDA error: misaligned address")
            await until(lambda: client.failure is not None)
        else:
            client.end_all("gone")
        output = generation.take()
        assert output is not None and output.finish_reason is None
        assert output.token_ids == list(range(7, 7 + len(output.token_ids))) and len(output.token_ids) > 2
        assert len(output.logprobs or ()) == len(output.token_ids)
        with pytest.raises(EngineFailure):
            generation.take()
        assert generation.has_ended and generation.take() is None

    run(test, seconds_per_step=0.002)


def test_a_client_that_goes_away_cancels_its_requests():
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        await client.generate(wanted(100_000, 4))
        await until(lambda: engine.stats().running == 4)
        client.close()
        await until(lambda: engine.stats().running == 0)

    run(test, seconds_per_step=0.002)


@pytest.mark.parametrize("before", [True, False], ids=["before it listens", "later"])
def test_an_http_process_hears_that_it_is_to_end(before: bool):
    async def main() -> None:
        engine = FakeEngine(range(VOCAB_SIZE))
        server = EngineServer(engine, fake_info("", VOCAB_SIZE))
        client = await EngineClient.connect(server.connect())
        heard: list[float] = []
        if not before:
            client.on_shutdown(heard.append)
        server.shut_down_clients(7.5)
        await client.stats()  # messages come in their order
        if before:
            client.on_shutdown(heard.append)
        assert heard == [7.5]
        client.close()
        server.close()
        engine.close()

    asyncio.run(main())


def test_a_completion_that_the_engine_ends_with_an_error_is_an_error():
    with pytest.raises(CompletionFailed, match="NaN"):
        generating.read(cast(Generation, None), TextStream(None), Output(0, [5], finish_reason="error", error="a NaN"))


@pytest.mark.parametrize("ends_by_text", [False, True])
def test_a_completion_that_is_read_as_a_whole_is_sent_at_its_end_or_where_its_text_may_end_it(
    ends_by_text: bool,
) -> None:
    async def main() -> list[int]:
        engine = FakeEngine(range(VOCAB_SIZE), seconds_per_step=0.002)
        server = EngineServer(engine, fake_info(None, VOCAB_SIZE, context_length=512))
        client = await EngineClient.connect(server.connect(seconds_between=0.01))
        try:
            params = SamplingParams(max_new_tokens=50)
            generation = await client.generate(GenerationRequest(EncodedPrompt([1]), params, ends_by_text=ends_by_text))
            return [len(output.token_ids) async for output in generation]
        finally:
            client.close()
            server.close()
            engine.close()

    counts = asyncio.run(main())
    assert sum(counts) == 50
    assert 1 < len(counts) < 50 if ends_by_text else counts == [50]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_is_not_streamed_comes_in_few_parts_and_its_first_token_at_once(is_streamed: bool) -> None:
    """Over HTTP, where the time of the first token counts."""

    counts: list[int] = []

    async def test(client: EngineClient, engine: FakeEngine) -> None:
        wanted = GenerationRequest(EncodedPrompt([1]), SamplingParams(max_new_tokens=50), is_streamed=is_streamed)
        counts.extend([len(output.token_ids) async for output in await client.generate(wanted)])

    run(test, seconds_per_step=0.002)
    assert sum(counts) == 50
    assert len(counts) > 3 if is_streamed else counts in ([1, 32, 17], [33, 17], [1, 49], [50])
