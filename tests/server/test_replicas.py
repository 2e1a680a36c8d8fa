"""Several replicas of a model behind one address: where requests go, and what the end of a replica costs."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

import httpx
import psutil
from serve_kit import DEMO, until
from starlette.types import Message

from bminf_lite.backend import replica_devices
from bminf_lite.cuda.runtime import driver
from bminf_lite.errors import NoDriverError, UsageError
from bminf_lite.server import launcher, replica_client
from bminf_lite.server.front import Front, beginning_of
from bminf_lite.server.http_process import within_open_files
from bminf_lite.server.limits import DEFAULT_LIMITS
from bminf_lite.server.listener import Address, Listener
from bminf_lite.server.replica_client import ReplicaFailed
from bminf_lite.server.replicas import Replica, Replicas, replica_commands, serve_replicas, together
from bminf_lite.server.security import digests
from bminf_lite.server.settings import ServerSettings


def group(count: int, keys: Sequence[bytes] = ()) -> tuple[Replicas, Front]:
    """Replicas without processes, and a front process in this one."""
    made = Replicas([[]] * count, print)
    front = Front(made, DEFAULT_LIMITS, count, 1, keys)
    made.on_change = lambda: front.set_ports(made.ports)
    return made, front


def front_of(count: int, processes: int = 1) -> Front:
    """A front process whose replicas are ready, if nothing is asked of them."""
    made, _ = group(count)
    front = Front(made, DEFAULT_LIMITS, count, processes)
    front.set_ports(range(1, count + 1))
    return front


def test_requests_that_begin_alike_go_to_the_same_replica_unless_it_has_much_more_to_do() -> None:
    front = front_of(4)
    chosen = {number: front.choose(b"text %d" % number) for number in range(64)}
    assert all(front.choose(b"text %d" % number) is target for number, target in chosen.items())
    counts = [sum(target is one for one in chosen.values()) for target in front.targets]
    assert min(counts) > 4
    chosen[0].active = 20
    other = front.choose(b"text 0")
    assert other is not chosen[0] and other.active == 0
    chosen[0].active = 4
    assert front.choose(b"text 0") is chosen[0]


def test_a_beginning_that_one_replica_has_is_worth_some_waiting_there() -> None:
    front = front_of(2)
    own = front.choose(b"text")
    other = next(target for target in front.targets if target is not own)
    own.active, other.active = 120, 80
    assert front.choose(b"text") is own  # 1.25 times the mean, and 4, are 129
    assert [front.choose(b"new %d" % number) for number in range(20)] == [other] * 20
    own.active = 150
    assert front.choose(b"text") is other
    own.active = 120  # now both have it
    assert front.choose(b"text") is other


@pytest.mark.parametrize("processes", (1, 4))
@pytest.mark.parametrize("begin_alike", (False, True))
def test_many_requests_are_spread_evenly(processes: int, begin_alike: bool) -> None:
    fronts = [front_of(2, processes) for _ in range(processes)]
    counts = [0, 0]
    for number in range(4096):
        target = fronts[number % processes].choose(b"all" if begin_alike else b"%d" % number)
        target.active += 1
        counts[target.number] += 1
    assert abs(counts[0] - counts[1]) <= 2 * 2 * 4 and sum(counts) == 4096


def test_a_replica_that_is_not_ready_gets_nothing_and_the_others_keep_theirs() -> None:
    front = front_of(3)
    before = {number: front.choose(b"%d" % number) for number in range(30)}
    front.set_ports([1, 0, 3])
    for number, target in before.items():
        now = front.choose(b"%d" % number)
        assert now is target if target is not front.targets[1] else now is not target
    front.set_ports([0, 0, 0])
    with pytest.raises(ReplicaFailed, match="no replica is ready"):
        front.choose(None)


def test_without_a_beginning_the_least_busy_is_chosen() -> None:
    front = front_of(3)
    for target, active in zip(front.targets, (2, 1, 3), strict=True):
        target.active = active
    assert front.choose(None) is front.targets[1]


def test_the_beginning_of_a_request() -> None:
    long = "word " * 1000
    one, two = ({"model": "m", "prompt": long + end, "max_tokens": len(end)} for end in ("a", "bc"))
    assert beginning_of(json.dumps(one).encode()) == beginning_of(json.dumps(two).encode()) is not None
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("hello", "goodbye")]
    assert len({beginning_of(json.dumps(chat).encode()) for chat in chats}) == 2
    for other in (b"", b"{", b"[1]", b"{}", b'{"prompt": null}', b'{"prompt": ""}', b"[" * 100_000):
        assert beginning_of(other) is None
    assert beginning_of(b'{"prompt": ' + b"[" * 100_000) is None
    others = [one | more for more in ({"cache_salt": "s"}, {"model": "adapter"}, {"prompt": "other"})]
    assert len({beginning_of(json.dumps(value).encode()) for value in (one, *others)}) == 4


def test_metrics_of_all_replicas_stand_together() -> None:
    heads = "# HELP a Requests.\n# TYPE a counter\n"
    texts = {0: heads + 'a{engine="0",m="x y"} 2\n# TYPE b gauge\nb 0.5\n', 3: heads + 'a{m="x y",engine="0"} 3\n'}
    assert together(texts) == (
        heads + 'a{engine="0",m="x y"} 2\na{m="x y",engine="3"} 3\n# TYPE b gauge\nb{engine="0"} 0.5\n'
    )
    assert together({1: 'c{m="a b"} 1\n'}) == 'c{engine="1",m="a b"} 1\n'


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, replicas, fronts, each in ((2, 2, 1, 1), (32, 2, 4, 4), (64, 8, 16, 2), (32, 8, 8, 1)):
        monkeypatch.setattr(launcher, "num_cores", lambda cores=cores: cores)
        assert launcher.default_front_processes(replicas) == fronts and launcher.default_http_workers(replicas) == each


def test_the_commands_of_replicas() -> None:
    arguments = ["serve", "M", "--replicas", "2", "--host=0.0.0.0", "--port", "80", "--seed", "3", "--device", "cuda"]
    first, second = replica_commands([*arguments, "--allow-unauthenticated"], ["cuda:1", "cuda:3"])
    assert first[:-1] == second[:-1] and (first[-1], second[-1]) == ("cuda:1", "cuda:3")
    own = ["serve", "M", "--seed", "3", "--host", "127.0.0.1", "--port", "{port}"]
    assert first[1:-4] == ["-m", "bminf_lite", *own] and first[-4] == "--http-workers"
    (command,) = replica_commands(["serve", "M", "--http-workers=3", "--keyless", "/metrics"], ["cpu"])
    assert command.count("--http-workers") == 0 and command[-4:-2] == ["--keyless", "/health/ready"]


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


@pytest.mark.parametrize("refused", ["front", "replica"])
def test_a_process_that_cannot_be_started_ends_the_server(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = asyncio.create_subprocess_exec

    async def refuse(*command: str, **options: Any) -> asyncio.subprocess.Process:
        if ("-I" in command) == (refused == "front"):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    before = set(psutil.Process().children())
    listener = Listener(Address("127.0.0.1", 0), 1)
    with pytest.raises(BlockingIOError):
        serve_replicas(
            [[sys.executable, "-c", "import time; time.sleep(60)"]],
            listener,
            ServerSettings(("model",)),
            1.0,
            lambda message: None,
        )
    assert set(psutil.Process().children()) <= before


def test_replicas_that_keep_ending_end_the_server() -> None:
    async def keep() -> Replicas:
        made = Replicas([[sys.executable, "-c", "raise SystemExit(3)"]], lines.append)
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
        from bminf_lite.server.replicas import Replicas

        async def main():
            made = Replicas([[sys.executable, "-c", "import time; time.sleep(600)"]], print)
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
    """A stand-in for a replica: it answers with ``status`` and keeps the requests; one that was closed refuses.

    It keeps connections open. Answers wait until ``gate`` is set; with ``ends_early`` the last byte is missing.
    """

    def __init__(self, made: Replicas, number: int, status: int = 200):
        self.made = made
        self.number = number
        self.status = status
        self.asked: list[tuple[str, bytes]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.ends_early = False

    async def __aenter__(self) -> Stand:
        replica = self.made.replicas[self.number]
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", replica.port)
        replica.port = self._server.sockets[0].getsockname()[1]
        self.set_ready(True)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    @property
    def num_connections(self) -> int:
        return len(self._writers)

    def set_ready(self, is_ready: bool) -> None:
        self.made._set_ready(self.made.replicas[self.number], is_ready)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.split("content-length: ")[1].split("\r\n")[0])
                path, body = head.split()[1], await reader.readexactly(size)
                if path != "/health/ready":
                    self.asked.append((path, body))
                await self.gate.wait()
                writer.write(f"HTTP/1.1 {self.status} x\r\nContent-Length: 4\r\n\r\na 1".encode())
                if self.ends_early:
                    break
                writer.write(b"\n")
        writer.close()


async def status_of(front: Front, path: str, method: str = "GET", body: bytes = b"", key: str = "") -> int:
    """The status of the answer to a request."""
    return int((await answer_of(front, path, method, body, key))[0]["status"])


async def answer_of(front: Front, path: str, method: str, body: bytes, key: str = "") -> list[Message]:
    """The answer to a request of a client that stays."""
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
    await asyncio.wait_for(front(scope | {"method": method, "headers": headers}, receive, send), 20)
    return sent


def test_what_all_replicas_are_asked_goes_on_without_one_that_has_ended() -> None:
    async def ask() -> None:
        made, front = group(2)
        async with Stand(made, 1) as ended:
            pass
        assert await status_of(front, "/metrics") == 503
        async with Stand(made, 0) as alive:
            for path in ("/metrics", "/v1/load_lora_adapter"):
                ended.set_ready(True)
                body = b'{"lora_name": "a", "lora_path": "f"}'
                assert await status_of(front, path, "POST", body) == 200
                assert [replica.is_ready for replica in made.replicas] == [True, False]
            assert [path for path, _ in alive.asked] == ["/metrics", "/v1/load_lora_adapter"]

    asyncio.run(ask())


def test_a_replica_that_refuses_a_connection_gets_no_more_and_another_answers() -> None:
    async def ask() -> None:
        made, front = group(2)
        async with Stand(made, 0) as ended:
            pass
        async with Stand(made, 1) as alive:
            ended.set_ready(True)
            for number in range(20):
                body = json.dumps({"prompt": f"text {number}"}).encode()
                assert await status_of(front, "/v1/completions", "POST", body) == 200
            assert len(alive.asked) == 20 and not made.replicas[0].is_ready

    asyncio.run(ask())


def test_all_requests_are_with_the_replicas_at_once_and_connections_are_used_again() -> None:
    async def ask() -> None:
        made, front = group(2)
        async with Stand(made, 0) as one, Stand(made, 1) as two:
            for _ in range(2):
                for stand in (one, two):
                    stand.asked = []
                    stand.gate.clear()
                bodies = [json.dumps({"prompt": [number] * 128}).encode() for number in range(300)]
                answers = [asyncio.ensure_future(answer_of(front, "/v1/completions", "POST", body)) for body in bodies]
                while len(one.asked) + len(two.asked) < 300:
                    await asyncio.sleep(0.01)
                assert abs(len(one.asked) - len(two.asked)) <= 16
                assert sum(target.active for target in front.targets) == 300
                for stand in (one, two):
                    stand.gate.set()
                for start, *rest in await asyncio.gather(*answers):
                    assert start["status"] == 200 and b"".join(message["body"] for message in rest) == b"a 1\n"
                    assert [message["more_body"] for message in rest][-1] is False
            assert one.num_connections + two.num_connections <= 316

    asyncio.run(ask())


def test_an_answer_that_ends_early_cuts_the_connection() -> None:
    async def ask() -> None:
        made, front = group(1)
        async with Stand(made, 0) as stand:
            stand.ends_early = True
            with pytest.raises(ConnectionResetError):
                await answer_of(front, "/v1/completions", "POST", b"{}")

    asyncio.run(ask())


def test_the_connection_to_the_replica_ends_when_the_client_goes_away() -> None:
    async def ask() -> None:
        made, front = group(1)
        async with Stand(made, 0) as stand:
            stand.gate.clear()
            gone = asyncio.Event()

            async def receive() -> Message:
                if asked:
                    await gone.wait()
                    return {"type": "http.disconnect"}
                asked.append(1)
                return {"type": "http.request", "body": b"{}"}

            async def send(message: Message) -> None:
                raise AssertionError

            asked: list[int] = []
            scope = {"type": "http", "path": "/", "raw_path": b"/", "query_string": b"", "method": "POST"}
            asking = asyncio.ensure_future(front(scope | {"headers": []}, receive, send))
            while not stand.asked:
                await asyncio.sleep(0.01)
            gone.set()
            await asyncio.wait_for(asking, 20)
            assert front.targets[0].active == 0

    asyncio.run(ask())


def test_a_process_that_may_open_no_more_files(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(port: int) -> None:
        raise ReplicaFailed("the replica cannot be reached (Too many open files)")

    async def ask() -> int:
        made, front = group(1)
        async with Stand(made, 0):
            monkeypatch.setattr(replica_client, "connect", full)
            status = await status_of(front, "/v1/models")
            assert made.replicas[0].is_ready
            return status

    assert asyncio.run(ask()) == 503
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1128, 1128))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, bounds: None)
    assert within_open_files(DEFAULT_LIMITS).connections == 1000
    assert within_open_files(DEFAULT_LIMITS, files_each=2).connections == 500


def test_a_request_that_cannot_be_passed_on() -> None:
    async def ask() -> int:
        made, front = group(1)
        async with Stand(made, 0):
            return await status_of(front, "/v1/models", key="a\nb")

    assert asyncio.run(ask()) == 400


def test_the_body_of_a_request_without_a_key_is_not_read() -> None:
    """The replica refuses it, as if it had no body."""

    async def ask() -> None:
        made, front = group(1, digests(["secret"]))
        async with Stand(made, 0, 401) as stand:
            for path in ("/v1/completions", "/v1/load_lora_adapter"):
                stand.asked = []
                refused, *_ = await answer_of(front, path, "POST", b"long", "wrong")
                assert refused["status"] == 401 and (b"connection", b"close") in refused["headers"]
                assert (await answer_of(front, path, "POST", b"{}", "secret"))[0]["status"] == 401
                assert stand.asked == [(path, b""), (path, b"{}")]

    asyncio.run(ask())


def test_a_replica_that_starts_later_gets_the_adapters_that_the_others_have() -> None:
    async def change(front: Front, kind: str, name: str, **more: object) -> None:
        body = {"lora_name": name, **more}
        assert await status_of(front, f"/v1/{kind}_lora_adapter", "POST", json.dumps(body).encode()) < 500

    async def until_ready(replica: Replica) -> None:
        while not replica.is_ready:
            await asyncio.sleep(0.01)

    async def start() -> list[tuple[str, bytes]]:
        made, front = group(2)
        async with Stand(made, 0) as first, Stand(made, 1) as later:
            later.set_ready(False)
            await change(front, "load", "a", lora_path="1")
            await change(front, "load", "a", lora_path="2", load_inplace=True)
            await change(front, "unload", "b")
            await change(front, "load", "b", lora_path="3")
            await change(front, "load", "c", lora_path="4")
            await change(front, "unload", "c")
            first.status = 400
            await change(front, "load", "refused", lora_path="5")
            watch = asyncio.create_task(made._watch(made.replicas[1]))
            await until_ready(made.replicas[1])
            later.set_ready(False)  # as after a refused connection: it is found ready again
            later.asked, again = [], later.asked
            await until_ready(made.replicas[1])
            watch.cancel()
            assert later.asked == [] and [path for path, _ in first.asked].count("/v1/load_lora_adapter") == 5
        return again

    given = asyncio.run(asyncio.wait_for(start(), 60))
    changes = [(path.split("/")[2].split("_")[0], json.loads(body)) for path, body in given]
    found = [(kind, body["lora_name"] + body.get("lora_path", "")) for kind, body in changes]
    assert found == [("load", "a2"), ("unload", "b"), ("load", "b3"), ("unload", "c")]


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
    return [child for child in psutil.Process(process.pid).children() if "serve" in child.cmdline()]


def fronts(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "serve" not in child.cmdline()]


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
def test_another_front_process_takes_the_place_of_one_that_dies(server) -> None:
    process, client = server
    (front,) = fronts(process)
    front.kill()
    front.wait()
    until(lambda: len(fronts(process)) == 1)
    with httpx.Client(base_url=client.base_url, timeout=120) as other:
        until(lambda: complete(other, "Once").status_code == 200)


@pytest.mark.slow
def test_sigterm_ends_all_processes(server) -> None:
    process, _ = server
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))


@pytest.mark.slow
@pytest.mark.parametrize("insists", [False, True])
def test_ctrl_c_in_a_terminal_lets_requests_end_and_a_second_one_ends_all_at_once(insists: bool) -> None:
    command = [sys.executable, "-m", "bminf_lite", "serve", str(DEMO), "--device", "cpu", "--port", "0"]
    command += ["--replicas", "2", "--http-workers", "1", "--shutdown-timeout", "60"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(5)]
    url = next(line for line in lines if "replicas are served at" in line).split(" served at ")[1].strip()
    assert sum("is ready" in line for line in lines) == 2, lines
    children = psutil.Process(process.pid).children(recursive=True)
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=url, timeout=120) as client,
        suppress(httpx.HTTPError),
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        parts = response.iter_text()
        text = next(parts)
        os.killpg(process.pid, signal.SIGINT)
        if insists:
            time.sleep(0.2)
            os.killpg(process.pid, signal.SIGINT)
        for part in parts:
            text += part
    assert process.wait(60) == (130 if insists else 0)
    assert ("[DONE]" in text) != insists and "interrupted" not in process.stderr.read()
    until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
