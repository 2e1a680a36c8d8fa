"""A real server: processes, signals and deaths, with the bundled model on the CPU and requests over loopback."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

import httpx
import psutil
from serve_kit import DEMO, FAILING_COMMAND, ServeProcess, served, until

import bminf_lite
from bminf_lite.server import application
from bminf_lite.server.launcher import python_command


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with served(http_workers=2) as process:
        yield process


@pytest.fixture(autouse=True)
def _nothing_is_lost(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of the shared server it serves, and its engine holds nothing."""
    yield
    if "server" in request.fixturenames:
        process = request.getfixturevalue("server")
        until(process.is_idle)
        assert process.complete().status_code == 200


def test_it_answers(server):
    assert server.http.get("/health").json() == {"status": "ready"}
    assert server.http.get("/version").json() == {"version": bminf_lite.__version__}
    assert [m["id"] for m in server.http.get("/v1/models").json()["data"]] == ["demo_model"]
    assert server.complete(max_tokens=8, ignore_eos=True).json()["usage"]["completion_tokens"] == 8


def test_clients_that_go_away(server):
    """In the middle of a stream, before the first token, and before the request is complete."""
    url, steps = httpx.URL(server.url), server.stats()["steps"]
    with ExitStack() as stack:
        for _ in range(8):
            response = stack.enter_context(server.stream())
            next(response.iter_bytes())
    for size in (10, 60, 200):
        with socket.create_connection((url.host, url.port)) as connection:
            body = b'{"prompt": "Once", "max_tokens": 1000, "stream": true}'
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
            request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
            connection.sendall(request[:size])
    until(server.is_idle)
    assert server.stats()["steps"] - steps < 900, "the streams have not come to their ends"


@pytest.mark.slow
def test_an_http_process_that_is_killed(server):
    """Its requests are lost, those of the other go on, and a new process takes its place."""
    assert len(server.http_processes()) == 2
    with ExitStack() as stack:
        streams = [stack.enter_context(server.stream(60)) for _ in range(10)]
        streams.append(stack.enter_context(server.stream()))
        owners = [owner(server, stream) for stream in streams]
        victim = owners[-1]
        victim.kill()
        for stream, process in zip(streams[:-1], owners, strict=False):
            if process != victim:
                assert "[DONE]" in "".join(stream.iter_text())
        with suppress(httpx.HTTPError):
            assert "[DONE]" not in "".join(streams[-1].iter_text())
    until(lambda: len(server.http_processes()) == 2 and victim.pid not in {p.pid for p in server.http_processes()})
    with httpx.Client(base_url=server.url, timeout=300) as client:
        until(lambda: client.get("/health").status_code == 200)


