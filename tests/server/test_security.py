"""Who is let in: keys, host names, origins, types of bodies, and the addresses that a server may listen at."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message

from bminf_lite.errors import UsageError
from bminf_lite.server.launcher import model_names, require_safe
from bminf_lite.server.limits import DEFAULT_LIMITS
from bminf_lite.server.listener import Address, Listener
from bminf_lite.server.security import Guard, Security, digests, is_loopback, read_keys
from bminf_lite.server.settings import ServerSettings

KEYS = ("sk-first", "sk-second")


async def _answer(request: Request) -> Response:
    await request.body()
    return Response("let in")


def guarded(security: Security) -> ASGIApp:
    return Guard(Starlette(routes=[Route("/{path:path}", _answer, methods=["GET", "POST"])]), security, DEFAULT_LIMITS)


def ask(app: ASGIApp, method: str, path: str, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def test_keys():
    app = guarded(Security(digests(KEYS)))
    for headers in (
        {"authorization": "Bearer sk-first"},
        {"authorization": "bearer  sk-second"},
        {"x-api-key": "sk-second"},
    ):
        assert ask(app, "GET", "/v1/models", headers=headers).status_code == 200
    for headers in (
        {},
        {"authorization": "Bearer sk-firs"},
        {"authorization": "Bearer sk-first2"},
        {"authorization": "Bearer"},
        {"authorization": "Basic sk-first"},
        {"authorization": "sk-first"},
        {"x-api-key": ""},
        {"authorization": "Bearer sk-first,sk-second"},
        {"authorization": "Bearer wrong", "x-api-key": "sk-first"},
    ):
        answer = ask(app, "GET", "/v1/models", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert "sk-" not in answer.text


@pytest.mark.parametrize("path", ["/", "/health", "/health/live", "/health/ready"])
def test_open_paths_need_no_key_to_read(path):
    app = guarded(Security(digests(KEYS)))
    assert ask(app, "GET", path).status_code == 200
    assert ask(app, "POST", path, json={}).status_code == 401
    assert ask(guarded(Security(digests(KEYS), open_paths=())), "GET", path).status_code == 401


@pytest.mark.parametrize(
    "path", ["", "//", "/health/", "/HEALTH", "/health/../v1/models", "/health/..", "/v1/models;/health", "/health\0"]
)
def test_paths_that_only_look_open(path):
    """The guard and the router read the same path, so only the exact one is open."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"localhost")], "query_string": b""}
    asyncio.run(guarded(Security(digests(KEYS)))(scope, receive, send))
    assert sent[0]["status"] == 401


def test_a_mounted_application_has_the_same_open_paths():
    app = Starlette(routes=[Mount("/llm", guarded(Security(digests(KEYS))))])
    assert ask(app, "GET", "/llm/health").status_code == 200
    assert ask(app, "GET", "/llm/v1/models").status_code == 401


def test_keys_cannot_be_read_from_the_settings():
    settings = ServerSettings(("name",), Security(digests(KEYS)))
    assert "sk-" not in repr(settings)
    assert b"sk-" not in pickle.dumps(settings)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost.:99", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("10.1.2.3", 200),
        ("llm.example.org", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("evil.example:8000", 421),
        ("", 421),
        ("127.0.0.1.evil.example", 421),
        ("[::1].evil.example", 421),
        ("evil.example#localhost", 421),
    ],
)
def test_hosts(host, status):
    app = guarded(Security(allowed_hosts=("llm.example.org",)))
    assert ask(app, "GET", "/health", headers={"host": host}).status_code == status
    assert ask(guarded(Security(allowed_hosts=("*",))), "GET", "/health", headers={"host": host}).status_code == 200


