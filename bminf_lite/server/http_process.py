"""A process that speaks HTTP: uvicorn on uvloop with the application, and a socket to the engine's process.

:mod:`.launcher` starts it with two open file descriptors. It ends when the engine's process tells it to or has ended.
Signals that a terminal or a supervisor sends to all processes of a group are the business of the engine's process.
"""

from __future__ import annotations

import gc
import logging
import math
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from .app import create_app
from .client import EngineClient
from .http_protocol import bounded_protocol
from .limits import Limits
from .settings import ServerSettings

CreateApp = Callable[[EngineClient, ServerSettings], ASGIApp]
BACKLOG = 2048
_OTHER_FILES = 128
"""Files that a process opens beside its connections."""
LAST_WORDS_SECONDS = 2
"""How long streams that are ended have to say so to their clients."""


class SilentServer(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_config(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    """How a process speaks HTTP with clients, for the application ``app``."""
    return uvicorn.Config(
        app,
        http=bounded_protocol(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(limits.idle_seconds),
    )


async def serve_http(
    engine: socket.socket, listener: socket.socket, settings: ServerSettings, create_app: CreateApp = create_app
) -> None:
    """Serve the connections of ``listener`` until the engine's process wants an end, or has ended."""
    client = await EngineClient.connect(engine)
    config = http_config(create_app(client, settings), settings.limits)
    server = SilentServer(config)

    def shut_down(seconds: float) -> None:
        config.timeout_graceful_shutdown = math.ceil(seconds) + LAST_WORDS_SECONDS
        client.loop.call_later(seconds, client.end_all, "the server is shutting down")
        client.loop.call_later(seconds + LAST_WORDS_SECONDS / 2, cut_off)
        server.should_exit = True

    def cut_off() -> None:
        """End what does not end by itself: a client that sends no rest of its body, or reads nothing, for example."""
        for connection in list(server.server_state.connections):
            connection.transport.abort()

    client.on_shutdown(shut_down)
    gc.collect()
    gc.freeze()  # what is there now stays, so the collector need not look at it again
    await server.serve(sockets=[listener])
    client.close()


def run(engine_fd: int, listener_fd: int, settings: ServerSettings, create_app: CreateApp = create_app) -> None:
    """The whole life of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = replace(settings, limits=within_open_files(settings.limits))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of every client that does not speak HTTP
    engine, listener = socket.socket(fileno=engine_fd), socket.socket(fileno=listener_fd)
    uvloop.run(serve_http(engine, listener, settings, create_app))


def within_open_files(limits: Limits, files_each: int = 1) -> Limits:
    """The limits with as many connections as the system lets this process open; its own bound is raised if it may.

    A connection takes ``files_each`` files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files_each * limits.connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        limits = replace(limits, connections=min(limits.connections, max((soft - _OTHER_FILES) // files_each, 1)))
    return limits


def main() -> None:
    """``python -c ... ENGINE_FD LISTENER_FD``, with the settings as MessagePack on stdin."""
    settings = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ServerSettings)
    run(int(sys.argv[1]), int(sys.argv[2]), settings)