def owner(server: ServeProcess, stream: httpx.Response) -> psutil.Process:
    """The HTTP process that has the connection of a stream."""
    port = stream.extensions["network_stream"].get_extra_info("client_addr")[1]
    (found,) = [
        p for p in server.http_processes() if any(c.raddr and c.raddr.port == port for c in p.net_connections())
    ]
    return found


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_connections(server, count):
    """Those over the bound are refused, and the first of them all is still served meanwhile."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    url = httpx.URL(server.url)
    with httpx.Client(base_url=server.url, timeout=300) as client:
        assert client.get("/health").status_code == 200
        connections = []
        try:
            for _ in range(min(count, soft - 200)):
                connections.append(socket.create_connection((url.host, url.port), timeout=60))  # noqa: PERF401
            assert client.get("/health").status_code == 200
        finally:
            for connection in connections:
                connection.close()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"prompt":' * 50_000,
        b'{"prompt": "' + b"a" * 3_000_000 + b'"}',
        b"\xff\xfe\x00",
        b"",
        b"null",
        b"1e999999999",
        b'{"prompt": [' + b"9" * 100_000 + b"]}",
        b'{"prompt": "x", "max_tokens": 1e308}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": {"a": 1}}',
        b'{"prompt": "x", "n": 1000000000}',
        b'{"prompt": [' + b"1," * 500_000 + b"1]}",
        b'{"prompt": "x", "stop": [' + b'"a",' * 100_000 + b'"a"]}',
    ],
    ids=[
        "deep list",
        "deep object",
        "long text",
        "no UTF-8",
        "nothing",
        "null",
        "number",
        "huge token",
        "float count",
        "half a pair",
        "object",
        "many completions",
        "many tokens",
        "many stop texts",
    ],
)
def test_bodies_that_are_refused(server, body):
    answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text[:200]
    assert answer.json()["error"]["message"]


def test_the_application_within_another_process():
    """The same application over a socket to a thread, for those who have an ASGI server of their own."""

    async def ask(app: object) -> list[str]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://anything") as client:
            body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(3)))
            return [answer.json()["choices"][0]["text"] for answer in answers]

    with bminf_lite.load(DEMO, device="cpu") as model:
        app = application(model)
        expected = model.generate("Once upon a time", max_new_tokens=8, temperature=0).text
        for _ in range(2):  # an event loop each
            assert asyncio.run(ask(app)) == [expected] * 3
            until(lambda: not app._server._connections)  # the loop has closed its own
        assert model.stats().running == model.stats().blocks_used == 0


def test_processes_ignore_ctrl_c_before_they_import_anything(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "probe.py").write_text(
        "import signal\nfound = signal.getsignal(signal.SIGINT)\ndef main(): print(found is signal.SIG_IGN)\n"
    )
    assert subprocess.run(python_command("probe"), capture_output=True, check=True).stdout == b"True\n"


@pytest.mark.slow
def test_sigterm_lets_running_requests_finish():
    with served(shutdown_timeout=300) as server, server.stream(100) as running:
        text = running.iter_text()
        next(text)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses_connections(server))
        assert "[DONE]" in "".join(text)
        assert server.wait() == 0


@pytest.mark.slow
def test_sigterm_ends_what_runs_too_long():
    with served(shutdown_timeout=0.3) as server, ExitStack() as stack:
        streams = [stack.enter_context(server.stream()) for _ in range(8)]
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert "the server is shutting down" in "".join(stream.iter_text())
        assert server.wait() == 0


@pytest.mark.slow
def test_sigterm_ends_quietly_what_waits():
    """Checks of grammars that take seconds, bodies and headers that do not come, and a client that reads nothing."""
    with served(shutdown_timeout=0.3) as server, ExitStack() as stack:
        url = httpx.URL(server.url)
        bombs = ["|".join(rf"(\p{{L}}{{1,{i}}}x){{3}}" for i in range(1, 4000 + number)) for number in range(12)]
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

        def send(data: bytes) -> socket.socket:
            connection = stack.enter_context(socket.create_connection((url.host, url.port), timeout=300))
            connection.sendall(data)
            return connection

        def post(body: dict[str, object]) -> socket.socket:
            data = json.dumps({"prompt": "Once", "max_tokens": 3, **body}).encode()
            return send(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)

        checks = [post({"structured_outputs": {"regex": bomb}, "stream": i % 2 == 1}) for i, bomb in enumerate(bombs)]
        send(head.encode())
        send(head.encode() + b"content-length: 100\r\n\r\n{")
        post({"max_tokens": 100_000, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 5})
        until(lambda: server.stats()["running"] > 0)
        server.process.send_signal(signal.SIGTERM)
        answers = [check.recv(65536) for check in checks]
        assert all(answer.split(b" ")[1] in (b"400", b"503") for answer in answers)
        assert any(b"the server is shutting down" in answer for answer in answers)
        assert server.wait() == 0
        assert not any("Traceback" in line or "ERROR" in line for line in server.lines), "".join(server.lines)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(number):
    with served(shutdown_timeout=60) as server, server.stream() as running:
        pieces = running.iter_bytes()  # kept, because its end would close the connection
        next(pieces)
        children = server.http_processes()
        server.process.send_signal(number)
        until(lambda: refuses_connections(server))  # the first signal was handled
        assert not has_ended(server)
        server.process.send_signal(number)
        assert server.wait() == 128 + number
        until(lambda: not any(map(is_alive, children)))


def refuses_connections(server: ServeProcess) -> bool:
    url = httpx.URL(server.url)
    try:
        socket.create_connection((url.host, url.port), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_an_engine_that_fails():
    """Streams end with an error, and the process ends with a code after which a supervisor starts it again."""
    server = ServeProcess([sys.executable, "-c", FAILING_COMMAND, str(DEMO)])
    try:
        with ThreadPoolExecutor() as pool, server.stream() as running:
            whole = pool.submit(server.complete, max_tokens=1000, ignore_eos=True)
            assert "illegal memory access" in "".join(running.iter_text())
            assert whole.result().status_code == 503
        assert server.wait() == 70
        assert any("the engine has failed" in line for line in server.lines)
    finally:
        server.close()


def has_ended(server: ServeProcess) -> bool:
    return server.process.poll() is not None


@pytest.mark.slow
def test_http_processes_that_keep_ending():
    with served() as server:
        for _ in range(6):
            processes = server.http_processes()
            for process in processes:
                process.kill()
            until(lambda old=processes: has_ended(server) or set(server.http_processes()) - set(old) != set())
        assert server.wait() == 1
        assert any("have ended 6 times" in line for line in server.lines)


@pytest.mark.slow
def test_a_parent_that_is_killed_leaves_no_process():
    with served(http_workers=2) as server, server.stream() as running:
        children = server.http_processes()
        text = running.iter_text()
        next(text)
        server.process.kill()
        assert "the engine's process has ended" in "".join(text)
        until(lambda: not any(map(is_alive, children)))