def test_no_site_may_use_the_server_unless_it_is_named():
    asked = {
        "origin": "https://chat.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    closed, opened = (
        guarded(Security(digests(KEYS))),
        guarded(Security(digests(KEYS), (), (), ("https://chat.example",))),
    )
    answer = ask(closed, "OPTIONS", "/v1/chat/completions", headers=asked)
    assert answer.status_code == 401 and "access-control-allow-origin" not in answer.headers
    answer = ask(opened, "OPTIONS", "/v1/chat/completions", headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://chat.example"
    other = ask(opened, "OPTIONS", "/v1/chat/completions", headers=asked | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    answer = ask(opened, "GET", "/v1/models", headers={"origin": "https://chat.example"})
    assert answer.status_code == 401, "an allowed origin is no key"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"]
)
def test_bodies_must_say_that_they_are_json(kind):
    """These types are what another site's page can send without asking."""
    app = guarded(Security())
    assert ask(app, "POST", "/x", content=b"{}", headers={"content-type": kind}).status_code == 415
    good = {"content-type": "Application/JSON; charset=utf-8"}
    assert ask(app, "POST", "/x", content=b"{}", headers=good).status_code == 200
    answer = ask(app, "POST", "/x", content=b"...", headers=good | {"content-encoding": "gzip"})
    assert answer.status_code == 415 and "'gzip'" in answer.text


def test_the_file_of_keys(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("# the team's\nsk-first\n\n  sk-second  \n#sk-old\n")
    assert read_keys(path) == ["sk-first", "sk-second"]
    path.write_text("# none\n")
    with pytest.raises(UsageError, match="holds no key"):
        read_keys(path)
    path.write_bytes(b"sk-\xff")
    with pytest.raises(UsageError, match="ASCII"):
        read_keys(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path)
    with pytest.raises(UsageError, match="key 2 of 2"):
        digests(["good", "not good"])


def test_a_public_address_needs_a_key():
    settings = ServerSettings(("name",))
    for host in ("127.0.0.1", "localhost", "::1", "127.8.9.1"):
        require_safe(Address(host), settings, False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "192.168.1.1"):
        with pytest.raises(UsageError, match="--api-key-file"):
            require_safe(Address(host), settings, False)
        require_safe(Address(host), settings, True)
        require_safe(Address(host), ServerSettings(("name",), Security(digests(KEYS))), False)
    assert not is_loopback("")


def test_an_address_that_cannot_be_had():
    taken = Listener(Address(port=0), 1)
    taken.listen()
    for count in (1, 2):
        with pytest.raises(UsageError, match=f"port {taken.port}: Address already in use; choose another --port"):
            Listener(Address(port=taken.port), count)
    taken.close()
    with pytest.raises(UsageError, match=r"cannot listen at 192\.0\.2\.1"):
        Listener(Address("192.0.2.1", 0), 1)
    for port in (-1, 65536, 99999):
        with pytest.raises(UsageError, match=f"the port is {port}; it must be from 0, .* to 65535"):
            Listener(Address(port=port), 1)
    shared = Listener(Address(port=0), 3)
    assert len({sock.getsockname() for sock in shared.sockets}) == 1
    assert shared.url == f"http://127.0.0.1:{shared.port}"
    shared.close()


def test_limits_from_the_command_line():
    limits = DEFAULT_LIMITS.changed(["body=1000", "idle_seconds=2.5", "max_tokens=64"])
    assert (limits.body, limits.idle_seconds, limits.max_tokens, limits.n) == (1000, 2.5, 64, DEFAULT_LIMITS.n)
    for setting, message in (
        ("size=1", "no limit 'size'"),
        ("body=16MiB", "whole number"),
        ("body", "whole number"),
        ("n=0", "more than 0"),
        ("idle_seconds=nan", "more than 0"),
        ("idle_seconds=soon", "a number of seconds"),
    ):
        with pytest.raises(UsageError, match=message):
            DEFAULT_LIMITS.changed([setting])


def test_names_of_the_model():
    assert model_names(None, Path("/models/demo")) == ("demo",)
    assert model_names(None, None) == ("model",)
    assert model_names(["a", "b"], Path("/models/demo")) == ("a", "b")


@pytest.mark.parametrize("name", ["a\ud800", "\udcff", 3, None, b"a"], ids=repr)
def test_names_of_models_and_logs_are_text(name: Any):
    for arguments in ({"served_model_names": ("good", name)}, {"served_model_names": ("a",), "request_log": name}):
        if arguments.get("request_log", 0) is None:
            continue
        with pytest.raises(UsageError, match="is a name of a model or a log, but must be text in UTF-8"):
            ServerSettings(**arguments)
