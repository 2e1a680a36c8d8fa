"""Sessions by the beginning of a request, for Ray Serve's proxies: what begins alike goes to the replica that knows it.

A proxy does not show bodies to its routers, but to middleware. This one gives requests without a session the hash of
their beginning as one, for ``ConsistentHashRouter``. Start Ray's nodes with
``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=bminf_lite.ray.prefixes:middleware``.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 16 << 20
"""Bytes of a body that is looked at: more than a server takes by default."""
BEGINNING = 512
"""Characters, or token ids, of a prompt that decide."""
SESSION = b"x-session-id"
_PATHS = ("/completions", "/messages", "/responses")


def middleware() -> list[Middleware]:
    """What Ray Serve's proxies put before their routes."""
    return [Middleware(PrefixSessions)]


class PrefixSessions:
    """An ASGI application around another that gives POST requests without a session one by their beginning."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, add the header, and pass both on."""
        is_wanted = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(_PATHS)
        if not is_wanted or any(name == SESSION for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        size = 0
        while not messages or (messages[-1].get("more_body") and size <= MAX_BODY):
            messages.append(await receive())
            size += len(messages[-1].get("body", b""))
        session = session_of(b"".join(message.get("body", b"") for message in messages)) if size <= MAX_BODY else None
        if session is not None:
            scope = {**scope, "headers": [*scope["headers"], (SESSION, session.encode())]}
        waiting = iter(messages)

        async def replay() -> Message:
            message = next(waiting, None)
            return await receive() if message is None else message

        await self._app(scope, replay, send)


def session_of(body: bytes) -> str | None:
    """The session of a request: a hash of what precedes its first answer; None if it has no such text.

    Of a conversation that is all up to the first message of the user, so that it stays with its replica, and
    conversations with the same system message are spread. Of a prompt it is the first :data:`BEGINNING` characters.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    turns = fields.get("messages", fields.get("input"))
    prompt = turns if isinstance(turns, str) else fields.get("prompt")
    if isinstance(turns, list):
        beginning: Any = _until_user(turns)
    elif isinstance(prompt, (str, list)):
        beginning = prompt[:BEGINNING]
    else:
        return None
    if not beginning:
        return None
    text = json.dumps([fields.get("system"), fields.get("instructions"), beginning])
    return xxhash.xxh3_64_hexdigest(text.encode())


def _until_user(turns: list[Any]) -> list[Any]:
    for count, turn in enumerate(turns, 1):
        if isinstance(turn, dict) and turn.get("role") == "user":
            return turns[:count]
    return turns[:1]
