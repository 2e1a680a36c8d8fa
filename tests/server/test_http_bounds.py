"""Clients that are slow, greedy or broken: each is refused within its bound, and others are served meanwhile."""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

pytest.importorskip("uvloop", reason="the extra [serve] is not installed")

import psutil
from http_kit import Served, post, read_all, served, status

from bminf_lite.server.app import create_app
from bminf_lite.server.limits import Limits

SMALL = Limits(
    body=4096,
    headers=2048,
    connections=64,
    requests=8,
    header_seconds=300,
    body_seconds=300,
    idle_seconds=300,
    stalled_seconds=300,
)
"""Times that no test waits for, however slow the machine is; a test of a time shortens that one alone."""


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with served(SMALL, seconds_per_step=0.001) as server:
        yield server


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """A server that waits 0.3 s for headers."""
    with served(replace(SMALL, header_seconds=0.3)) as server:
        yield server


@pytest.fixture(autouse=True)
def _still_serves(small: Served) -> Iterator[None]:
    yield
    until(lambda: status(small.get()) == 200)  # until the connections of the test are closed, there may be too many
    until(lambda: is_idle(small))


def until(condition: Callable[[], bool], seconds: float = 300) -> None:
    """Wait for a condition. The bound is for a server that hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_idle(server: Served) -> bool:
    """Whether the engine holds no request."""
    stats = server.engine.stats()
    return stats.running == stats.waiting == stats.blocks_used == 0


def dripped(server: Served, head: bytes, drop: bytes) -> bytes:
    """Send ``head``, and then a drop every 50 ms until the server answers; returns the answer."""
    with server.connect() as connection:
        connection.sendall(head)
        deadline = time.monotonic() + 60
        while not select.select([connection], [], [], 0.05)[0]:
            assert time.monotonic() < deadline
            connection.sendall(drop)
        return read_all(connection)


def test_headers_that_never_end(hasty):
    answer = dripped(hasty, b"GET / HTTP/1.1\r\n", b"x: y\r\n")
    assert status(answer) == 408 and b"headers took longer than 0.3 seconds" in answer


def test_a_connection_without_a_request(hasty):
    assert status(hasty.ask(b"")) == 408


def test_a_body_that_never_ends():
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 3000\r\n\r\n"
    with served(replace(SMALL, body_seconds=0.4)) as server:
        answer = dripped(server, head, b"x")
    assert status(answer) == 408 and b"body took longer" in answer


@pytest.mark.slow
def test_an_idle_connection_is_closed():
    limits = replace(SMALL, idle_seconds=1)
    with served(limits) as server, server.connect() as connection:
        started = time.monotonic()
        connection.sendall(b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert status(read_all(connection)) == 200
        assert time.monotonic() - started > 0.9 * limits.idle_seconds


@pytest.mark.slow
def test_the_time_for_headers_begins_with_each_request():
    limits = replace(SMALL, header_seconds=2)
    with served(limits) as server, server.connect() as connection:
        for _ in range(2):
            connection.sendall(b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert status(connection.recv(65536)) == 200
            time.sleep(1.2 * limits.header_seconds)
        connection.sendall(b"GET /echo HTT")
        assert status(read_all(connection)) == 408


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 500 + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 200_000,
    ],
    ids=["path", "one header", "many headers", "endless header"],
)
def test_long_headers(small, request_bytes):
    answer = small.ask(request_bytes)
    assert status(answer) in (431, 0), "the answer may be lost with the rest of what was sent"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / here HTTP/1.1\r\n\r\n",
        b"G\x00T / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nhost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded: x\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\nhello\r\n0\r\n\r\n",
        b"\r\n" * 100,
    ],
    ids=[
        "TLS",
        "version",
        "two targets",
        "zero byte",
        "space before colon",
        "folded",
        "negative length",
        "two lengths",
        "length and chunks",
        "chunk size",
        "empty lines",
    ],
)
def test_what_is_not_http(hasty, request_bytes):
    answer = hasty.ask(request_bytes)
    assert status(answer) in (400, 408)
    assert b"traceback" not in answer.lower()


def test_a_health_check_without_a_host(small):
    """HAProxy sends HTTP/1.0 without a Host header by default."""
    assert status(small.ask(b"GET /echo HTTP/1.0\r\n\r\n")) == 200
    assert status(small.ask(b"GET /echo HTTP/1.0\r\nhost: evil.example\r\n\r\n")) == 421
    assert status(small.ask(b"GET /echo HTTP/1.1\r\nconnection: close\r\n\r\n")) == 421


@pytest.mark.parametrize("host", [None, "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[::1"])
def test_a_wrong_host(small, host):
    line = "" if host is None else f"host: {host}\r\n"
    assert status(small.ask(f"GET /echo HTTP/1.1\r\n{line}connection: close\r\n\r\n".encode())) == 421


def test_two_hosts(small):
    request = b"GET /echo HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\nconnection: close\r\n\r\n"
    assert status(small.ask(request)) == 421


def test_large_bodies(small):
    assert status(small.post("/echo", b"x" * 4096)) == 200
    answer = small.ask(
        b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 99999999999\r\n\r\n"
    )
    assert status(answer) == 413
    assert status(small.post("/echo", b"x" * 4097)) == 413
    chunks = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    answer = small.ask(head + b"transfer-encoding: chunked\r\n\r\n" + chunks * 3)
    assert status(answer) == 413


def test_more_connections_than_allowed():
    with served(SMALL) as server, ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(SMALL.connections + 20)]
        until(lambda: len(select.select(connections, [], [], 0)[0]) == 20)
        assert all(status(c.recv(4096)) == 503 for c in select.select(connections, [], [], 0)[0])


def test_a_client_that_goes_away_frees_its_requests(small):
    connections = []
    for _ in range(6):
        connection = small.connect()
        connection.sendall(post("/stream", b"100000000"))
        assert status(connection.recv(4096)) == 200
        connections.append(connection)
    until(lambda: small.engine.stats().running == 6)
    for connection in connections:
        connection.close()
    until(lambda: is_idle(small))


def test_too_many_requests(small):
    connections = []
    for _ in range(SMALL.requests):
        connection = small.connect()
        connection.sendall(post("/stream", b"100000000"))
        assert status(connection.recv(4096)) == 200
        connections.append(connection)
    answer = small.post("/stream", b"5")
    assert status(answer) == 429 and b"retry-after: 1" in answer
    assert status(small.get()) == 200  # /metrics is wanted then more than ever
    for connection in connections:
        connection.close()
    until(lambda: status(small.post("/stream", b"5")) == 200)


def test_a_client_that_does_not_read():
    """Its connection is cut off, what waits for it stays small, and another stream is not held up."""
    before = psutil.Process().memory_info().rss
    limits = replace(SMALL, stalled_seconds=0.5)
    with served(limits, seconds_per_step=0.001) as server, server.connect() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.sendall(post("/wide", b"100000000"))
        answer = server.post("/stream", b"100")
        assert answer.count(b"data: ") == 100
        until(lambda: is_idle(server))
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_pipelined_requests_are_answered_in_order(small):
    requests = [post("/echo", b'"first"'), post("/stream", b"3"), post("/echo", b'"last"', "connection: close\r\n")]
    answer = small.ask(b"".join(requests))
    assert answer.index(b'"first"') < answer.index(b"data: 1") < answer.index(b'"last"')


def test_a_full_queue():
    """One request runs, one waits, and the next is to come again later."""
    with served(app=create_app, max_num_seqs=1, max_queue=1, seconds_per_step=0.002) as server:
        body = b'{"prompt": "a", "max_tokens": 100000, "stream": true}'
        with server.connect() as running, server.connect() as waiting:
            running.sendall(post("/v1/completions", body))
            assert status(running.recv(4096)) == 200
            until(lambda: server.engine.stats().running == 1)
            waiting.sendall(post("/v1/completions", body))
            until(lambda: server.engine.stats().waiting == 1)
            answer = server.post("/v1/completions", body)
            assert status(answer) == 429 and b"retry-after: 1" in answer and b"queue_full" in answer
        until(lambda: is_idle(server))
        assert status(server.post("/v1/completions", b'{"prompt": "a", "max_tokens": 2}')) == 200


def test_what_comes_behind_a_request_does_not_harm_its_answer():
    """A line break, or the beginning of the next request: their time begins when the answer has ended."""
    limits = replace(SMALL, header_seconds=0.2, body_seconds=0.2)
    later = post("/echo", b'"later"', "connection: close\r\n")
    with served(limits, seconds_per_step=0.01) as server:
        for rest in (b"\r\n", later[:20], later[:-3]):
            with server.connect() as connection:
                connection.sendall(post("/stream", b"60"))
                answer = connection.recv(4096)
                connection.sendall(rest)
                answer += read_all(connection)
            stream, _, after = answer.partition(b"0\r\n\r\n")
            assert stream.count(b"data: ") == 60 and stream.count(b"HTTP/1.1") == 1
            assert status(after) == 408


def test_an_answer_before_the_end_of_the_body_is_the_only_one():
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
    with served(replace(SMALL, body=1000, body_seconds=0.2)) as server:
        answer = server.ask(head + b"\r\n7d0\r\n" + b"x" * 2000)
    assert status(answer) == 413 and answer.count(b"HTTP/1.1") == 1


def test_an_answer_that_has_begun_gets_no_second_one():
    with served(SMALL, seconds_per_step=0.01) as server, server.connect() as connection:
        connection.sendall(post("/stream", b"100000000"))
        answer = connection.recv(4096)
        connection.sendall(b"no request\r\n\r\n")
        answer += read_all(connection)
        assert answer.count(b"HTTP/1.1") == 1
        until(lambda: is_idle(server))


H2C = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
CHUNKED = (
    b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n%stransfer-encoding: chunked\r\n\r\n"
    b'4\r\n"two\r\n7;ext=1\r\n chunks\r\n1\r\n"\r\n0\r\ntrailer: x\r\n\r\n'
)


@pytest.mark.parametrize("size", [1, 7, 1 << 20], ids="{} bytes at a time".format)
@pytest.mark.parametrize(
    "upgrade",
    [H2C, "connection: upgrade\r\nupgrade: TLS/1.2\r\n", "Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"],
    ids=["h2c", "TLS", "websocket"],
)
def test_a_wish_to_upgrade_changes_no_answer(small, upgrade, size):
    """RFC 9110, section 7.8. The requests of a connection, as many clients send them one after another."""

    def requests(wish: str) -> bytes:
        last = post("/echo", b'"the last"', "connection: close\r\n")
        get = f"GET /echo HTTP/1.1\r\nhost: localhost\r\n{wish}\r\n".encode()
        return b"".join(
            [post("/echo", b'"a length"', wish), CHUNKED % wish.encode(), get, post("/stream", b"3", wish), get, last]
        )

    data = requests(upgrade)
    with small.connect() as connection:
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
        answer = read_all(connection)
    assert comparable(answer) == comparable(small.ask(requests("")))
    assert answer.count(b"HTTP/1.1 200") == 6 and b'"two chunks"' in answer and b'"the last"' in answer


def comparable(answer: bytes) -> bytes:
    """An answer without what differs between two of them: the time, the id, and how events are cut into chunks."""
    return re.sub(rb"(?mi)^(date|x-request-id): .*\r\n|^[0-9a-f]+\r\n|^\r\n", b"", answer)


@pytest.mark.parametrize("rest", [b"", b'"five"' * 10])
def test_a_wish_to_upgrade_with_wrong_framing_is_no_request(hasty, rest):
    """What follows is the body that the headers promise, and nothing else."""
    head = f"POST /echo HTTP/1.1\r\nhost: localhost\r\n{H2C}".encode()
    answer = hasty.ask(head + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + rest)
    assert status(answer) == 400


def test_a_tunnel_is_refused(small):
    assert status(small.ask(b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org:443\r\n\r\n")) == 400
    assert status(small.ask(b"CONNECT /echo HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")) == 405


def test_a_stream_to_http_1_0_ends_with_the_connection(small):
    """RFC 9112, section 6.1: such a client would take the sizes of chunks for text."""
    body = b"5"
    head = b"POST /stream HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
    expected = small.post("/stream", body).partition(b"\r\n\r\n")[2]
    for more in (b"", b"connection: keep-alive\r\n", b"expect: 100-continue\r\n", H2C.encode()):
        answer = small.ask(head % (more, len(body)) + body)
        headers, _, events = answer.partition(b"\r\n\r\n")
        assert status(answer) == 200 and b"chunked" not in headers.lower() and b"connection: close" in headers.lower()
        assert events.count(b"data: ") == 5 and events == comparable(expected)
    echo = small.ask(b'POST /echo HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: 6\r\n\r\n"text"')
    assert echo.endswith(b'\r\n\r\n"text"') and b"content-length: 6" in echo
    assert status(small.ask(b"HEAD /echo HTTP/1.0\r\n\r\n")) in (200, 405)
