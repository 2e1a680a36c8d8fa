"""Who may use the server. Everything here is checked before a route runs, and before a body is read.

- **Host**: the request's ``Host`` must be an IP address, ``localhost`` or an allowed name. A page of another site can
  reach a server on localhost by giving its own name this address (DNS rebinding), but then the name is in ``Host``.
- **Origin**: other sites get no CORS headers unless their origin is allowed, so browsers show them no answer. Bodies
  must be JSON by their type, which browsers do not send elsewhere without asking first.
- **Key**: ``Authorization: Bearer KEY`` or ``x-api-key: KEY``. Keys are kept as SHA-256 digests, and all of them are
  compared in constant time.
- **Sizes and counts**: the body and the requests at a time are bounded.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import UsageError, listed
from ..files import expand, read_small_file
from .errors import ApiError, path_of
from .event_stream import RAW_SEND
from .limits import Limits

_HOST = re.compile(r"(?P<name>\[[^\[\]]+\]|[^:\[\]]+)(:\d*)?")

_PATH = re.compile(r"/[!-~]*")
_NAME = re.compile(r"\*|[^\s/:@?#\[\]]+|\[[0-9a-fA-F:.]+\]")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/@?#]+", re.IGNORECASE)

OPEN_PATHS = ("/", "/health", "/health/live", "/health/ready")
"""Paths that need no key: the page, which asks for the key, and what supervisors ask."""


@dataclass(frozen=True)
class Security:
    """The rules of access.

    - ``key_digests``: the SHA-256 digests of the keys, any of which will do; without any, no key is needed.
    - ``open_paths``: paths that need none.
    - ``allowed_hosts``: names of the server beside ``localhost`` and IP addresses; ``*`` allows every name.
    - ``allowed_origins``: sites whose pages may use the server; ``*`` allows every site.

    Raises ``UsageError`` for a path, a name and a site that no request can have.
    """

    key_digests: tuple[bytes, ...] = field(default=(), repr=False)
    open_paths: tuple[str, ...] = OPEN_PATHS
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kinds = (
            ("path without a key", self.open_paths, _PATH, "must begin with /, as /metrics"),
            ("allowed host", self.allowed_hosts, _NAME, "must be a name such as llm.example.org, or *"),
            ("allowed origin", self.allowed_origins, _ORIGIN, "must be a site such as https://chat.example, or *"),
        )
        problems = [
            f"the {kind} {value!r} {wanted}"
            for kind, values, pattern, wanted in kinds
            for value in values
            if not pattern.fullmatch(value)
        ]
        if problems:
            raise UsageError(listed("who may use the server", problems))


def digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    """The digests of keys. Raises ``UsageError`` for an empty key and one that a header cannot carry."""
    keys = list(keys)
    for number, key in enumerate(keys, 1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                f"key {number} of {len(keys)} cannot be a key: it must be printable ASCII characters without spaces"
            )
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def read_keys(path: str | Path) -> list[str]:
    """The keys of a file: one on a line; empty lines and lines that begin with ``#`` do not count.

    Raises ``UsageError`` for a file that cannot be read or holds no key.
    """
    try:
        lines = read_small_file(expand(path, "the file of keys")).decode("ascii").splitlines()
    except OSError as error:
        raise UsageError(f"the file of keys {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"the file of keys {path} holds something other than ASCII text") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise UsageError(f"the file of keys {path} holds no key: write one on a line of its own")
    return keys


def has_key(digests: Sequence[bytes], headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request with these headers has one of the keys, or needs none because there are none."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    given = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    digest = hashlib.sha256(given).digest()
    matches = [hmac.compare_digest(digest, known) for known in digests]
    return any(matches) or not digests


def is_loopback(host: str) -> bool:
    """Whether a host name or address can be reached from this machine alone. False for a name that does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


class Guard:
    """An ASGI application around another that refuses what the rules do not allow."""

    def __init__(self, app: ASGIApp, security: Security, limits: Limits):
        guarded: ASGIApp = _Access(app, security, limits)
        if security.allowed_origins:
            guarded = CORSMiddleware(
                guarded,
                allow_origins=security.allowed_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "retry-after"),
                max_age=3600,
            )
        self._app = guarded
        self._hosts = frozenset(name.lower().rstrip(".") for name in ("localhost", *security.allowed_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and pass it on."""
        if scope["type"] != "http":
            return  # there is no websocket, and what a server may say at its start and end changes nothing here
        scope.setdefault(RAW_SEND, send)
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if not hosts and scope.get("http_version") == "1.0":  # health checks, which have none; no browser sends this
            hosts = [b"localhost"]
        if len(hosts) != 1 or not self._is_own_host(hosts[0].decode("latin-1")):
            message = (
                "the Host header must name this server: an IP address, localhost, or a name that --allowed-host gives"
            )
            await ApiError(421, message, code="wrong_host").response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_own_host(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        name = match["name"].lower().rstrip(".") if match else ""
        return "*" in self._hosts or name in self._hosts or _is_address(name)


class _Access:
    """The checks behind those of hosts and origins."""

    def __init__(self, app: ASGIApp, security: Security, limits: Limits):
        self._app = app
        self._digests = security.key_digests
        self._open_paths = frozenset(security.open_paths)
        self._limits = limits
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is not None:
            response = refusal.response(scope)
            response.headers["connection"] = "close"  # the body of a refused request is not read
            await response(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await self._app(scope, _BoundedBody(receive, self._limits.body), send)
        finally:
            self._num_requests -= 1

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why a request is refused; None if it is not."""
        headers = dict(scope["headers"])
        if path_of(scope) in self._open_paths and scope["method"] in ("GET", "HEAD"):
            return None
        if not has_key(self._digests, headers):
            return ApiError(401, "an API key is needed: send it as Authorization: Bearer KEY", code="invalid_api_key")
        if scope["method"] != "POST":
            return None
        if self._num_requests >= self._limits.requests:
            most = f"{self._limits.requests:,} requests are being worked on, the most that this process takes at a time"
            return ApiError(429, f"{most}: try again later", code="too_many_requests", retry_after=1)
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            given = kind.decode("latin-1") or "untyped"
            remedy = "send the header Content-Type: application/json"
            return ApiError(415, f"the body must be application/json, not {given!r}: {remedy}")
        if (coding := headers.get(b"content-encoding", b"identity").lower()) != b"identity":
            return ApiError(415, f"the body must not be encoded, but its coding is {coding.decode('latin-1')!r}")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limits.body:
            return _too_large(self._limits.body)
        return None


class _BoundedBody:
    """ASGI's ``receive`` that raises an error for a body over the bound, however it is sent."""

    def __init__(self, receive: Receive, bound: int):
        self._receive = receive
        self._bound = bound
        self._size = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > self._bound:
                raise _too_large(self._bound)
        return message


def _too_large(bound: int) -> ApiError:
    return ApiError(413, f"the body is larger than {bound:,} bytes", code="body_too_large")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return False
    return True
