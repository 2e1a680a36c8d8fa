"""Requests with a grammar: it is compiled beside the engine while others go on."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from api_kit import DEMO, UnconstrainedEngine, info_of
from client_kit import connected, read, until

from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.grammar import Grammar
from bminf_lite.grammar.matcher import GrammarCompiler
from bminf_lite.request_builder import GenerationRequest
from bminf_lite.server import generating
from bminf_lite.server.client import EngineClient, RequestRefused
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
    monkeypatch.setattr(generating, "validate", lambda grammar: go_on.wait(300))

    async def main() -> None:
        checks = [
            asyncio.ensure_future(generating.checked_grammar(lambda: Grammar.regex("a"), "guided_regex"))
            for _ in range(40)  # more than the threads of to_thread, in which templates are rendered
        ]
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(asyncio.to_thread(int), 30)
        finally:
            go_on.set()
        await asyncio.gather(*checks)

    asyncio.run(main())
