"""Requests with a grammar: it is compiled beside the engine while others go on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from api_kit import DEMO, LiveServer, UnconstrainedEngine, info_of
from client_kit import connected, read, until
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.errors import UsageError
from bminf_lite.grammar import Grammar, validate
from bminf_lite.grammar.matcher import GrammarCompiler
from bminf_lite.grammar.value import MAX_CHECKERS, Check
from bminf_lite.request_builder import GenerationRequest
from bminf_lite.server import grammar_checks
from bminf_lite.server.client import EngineClient, RequestRefused
from bminf_lite.server.fair_turns import FairTurns
from bminf_lite.server.grammar_checks import PER_CLIENT, GrammarChecks
from bminf_lite.text.prompts import EncodedPrompt


def test_a_grammar_is_compiled_or_refused_or_forgotten(monkeypatch: pytest.MonkeyPatch):
    entered, go_on = threading.Event(), threading.Event()

    def matcher(self: GrammarCompiler, grammar: Grammar, eos_ids: frozenset[int]) -> None:
        entered.set()
        assert go_on.wait(300)
        if grammar.text == "bad":
            raise ValueError("a fault of the library")

    monkeypatch.setattr(GrammarCompiler, "matcher", matcher)
    plain = GenerationRequest(EncodedPrompt([5, 7]), SamplingParams(max_new_tokens=3), 2)
    constrained = replace(plain, grammar=Grammar.regex("a"))

    async def test(client: EngineClient, engine: UnconstrainedEngine) -> None:
        abandoned = asyncio.ensure_future(client.generate(constrained))
        await until(entered.is_set)
        abandoned.cancel()
        assert await read(await client.generate(plain)) == {0: [8, 9, 10], 1: [8, 9, 10]}  # it does not wait
        await client.stats()  # the answer says that the cancellation, which was sent before, has been read
        go_on.set()
        assert await read(await client.generate(constrained)) == {0: [8, 9, 10], 1: [8, 9, 10]}
        with pytest.raises(RequestRefused, match="a fault of the library"):
            await client.generate(replace(plain, grammar=Grammar.regex("bad")))
        assert engine.num_tokens == 12 and client.num_running == 0

    async def main() -> None:
        engine = UnconstrainedEngine(range(1, 2048))
        async with connected(engine, info_of(DEMO)) as client:
            await asyncio.wait_for(test(client, engine), 300)

    asyncio.run(main())


def test_grammars_that_take_long_to_check_leave_threads_to_conversations(monkeypatch: pytest.MonkeyPatch):
    go_on = threading.Event()
    monkeypatch.setattr(grammar_checks, "validate", lambda grammar, check: go_on.wait(300))

    async def main() -> None:
        checks = GrammarChecks()
        tasks = [asyncio.ensure_future(checks.validate(Grammar.regex("a{7}"), f"client {i}")) for i in range(40)]
        await asyncio.sleep(0)  # more than the threads of to_thread, in which templates are rendered
        try:
            await asyncio.wait_for(asyncio.to_thread(int), 30)
        finally:
            go_on.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


class Slow:
    """A check that takes until it is cancelled, for grammars that begin with "bomb"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun: list[str] = []
        self.go_on = threading.Event()
        monkeypatch.setattr(grammar_checks, "validate", self.validate)

    def validate(self, grammar: Grammar, check: Check) -> None:
        self.begun.append(grammar.text)
        while grammar.text.startswith("bomb") and not (self.go_on.is_set() or check._is_cancelled):
            time.sleep(0.001)


@pytest.mark.parametrize("count", [4, 24, 200])
def test_one_client_s_bombs_do_not_delay_others(monkeypatch: pytest.MonkeyPatch, count: int):
    slow = Slow(monkeypatch)

    async def main() -> None:
        checks = GrammarChecks()
        bombs = [asyncio.ensure_future(checks.validate(Grammar.regex(f"bomb {i}"), "one")) for i in range(count)]
        await until(lambda: len(slow.begun) == PER_CLIENT)
        for i in range(10):
            await asyncio.wait_for(checks.validate(Grammar.regex(f"quick {i}"), "other"), 30)
        assert slow.begun[PER_CLIENT:] == [f"quick {i}" for i in range(10)]
        slow.go_on.set()
        await asyncio.gather(*bombs)
        assert len(slow.begun) == count + 10

    asyncio.run(main())


def test_checks_of_clients_that_left_are_dropped(monkeypatch: pytest.MonkeyPatch):
    slow = Slow(monkeypatch)

    async def main() -> None:
        checks = GrammarChecks()
        bombs = [asyncio.ensure_future(checks.validate(Grammar.regex(f"bomb {i}"), "one")) for i in range(24)]
        await until(lambda: len(slow.begun) == PER_CLIENT)
        for bomb in bombs:
            bomb.cancel()
        await asyncio.wait_for(checks.validate(Grammar.regex("quick"), "one"), 30)
        assert await asyncio.gather(*bombs, return_exceptions=True) and all(bomb.cancelled() for bomb in bombs)
        assert len(slow.begun) <= 2 * PER_CLIENT + 1  # the first, which end, and no others that wait
        assert checks._turns.is_idle

    asyncio.run(main())


