"""The chat page at ``/``: one file without external resources, which speaks to the same server's ``/v1``.

Its content security policy allows the file's own script and style by their hashes, and requests to the same origin,
and nothing else. With ``require-trusted-types-for`` a browser refuses to make markup from text.
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
    """The file and its headers."""
    body = files(__package__).joinpath("index.html").read_bytes()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(body, 'script')}",
            f"style-src {_hashes(body, 'style')}",
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


def _hashes(body: bytes, element: str) -> str:
    """The sources of a policy that allow the inline elements of this kind."""
    contents = re.findall(rf"<{element}>(.*?)</{element}>".encode(), body, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(c).digest()).decode()}'" for c in contents)


async def page(request: Request) -> Response:
    """Answer with the page, or with 304 to a browser that has it."""
    body, headers = _page()
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="text/html")


def routes(server: object) -> list[Route]:
    """The route. It needs no key, because the page holds nothing but itself."""
    return [Route("/", page)]
