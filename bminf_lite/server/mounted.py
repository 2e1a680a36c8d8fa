"""The server as an ASGI application, for those who mount it in one of their own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from ..api import Model
from .app import create_app
from .client import EngineClient
from .engine_server import EngineServer
from .launcher import checked_format, model_names, require_other_names
from .limits import DEFAULT_LIMITS, Limits
from .model_info import model_info, pooling_service
from .request_log import checked_path
from .security import OPEN_PATHS, Security, digests
from .settings import ServerSettings


def application(
    model: Model,
    *,
    served_model_name: str | Sequence[str] | None = None,
    api_keys: Sequence[str] = (),
    allowed_hosts: Sequence[str] = ("*",),
    allowed_origins: Sequence[str] = (),
    limits: Limits = DEFAULT_LIMITS,
    request_log: str | None = None,
    tool_call_format: str | None = None,
    seed: int | None = None,
    split_special_tokens: bool = False,
) -> ASGIApp:
    """An ASGI application that serves a loaded model, to be run by any ASGI server or mounted in another application.

    Its HTTP code runs in the process of the model, and shares the interpreter with the engine: :func:`serve` is faster
    with many streams. The arguments are those of :func:`serve`; every name in ``Host`` is accepted by default, and
    time-outs of connections are those of the ASGI server. Call the model's ``warm_up`` first, so that no request waits
    for it.
    """
    security = Security(digests(api_keys), OPEN_PATHS, tuple(allowed_hosts), tuple(allowed_origins))
    names, form = model_names(served_model_name, model.folder), checked_format(tool_call_format)
    require_other_names(model, names)
    return _Mounted(
        model, ServerSettings(names, security, limits, checked_path(request_log), form, seed, split_special_tokens)
    )


class _LoopApp(NamedTuple):
    """The application of one event loop, and the generator that gives it, which is kept until the loop ends."""

    generator: AsyncGenerator[ASGIApp, None]
    making: asyncio.Task[ASGIApp]


class _Mounted:
    """An application for each event loop, made by its first request: a mounted application gets no start event."""

    def __init__(self, model: Model, settings: ServerSettings):
        self._model = model  # which would close its engine if it were dropped
        self._settings = settings
        adapters, pooling = model.adapter_store, pooling_service(model)
        self._server = EngineServer(model.engine, model_info(model), adapters=adapters, pooling=pooling)
        self._server.set_ready()
        self._apps: dict[asyncio.AbstractEventLoop, _LoopApp] = {}
        weakref.finalize(self, self._server.close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        loop = asyncio.get_running_loop()
        if loop not in self._apps:
            self._apps = {other: app for other, app in self._apps.items() if not other.is_closed()}
            generator = _make(self._server, self._settings)
            self._apps[loop] = _LoopApp(generator, loop.create_task(_first(generator)))
        app = await asyncio.shield(self._apps[loop].making)
        await app(scope, receive, send)


async def _make(server: EngineServer, settings: ServerSettings) -> AsyncGenerator[ASGIApp, None]:
    """Give the application of this event loop.

    Its connection is closed when the loop ends: ``asyncio.run`` and ASGI servers close all asynchronous generators.
    """
    client = await EngineClient.connect(server.connect())
    try:
        yield create_app(client, settings)
    finally:
        client.close()


async def _first(generator: AsyncGenerator[ASGIApp, None]) -> ASGIApp:
    return await anext(generator)


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing has to be done when a server starts and ends."""
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})
