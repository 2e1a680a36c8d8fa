"""One HTTP process's code in a thread, over an engine without a model, and raw connections to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop
from fake_engine import FakeEngine, fake_info
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import bminf_lite
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.request_builder import GenerationRequest
from bminf_lite.server.client import EngineClient
from bminf_lite.server.engine_server import EngineServer
from bminf_lite.server.errors import ApiError
from bminf_lite.server.event_stream import EventStream, EventStreamResponse
from bminf_lite.server.http_process import serve_http
from bminf_lite.server.limits import DEFAULT_LIMITS, Limits
from bminf_lite.server.listener import Address, Listener
from bminf_lite.server.security import Guard
from bminf_lite.server.settings import ServerSettings
from bminf_lite.text.prompts import EncodedPrompt

DEMO = Path(bminf_lite.__file__).parent / "demo_model"
VOCAB_SIZE = 2048


def tiny_app(client: EngineClient, settings: ServerSettings) -> ASGIApp:
    """``POST /echo`` answers with the body, and ``POST /stream`` streams as many tokens as the body says.

    ``POST /wide`` does the same with 16 KiB a token.
    """

    async def echo(request: Request) -> Response:
        return Response(await request.body())

    async def stream(request: Request) -> Response:
        count = msgspec.json.decode(await request.body())
        params = SamplingParams(max_new_tokens=count)
        generation = await client.generate(GenerationRequest(EncodedPrompt([1]), params, is_streamed=True))
        padding = b":" * (16 << 10) + b"\n" if request.url.path == "/wide" else b""

        async def write(events: EventStream) -> bytes:
            async for output in generation:
                await events.write(b"".join(padding + b"data: %d\n\n" % token for token in output.token_ids))
            return b""

        return EventStreamResponse(generation, write)

    streams = [Route(path, stream, methods=["POST"]) for path in ("/stream", "/wide")]
    routes = [Route("/echo", echo, methods=["GET", "POST"]), *streams]
    app = Starlette(routes=routes, exception_handlers={ApiError: lambda request, error: error.response(request.scope)})
    return Guard(app, settings.security, settings.limits)


@dataclass
class Served:
    """A server in a thread of this process."""

    engine: FakeEngine
    engine_server: EngineServer
    port: int

    def connect(self) -> socket.socket:
        """A connection, whose reads end with an error after five minutes."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=300)

    def ask(self, request: bytes) -> bytes:
        """Send bytes and read until the server closes the connection."""
        with self.connect() as connection:
            with suppress(BrokenPipeError, ConnectionResetError):  # the answer may come before all was sent
                connection.sendall(request)
            return read_all(connection)

    def get(self, path: str = "/echo", headers: str = "") -> bytes:
        """The answer to a well-formed request."""
        return self.ask(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n".encode())

    def post(self, path: str, body: bytes, headers: str = "") -> bytes:
        """The same, with a body."""
        return self.ask(post(path, body, "connection: close\r\n" + headers))


def post(path: str, body: bytes, headers: str = "") -> bytes:
    """A well-formed request with a body."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def status(answer: bytes) -> int:
    """The status of an answer; 0 for none."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes or resets the connection."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


@contextmanager
def served(
    limits: Limits = DEFAULT_LIMITS,
    app: Callable[[EngineClient, ServerSettings], ASGIApp] = tiny_app,
    **engine_options: float,
) -> Iterator[Served]:
    """Run the code of an HTTP process in a thread."""
    engine = FakeEngine(range(VOCAB_SIZE), **engine_options)
    engine_server = EngineServer(engine, fake_info(str(DEMO), VOCAB_SIZE))
    engine_server.set_ready()
    listener = Listener(Address(port=0), 1)
    listener.listen()
    settings = ServerSettings(("demo",), limits=limits)
    end = engine_server.connect()
    thread = threading.Thread(target=lambda: uvloop.run(serve_http(end, listener.sockets[0], settings, app)))
    thread.start()
    try:
        yield Served(engine, engine_server, listener.port)
    finally:
        engine_server.close()
        engine.close()
        thread.join(300)
        assert not thread.is_alive()
