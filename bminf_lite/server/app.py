"""The HTTP application: routes over an engine's client, behind the checks of :mod:`.security`."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..errors import BminfError
from . import adapters, anthropic, embeddings, fill_blank, health, monitoring, page, tokens
from .client import EngineClient
from .errors import ApiError, api_error
from .openai import chat, completions, responses
from .recorder import CLIENT_CLOSED_REQUEST, Recorder
from .security import Guard
from .settings import ServerSettings
from .state import ServerState


def create_app(client: EngineClient, settings: ServerSettings) -> ASGIApp:
    """The application of one HTTP process. Each module of routes has a function ``routes(server)``."""
    server = ServerState(client, settings)
    server.warm_up()
    # The first route that fits is taken, so those that are used most come first.
    modules = (
        completions,
        chat,
        responses,
        embeddings,
        anthropic,
        tokens,
        fill_blank,
        page,
        health,
        monitoring,
        adapters,
    )
    routes = [route for module in modules for route in module.routes(server)]
    app = Starlette(routes=routes, exception_handlers=_HANDLERS)
    by_key = bool(settings.security.key_digests)
    guarded = Guard(app, settings.security, settings.limits)
    return Recorder(guarded, server.observer, server.model_name, (route.path for route in routes), by_key)


async def _error(request: Request, error: Exception) -> Response:
    return api_error(error).response(request.scope)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        unknown = ApiError(404, f"there is no {request.method} {request.url.path}", code="unknown_url")
        return unknown.response(request.scope)
    allowed = (error.headers or {}).get("Allow", "another method")
    wrong_method = ApiError(error.status_code, f"{request.url.path} takes {allowed}, not {request.method}")
    response = wrong_method.response(request.scope)
    response.headers.update(error.headers or {})
    return response


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)  # which the log and the metrics see, and no client


_HANDLERS: Any = {
    ApiError: _error,
    BminfError: _error,
    ClientDisconnect: _client_gone,
    HTTPException: _http_exception,
    Exception: _error,
}
"""Starlette takes the handler of an exception's nearest base class, and logs what only the last one handles."""
