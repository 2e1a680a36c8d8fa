"""A server of canned streams for the page: what it answers is set by a test, and it keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bminf_lite.server import page


@dataclass
class Stub:
    """Answers with ``pieces``, one every ``seconds``, and then with ``error`` if that is set."""

    pieces: list[str] = field(default_factory=lambda: ["Hello", ", ", "world", "."])
    seconds: float = 0.01
    reasoning: list[str] = field(default_factory=list)
    error: str = ""
    key: str = ""
    model: dict[str, Any] = field(default_factory=lambda: {"id": "demo-int8"})
    asked: list[dict[str, Any]] = field(default_factory=list)
    num_open: int = 0

    def application(self) -> Starlette:
        routes = [
            *page.routes(None),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    def refused(self, request: Request) -> Response | None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "wrong API key"}}, 401)
        return None

    async def models(self, request: Request) -> Response:
        return self.refused(request) or JSONResponse({"data": [self.model]})

    async def complete(self, request: Request) -> Response:
        if refused := self.refused(request):
            return refused
        self.asked.append(await request.json())
        return StreamingResponse(self.stream("chat" in request.url.path), media_type="text/event-stream")

    async def stream(self, is_chat: bool) -> AsyncIterator[str]:
        def event(**choice: Any) -> str:
            return f"data: {json.dumps({'choices': [{'index': 0, 'finish_reason': None} | choice]})}\n\n"

        self.num_open += 1
        try:
            yield event(delta={"role": "assistant", "content": ""})
            for name, pieces in (("reasoning_content", self.reasoning), ("content", self.pieces)):
                for piece in pieces:
                    await asyncio.sleep(self.seconds)
                    yield event(delta={name: piece}) if is_chat else event(text=piece)
            if self.error:
                yield f"data: {json.dumps({'error': {'message': self.error}})}\n\n"
                return
            yield event(delta={}, text="", finish_reason="length")
            yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': 42}})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.num_open -= 1


class StubServer:
    """A stub behind uvicorn in a thread, on a free port of the loopback interface."""

    def __init__(self) -> None:
        self.stub = Stub()
        config = uvicorn.Config(self.stub.application(), port=0, log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
