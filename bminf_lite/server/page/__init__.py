"""The chat page at ``/``: one document without external resources, which speaks to the same server's ``/v1``.

The document is ``index.html`` with the style and the scripts that it names put in. Its content security policy allows
these by their hashes, requests to the same origin, and nothing else. With ``require-trusted-types-for`` a browser
refuses to make markup from text.

``marked.umd.js`` is the distributed file of marked 18.2.1, a parser of Markdown, under the licence beside it. Only its
lexer is used: ``markdown.js`` makes elements of the tokens.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The document and its headers."""
    folder = files(__package__)
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def with_contents(match: re.Match[bytes]) -> bytes:
        element, name = (group.decode() for group in match.groups())
        content = folder.joinpath(name).read_bytes()
        hashes[element].append(f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'")
        return f"<{element}>".encode() + content + f"</{element}>".encode()

    body = re.sub(rb"<(script|style)>([\w.]+)</\1>", with_contents, folder.joinpath("index.html").read_bytes())
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(hashes['script'])}",
            f"style-src {' '.join(hashes['style'])}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    return body, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }


async def page(request: Request) -> Response:
    """Answer with the page, or with 304 to a browser that has it."""
    body, headers = _page()
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="text/html")


def routes(server: object) -> list[Route]:
    """The route. It needs no key, because the page holds nothing but itself."""
    return [Route("/", page)]
