"""The engine knows which requests are streamed, so that prompts of others do not hold their tokens up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from api_kit import LiveServer, UnconstrainedEngine, folder_with_template, info_of

from bminf_lite.engine.request import Request

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
    assert isinstance(server.engine, RememberingEngine)
    server.json(path, BODIES[path])
    assert [request.is_streamed for request in server.engine.requests] == [False]
    assert server.events(path, BODIES[path])
    assert [request.is_streamed for request in server.engine.requests] == [True]
