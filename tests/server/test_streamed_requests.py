"""Streams: the engine knows of them, and what was made of one is sent before an error ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from api_kit import NAME, LiveServer, UnconstrainedEngine, folder_with_template, info_of
from client_kit import connected, until
from fake_engine import FakeEngine, fake_info

from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.errors import BminfError
from bminf_lite.request_builder import GenerationRequest
from bminf_lite.server.client import Output
from bminf_lite.server.event_stream import EventStream
from bminf_lite.server.openai import completions
from bminf_lite.server.openai.chunks import write_chunks
from bminf_lite.server.request_record import Observer
from bminf_lite.server.schemas.base import parse
from bminf_lite.server.schemas.completions import CompletionBody
from bminf_lite.server.settings import ServerSettings
from bminf_lite.server.state import ServerState
from bminf_lite.text.prompts import EncodedPrompt

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
}


class RememberingEngine(UnconstrainedEngine):
    """A fake engine that keeps its requests."""

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        super().submit(requests)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = folder_with_template(tmp_path_factory.mktemp("streamed"))
    server = LiveServer(RememberingEngine(range(1, 100)), info_of(folder))
    yield server
    server.close()


@pytest.mark.parametrize("path", BODIES)
def test_the_engine_knows_which_requests_are_streamed(server: LiveServer, path: str) -> None:
    """So prompts of others do not hold their tokens up."""
    assert isinstance(server.engine, RememberingEngine)
    server.json(path, BODIES[path])
    assert [request.is_streamed for request in server.engine.requests] == [False]
    assert server.events(path, BODIES[path])
    assert [request.is_streamed for request in server.engine.requests] == [True]


def test_a_request_of_many_prompts_does_not_hold_up_streams(tmp_path: Path) -> None:
    """Others are served between the tokenizing of two prompts."""
    folder = folder_with_template(tmp_path / "model")
    turns = []

    async def turn() -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    async def main() -> None:
        async with connected(UnconstrainedEngine([1]), info_of(folder)) as client:
            server = ServerState(client, ServerSettings((NAME,)))
            observer = Observer(64, client.observe)
            others = asyncio.ensure_future(turn())
            client.generate = stop_counting  # type: ignore[method-assign]
            with pytest.raises(StopCounting):
                await completions._prepare(
                    server, parse(CompletionBody, b'{"prompt": [%s"a"]}' % (b'"a",' * 99)), observer.begin("", "", "")
                )
            others.cancel()

    class StopCounting(Exception):
        pass

    async def stop_counting(*_: object, **__: object) -> Any:
        raise StopCounting

    asyncio.run(main())
    assert len(turns) >= 99


@pytest.mark.parametrize("has_failed", [False, True], ids=["a chunk", "the engine"])
def test_chunks_that_were_made_come_before_an_error(has_failed: bool) -> None:
    """Three completions have arrived together, and the last of them is an error."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message["body"])

    def chunk(output: Output) -> bytes:
        if output.index == 2 and not has_failed:
            raise BminfError("no chunk")
        return b"data: %d %d\n\n" % (output.index, len(output.token_ids))

    async def main() -> None:
        engine = FakeEngine(range(100))
        async with connected(engine, fake_info(None, 100)) as client:
            generation = await client.generate(
                GenerationRequest(EncodedPrompt([5]), SamplingParams(max_new_tokens=7), 3)
            )
            await until(lambda: client.num_running == 0)
            if has_failed:
                client.failure = "no engine"
                generation.completions[2].finish_reason = "error"
            sent.append(await write_chunks(EventStream(send), generation, chunk, dict))

    asyncio.run(main())
    before, error = b"".join(sent).split(b"data: {")
    assert before == b"data: 0 7\n\ndata: 1 7\n\n" + (b"data: 2 7\n\n" if has_failed else b"")
    assert (b"no engine" if has_failed else b"no chunk") in error


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_ends_a_stream_is_written_at_once(server: LiveServer, path: str) -> None:
    """The last tokens, the finishing chunk, the usage and ``[DONE]``, if they are there together."""
    body = BODIES[path] | {"max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", path, json=body) as response:
        (whole,) = response.iter_raw()
    assert b'"finish_reason":"length"' in whole and b'"choices":[]' in whole and whole.endswith(b"data: [DONE]\n\n")