def test_a_kept_grammar_waits_for_nothing(monkeypatch: pytest.MonkeyPatch):
    kept = Grammar.regex("kept{3}")
    validate(kept)
    slow = Slow(monkeypatch)

    async def main() -> None:
        checks = GrammarChecks()
        bombs = [asyncio.ensure_future(checks.validate(Grammar.regex(f"bomb {i}"), f"{i}")) for i in range(24)]
        await until(lambda: len(slow.begun) == MAX_CHECKERS)
        await asyncio.wait_for(checks.validate(kept, "other"), 1)
        slow.go_on.set()
        await asyncio.gather(*bombs)

    asyncio.run(main())


def test_a_cancelled_check_ends_its_process():
    """A real one, of a regex that takes longer than it may."""
    bomb = Grammar.regex("((a{1,50}){1,50}){1,50}((b|c){1,99}){1,99}")
    check = Check()
    found: list[object] = []

    def run() -> None:
        try:
            validate(bomb, check)
        except UsageError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.2)
    start = time.perf_counter()
    check.cancel()
    thread.join(30)
    assert not thread.is_alive() and time.perf_counter() - start < 3  # CHECK_SECONDS are 5
    cancelled = Check()
    cancelled.cancel()
    with pytest.raises(UsageError, match="was given up"):
        validate(Grammar.regex("never checked {4}"), cancelled)


def test_a_request_whose_client_leaves_is_not_checked_any_more(monkeypatch: pytest.MonkeyPatch, live: LiveServer):
    """Over HTTP: 24 requests that are given up, then one that is not."""
    slow = Slow(monkeypatch)
    for i in range(24):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{live.url}/v1/completions",
                json={"prompt": "a", "guided_regex": f"bomb {i}"},
                timeout=httpx.Timeout(30, read=0.05),
            )
    start = time.perf_counter()
    live.json("/v1/completions", {"prompt": "a", "max_tokens": 1, "guided_regex": "quick"})
    assert time.perf_counter() - start < 10  # a check of each would take for ever
    assert "quick" in slow.begun


@pytest.fixture
def live() -> Iterator[LiveServer]:
    server = LiveServer(UnconstrainedEngine(range(1, 2048)), info_of(DEMO))
    yield server
    server.close()


def test_a_compiled_grammar_does_not_queue_behind_new_ones(monkeypatch: pytest.MonkeyPatch):
    """In the engine's process, where grammars are compiled for the vocabulary."""
    go_on, original = threading.Event(), GrammarCompiler._compile
    compiled: list[str] = []

    def compile(self: GrammarCompiler, grammar: Grammar, text: str, eos_ids: frozenset[int]) -> object:
        compiled.append(grammar.text)
        if grammar.text.startswith("slow"):
            assert go_on.wait(300)
        return original(self, grammar, text, eos_ids)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile)
    plain = GenerationRequest(EncodedPrompt([5, 7]), SamplingParams(max_new_tokens=3), 2)

    async def test(client: EngineClient) -> None:
        known = replace(plain, grammar=Grammar.regex("known"))
        await read(await client.generate(known))
        slow = [
            asyncio.ensure_future(client.generate(replace(plain, grammar=Grammar.regex(f"slow{i}")))) for i in range(6)
        ]
        await until(lambda: any(text.startswith("slow") for text in compiled))
        assert await asyncio.wait_for(read(await client.generate(known)), 30) == {0: [8, 9, 10], 1: [8, 9, 10]}
        assert "slow5" not in compiled
        for task in slow[2:]:
            task.cancel()
        await client.stats()  # the answer says that the cancellations have been read
        go_on.set()
        for task in slow[:2]:
            await read(await task)
        await read(await client.generate(replace(plain, grammar=Grammar.regex("last"))))
        assert not {"slow3", "slow4", "slow5"} & set(compiled)

    async def main() -> None:
        engine = UnconstrainedEngine(range(1, 2048))
        async with connected(engine, info_of(DEMO)) as client:
            await asyncio.wait_for(test(client), 300)

    asyncio.run(main())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60), st.integers(1, 4))
def test_turns_are_fair(steps: list[tuple[str, bool]], workers: int):
    """Whatever is added and ended: every item has one turn, in its client's order, and no client has all workers."""
    per_client = max(workers - 1, 1)
    turns: FairTurns[int] = FairTurns(workers, per_client)
    added: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    started: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    running: list[str] = []

    def start() -> None:
        while (found := turns.start()) is not None:
            client, item = found
            started[client].append(item)
            running.append(client)
        assert len(running) <= workers and all(running.count(client) <= per_client for client in "abc")
        waits = [c for c in "abc" if len(started[c]) < len(added[c]) and running.count(c) < per_client]
        assert len(running) == workers or not waits

    for number, (client, adds) in enumerate(steps):
        if adds or not running:
            turns.add(client, number)
            added[client].append(number)
        else:
            turns.end(running.pop(0))
        start()
    while running:
        turns.end(running.pop(0))
        start()
    assert started == added and turns.is_idle
