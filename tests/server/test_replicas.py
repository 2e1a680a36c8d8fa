"""Several replicas of a model behind one address: where requests go, and what the end of a replica costs."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

import httpx
import psutil
from serve_kit import DEMO, until
from starlette.types import Message

from bminf_lite.backend import replica_devices
from bminf_lite.cuda.runtime import driver
from bminf_lite.errors import NoDriverError, UsageError
from bminf_lite.server.http_process import within_open_files
from bminf_lite.server.limits import DEFAULT_LIMITS
from bminf_lite.server.replicas import (
    Replica,
    ReplicaFailed,
    Replicas,
    beginning_of,
    replica_commands,
    summed,
)
from bminf_lite.server.security import digests


def group(count: int) -> Replicas:
    made = Replicas([[]] * count, DEFAULT_LIMITS, print)
    for replica in made.replicas:
        replica.is_ready = True
    return made


def test_requests_that_begin_alike_go_to_the_same_replica_unless_it_has_much_more_to_do() -> None:
    replicas = group(4)
    chosen = {number: replicas.choose(b"text %d" % number) for number in range(64)}
    assert all(replicas.choose(b"text %d" % number) is replica for number, replica in chosen.items())
    counts = [sum(replica is one for one in chosen.values()) for replica in replicas.replicas]
    assert min(counts) > 4
    chosen[0].active = 20
    other = replicas.choose(b"text 0")
    assert other is not chosen[0] and other.active == 0
    chosen[0].active = 4
    assert replicas.choose(b"text 0") is chosen[0]


def test_a_replica_that_is_not_ready_gets_nothing_and_the_others_keep_theirs() -> None:
    replicas = group(3)
    before = {number: replicas.choose(b"%d" % number) for number in range(30)}
    replicas.replicas[1].is_ready = False
    for number, replica in before.items():
        now = replicas.choose(b"%d" % number)
        assert now is replica if replica is not replicas.replicas[1] else now is not replica
    for replica in replicas.replicas:
        replica.is_ready = False
    with pytest.raises(ReplicaFailed, match="no replica is ready"):
        replicas.choose(None)


def test_without_a_beginning_the_least_busy_is_chosen() -> None:
    replicas = group(3)
    for replica, active in zip(replicas.replicas, (2, 1, 3), strict=True):
        replica.active = active
    assert replicas.choose(None) is replicas.replicas[1]


def test_the_beginning_of_a_request() -> None:
    long = "word " * 1000
    one, two = ({"model": "m", "prompt": long + end, "max_tokens": len(end)} for end in ("a", "bc"))
    assert beginning_of(json.dumps(one).encode()) == beginning_of(json.dumps(two).encode()) is not None
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("hello", "goodbye")]
    assert len({beginning_of(json.dumps(chat).encode()) for chat in chats}) == 2
    for other in (b"", b"{", b"[1]", b"{}", b'{"prompt": null}', b"[" * 100_000):
        assert beginning_of(other) is None


def test_metrics_are_added() -> None:
    texts = ['# HELP a Requests.\n# TYPE a counter\na{m="x y"} 2\nb 0.5\n', '# TYPE a counter\na{m="x y"} 3\nc 1\n']
    assert summed(texts).splitlines() == ["# HELP a Requests.", "# TYPE a counter", 'a{m="x y"} 5', "b 0.5", "c 1"]


def test_the_commands_of_replicas() -> None:
    arguments = ["serve", "M", "--replicas", "2", "--host=0.0.0.0", "--port", "80", "--seed", "3", "--device", "cuda"]
    first, second = replica_commands([*arguments, "--allow-unauthenticated"], ["cuda:1", "cuda:3"])
    assert first[:-1] == second[:-1] and (first[-1], second[-1]) == ("cuda:1", "cuda:3")
    own = ["serve", "M", "--seed", "3", "--host", "127.0.0.1", "--port", "{port}", "--device", "cuda:1"]
    assert first[1:] == ["-m", "bminf_lite", *own]


def test_the_devices_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise NoDriverError("no driver")

    monkeypatch.setattr(driver, "device_count", lambda: 4)
    assert replica_devices("cpu", 3) == ["cpu"] * 3
    assert replica_devices("auto", 2) == ["cuda:0", "cuda:1"]
    assert replica_devices("cuda", 2, 2) == ["cuda:0", "cuda:2"] and replica_devices("cuda:3", 1) == ["cuda:3"]
    with pytest.raises(UsageError, match="machine has 4, numbered from 0: give at most 1 replicas"):
        replica_devices("cuda:1", 2, 2)
    for device in ("tpu", "cuda:x", "cuda:-1"):
        with pytest.raises(UsageError, match=f"device '{device}' is not one of"):
            replica_devices(device, 2)
    monkeypatch.setattr(driver, "device_count", none)
    assert replica_devices("auto", 2) == ["cpu"] * 2
    with pytest.raises(NoDriverError):
        replica_devices("cuda", 2)


def test_replicas_that_keep_ending_end_the_server() -> None:
    async def keep() -> Replicas:
        made = Replicas([[sys.executable, "-c", "raise SystemExit(3)"]], DEFAULT_LIMITS, lines.append)
        await asyncio.wait_for(made.keep(made.replicas[0]), 60)
        return made

    lines: list[str] = []
    made = asyncio.run(keep())
    assert made.failure is not None and "replicas have ended 6 times" in str(made.failure)
    assert "replica 0 has ended with 3" in lines[0] and isinstance(made.replicas[0], Replica)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the replicas of a killed process")
def test_replicas_end_when_the_front_process_is_killed() -> None:
    code = """if True:
        import asyncio, sys
        import uvloop
        from bminf_lite.server.limits import DEFAULT_LIMITS
        from bminf_lite.server.replicas import Replicas

        async def main():
            made = Replicas([[sys.executable, "-c", "import time; time.sleep(600)"]], DEFAULT_LIMITS, print)
            kept = asyncio.create_task(made.keep(made.replicas[0]))
            while made.replicas[0].process is None:
                await asyncio.sleep(0.01)
            print(made.replicas[0].process.pid, flush=True)
            await kept

        uvloop.run(main())
    """
    front = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    replica = psutil.Process(int(front.stdout.readline()))
    assert replica.is_running()
    front.kill()
    front.wait()
    until(lambda: not replica.is_running() or replica.status() == "zombie")


class Stand:
    """A stand-in for a replica: it answers with ``status`` and keeps the requests; one that was closed refuses."""

    def __init__(self, replica: Replica, status: int = 200):
        self.replica = replica
        self.status = status
        self.asked: list[tuple[str, bytes]] = []

    async def __aenter__(self) -> Stand:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.replica.port)
        self.replica.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.split("content-length: ")[1].split("\r\n")[0])
        path, body = head.split()[1], await reader.readexactly(size)
        if path != "/health/ready":
            self.asked.append((path, body))
        writer.write(f"HTTP/1.1 {self.status} x\r\nConnection: close\r\nContent-Length: 4\r\n\r\na 1\n".encode())
        await writer.drain()
        writer.close()


async def status_of(replicas: Replicas, path: str, method: str = "GET", body: bytes = b"", key: str = "") -> int:
    """The status of the answer to a request."""
    return int((await start_of(replicas, path, method, body, key))["status"])


async def start_of(replicas: Replicas, path: str, method: str, body: bytes, key: str) -> Message:
    """How the answer begins."""
    sent: list[Message] = []

    async def receive() -> Message:
        if sent or asked:
            await asyncio.Event().wait()
        asked.append(1)
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        sent.append(message)

    asked: list[int] = []
    scope = {"type": "http", "path": path, "raw_path": path.encode(), "query_string": b""}
    headers = [(b"authorization", b"Bearer " + key.encode())]
    await asyncio.wait_for(replicas(scope | {"method": method, "headers": headers}, receive, send), 20)
    return sent[0]


def test_what_all_replicas_are_asked_goes_on_without_one_that_has_ended() -> None:
    async def ask() -> None:
        made = group(2)
        async with Stand(made.replicas[1]):
            pass
        assert await status_of(made, "/metrics") == 503
        made.replicas[0].is_ready = made.replicas[1].is_ready = True
        async with Stand(made.replicas[0]) as alive:
            for path in ("/metrics", "/v1/load_lora_adapter"):
                made.replicas[1].is_ready = True
                body = b'{"lora_name": "a", "lora_path": "f"}'
                assert await status_of(made, path, "POST", body) == 200
                assert [replica.is_ready for replica in made.replicas] == [True, False]
            assert [path for path, _ in alive.asked] == ["/metrics", "/v1/load_lora_adapter"]

    asyncio.run(ask())


def test_a_process_that_may_open_no_more_files(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(host: str, port: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "open_connection", full)
    made = group(1)
    assert asyncio.run(status_of(made, "/v1/models")) == 503 and made.replicas[0].is_ready
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1128, 1128))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, bounds: None)
    assert within_open_files(DEFAULT_LIMITS).connections == 1000
    assert within_open_files(DEFAULT_LIMITS, files_each=2).connections == 500


def test_a_request_that_cannot_be_passed_on() -> None:
    async def ask() -> int:
        made = group(1)
        async with Stand(made.replicas[0]):
            return await status_of(made, "/v1/models", key="a\nb")

    assert asyncio.run(ask()) == 400


def test_the_body_of_a_request_without_a_key_is_not_read() -> None:
    """The replica refuses it, as if it had no body."""

    async def ask() -> None:
        made = Replicas([[]], DEFAULT_LIMITS, print, digests(["secret"]))
        made.replicas[0].is_ready = True
        for path in ("/v1/completions", "/v1/load_lora_adapter"):
            async with Stand(made.replicas[0], 401) as stand:
                refused = await start_of(made, path, "POST", b"long", "wrong")
                assert refused["status"] == 401 and (b"connection", b"close") in refused["headers"]
                assert (await start_of(made, path, "POST", b"{}", "secret"))["status"] == 401
                assert stand.asked == [(path, b""), (path, b"{}")]

    asyncio.run(ask())


def test_a_replica_that_starts_later_gets_the_adapters_that_the_others_have() -> None:
    async def change(made: Replicas, kind: str, name: str, **more: object) -> None:
        body = {"lora_name": name, **more}
        assert await status_of(made, f"/v1/{kind}_lora_adapter", "POST", json.dumps(body).encode()) < 500

    async def until_ready(replica: Replica) -> None:
        while not replica.is_ready:
            await asyncio.sleep(0.01)

    async def start() -> list[tuple[str, str]]:
        made = group(2)
        made.replicas[1].is_ready = False
        async with Stand(made.replicas[0]) as first, Stand(made.replicas[1]) as later:
            await change(made, "load", "a", lora_path="1")
            await change(made, "load", "a", lora_path="2", load_inplace=True)
            await change(made, "unload", "b")
            await change(made, "load", "b", lora_path="3")
            await change(made, "load", "c", lora_path="4")
            await change(made, "unload", "c")
            first.status = 400
            await change(made, "load", "refused", lora_path="5")
            watch = asyncio.create_task(made._watch(made.replicas[1]))
            await until_ready(made.replicas[1])
            made.replicas[1].is_ready = False  # as after a refused connection: it is found ready again
            later.asked, again = [], later.asked
            await until_ready(made.replicas[1])
            watch.cancel()
            assert later.asked == [] and [path for path, _ in first.asked].count("/v1/load_lora_adapter") == 5
        bodies = [(path.split("/")[2].split("_")[0], json.loads(body)) for path, body in again]
        return [(kind, body["lora_name"] + body.get("lora_path", "")) for kind, body in bodies]

    given = asyncio.run(asyncio.wait_for(start(), 60))
    assert given == [("load", "a2"), ("unload", "b"), ("load", "b3"), ("unload", "c")]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [
        sys.executable,
        "-m",
        "bminf_lite",
        "serve",
        str(DEMO),
        "--device",
        "cpu",
        "--port",
        "0",
        "--replicas",
        "2",
        "--http-workers",
        "1",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url, ready = "", 0
    while ready < 2 or not url:
        line = process.stderr.readline()
        assert line, "the server has ended"
        url = line.split(" served at ")[1].strip() if "replicas are served at" in line else url
        ready += "is ready" in line
    threading.Thread(target=process.stderr.read, daemon=True).start()
    with httpx.Client(base_url=url, timeout=120) as client:
        yield process, client
    process.kill()


def complete(client: httpx.Client, prompt: str, **fields: object) -> httpx.Response:
    body = {"model": "demo_model", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body)


def engines(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


@pytest.mark.slow
def test_it_answers_streams_and_adds_metrics(server) -> None:
    _, client = server
    texts = {complete(client, "Once upon a time").json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1
    body = {"model": "demo_model", "prompt": "Once", "max_tokens": 8, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        events = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]" and len(events) >= 8
    assert client.get("/v1/models").json()["data"][0]["id"] == "demo_model"
    headers = {"content-type": "application/json"}
    assert client.post("/v1/completions", content=b"{", headers=headers).status_code == 400
    lines = client.get("/metrics").text.splitlines()
    total = sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))
    assert total >= 3 * 4 + 8


@pytest.mark.slow
def test_a_replica_that_dies_costs_its_own_requests_and_is_started_again(server) -> None:
    process, client = server
    before = engines(process)
    assert len(before) == 2
    ended = []

    def read(prompt: str) -> None:
        with suppress(httpx.HTTPError):
            ended.append((prompt, complete(client, prompt, max_tokens=400).status_code))

    prompts = [f"{number} times upon a time" for number in range(8)]
    threads = [threading.Thread(target=read, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    os.kill(before[0].pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    codes = [status for _, status in ended]
    assert len(codes) == 8 and set(codes) <= {200, 503} and codes.count(200) >= 1
    assert all(complete(client, prompt).status_code == 200 for prompt in prompts)
    until(lambda: len(engines(process)) == 2)


@pytest.mark.slow
def test_sigterm_ends_all_processes(server) -> None:
    process, _ = server
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
