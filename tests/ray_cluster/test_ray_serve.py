"""The deployment for Ray Serve: a replica that dies costs its running requests, and their clients see an error."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("ray")

import yaml
from ray_kit import DEMO, ray_cluster, replicas_of, wait_for

from bminf_lite.errors import UsageError
from bminf_lite.ray.prefixes import MAX_BODY, PrefixSessions, session_of

pytestmark = [pytest.mark.ray_cluster, pytest.mark.timeout(240)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving" / "ray.yaml"
LONG = {
    "prompt": "If the file does not exist, the function raises an error. " * 3,
    "temperature": 0,
    "ignore_eos": True,
}


def config(port: int, replicas: int, load: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """The example's file, for ``replicas`` on CPUs, or more if ``scaling`` says so."""
    found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    found["http_options"]["port"] = port
    [application] = found["applications"]
    application["args"] |= {"model": str(DEMO), "load_options": {"device": "cpu", **load}}
    [deployment] = application["deployments"]
    deployment["ray_actor_options"] = {"num_cpus": 1, "num_gpus": 0}
    deployment["autoscaling_config"] |= {"min_replicas": replicas, "max_replicas": replicas, **scaling}
    return found


@contextmanager
def served(folder: Path, cluster: Any, replicas: int, load: dict[str, Any], **scaling: Any) -> Iterator[str]:
    """``serve run`` with the example; gives the address when all replicas have started."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "serve.yaml").write_text(yaml.safe_dump(config(port, replicas, load, scaling)))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", cluster.address]
    with open(folder / "serve.log", "wb") as log:
        process = subprocess.Popen([*command, str(folder / "serve.yaml")], stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        told = folder / "serve.log"  # the router says how many replicas it knows
        wait_for(lambda: process.poll() is not None or f": {replicas} replicas" in told.read_text(), 120)
        assert process.poll() is None, told.read_text()
        yield address
    finally:
        process.kill()
        process.wait()


def complete(address: str, session: str | None = None, **fields: Any) -> dict[str, Any]:
    """The answer of ``/v1/completions``, or what a client sees in its place."""
    headers = {} if session is None else {"x-session-id": session}
    try:
        response = httpx.post(f"{address}/v1/completions", json={**LONG, **fields}, headers=headers, timeout=60)
    except httpx.TransportError as error:
        return {"failure": repr(error)}
    return response.json() if response.status_code == 200 else {"failure": f"{response.status_code} {response.text}"}


def stream(address: str, session: str, begun: threading.Semaphore, **fields: Any) -> dict[str, Any]:
    """How a streamed answer ended, or what a client sees of a failure. ``begun`` counts events."""
    body, reason = {**LONG, "stream": True, **fields}, None
    headers = {"x-session-id": session}
    try:
        with httpx.stream("POST", f"{address}/v1/completions", json=body, headers=headers, timeout=60) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return {"finish_reason": reason}
                if line.startswith("data: "):
                    reason = json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"]
                    begun.release()
    except httpx.TransportError as error:
        return {"failure": repr(error)}
    return {"failure": f"{response.status_code}: the stream ended before its end"}


def test_a_replica_that_is_killed_costs_its_running_requests(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "bminf_lite.ray.prefixes:middleware")
    with ray_cluster(4) as cluster, served(tmp_path, cluster, 2, {"max_batch": 16}) as address:
        assert len(serve_replicas(cluster)) == 2 and httpx.get(f"{address}/health/ready").status_code == 200
        short = complete(address, max_tokens=8)
        assert short["usage"]["completion_tokens"] == 8 and short["model"] == "qwen"
        # Without a session, what begins alike goes to the replica that has the beginning.
        usages = [complete(address, max_tokens=2)["usage"] for _ in range(4)]
        assert all(usage["prompt_tokens_details"]["cached_tokens"] > 0 for usage in usages)
        wrong = httpx.post(f"{address}/v1/completions", json={"prompt": 1.5}, timeout=30)
        assert wrong.status_code == 400 and wrong.json()["error"]["message"]

        found: list[dict[str, Any]] = [{} for _ in range(12)]
        begun = threading.Semaphore(0)

        def ask(number: int) -> None:
            found[number] = stream(address, str(number), begun, max_tokens=400)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(found))]
        for thread in threads:
            thread.start()
        for _ in range(60):
            assert begun.acquire(timeout=30)
        serve_replicas(cluster)[0].kill()
        for thread in threads:
            thread.join()
        failed = [answer["failure"] for answer in found if "failure" in answer]
        assert 0 < len(failed) < len(found), found  # both replicas had some
        assert all(answer["finish_reason"] == "length" for answer in found if "failure" not in answer)
        after = [complete(address, str(number), max_tokens=4) for number in range(6)]
        assert all("failure" not in answer for answer in after), after
        wait_for(lambda: len(serve_replicas(cluster)) == 2)


def test_replicas_start_and_end_by_the_tokens_that_wait(tmp_path):
    load = {"max_batch": 2, "max_num_batched_tokens": 32}  # which makes prompts slow
    scaling = {
        "max_replicas": 2,
        "upscale_delay_s": 1,
        "downscale_delay_s": 4,
        "look_back_period_s": 3,
        "metrics_interval_s": 1,
        "policy": {"policy_function": "bminf_lite.ray:QueuedTokens", "policy_kwargs": {"tokens_per_replica": 1000}},
    }

    def ask(number: int) -> None:
        complete(address, prompt=f"{number} " * 300, max_tokens=4)

    with ray_cluster(4) as cluster, served(tmp_path, cluster, 1, load, **scaling) as address:
        assert len(serve_replicas(cluster)) == 1
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(serve_replicas(cluster)) == 2)
        for thread in threads:
            thread.join()
        wait_for(lambda: len(serve_replicas(cluster)) == 1)


def serve_replicas(cluster: Any) -> list[Any]:
    return [process for process in replicas_of(cluster.head_node) if "ServeReplica" in process.cmdline()[0]]


def test_a_session_is_what_precedes_the_first_answer():
    system, first, other = ({"role": role, "content": role} for role in ("system", "user", "assistant"))
    turns = [[system, first], [system, first, other, first], [system, {**first, "content": "b"}], [other, system]]
    one, two, three, four = (session_of(json.dumps({"messages": turn}).encode()) for turn in turns)
    assert one == two and len({one, three, four}) == 3
    assert session_of(json.dumps({"input": turns[0]}).encode()) == one
    assert session_of(json.dumps({"messages": [first], "system": "a"}).encode()) != one
    long = "a" * 512
    assert session_of(json.dumps({"prompt": long + "b"}).encode()) == session_of(json.dumps({"prompt": long}).encode())
    assert session_of(json.dumps({"input": "a"}).encode()) == session_of(json.dumps({"prompt": "a"}).encode())
    for body in (b"", b"{", b"[]", b"{}", b'{"prompt": ""}', b'{"messages": []}', b'{"messages": 1}'):
        assert session_of(body) is None


@pytest.mark.parametrize("given", [[], [(b"x-session-id", b"mine")]])
@pytest.mark.parametrize("size", [10, MAX_BODY])
def test_a_body_is_passed_on_as_it_came(given, size):
    """In pieces, and with the header of a session unless it is too large to be looked at."""
    parts = [b'{"prompt": "', b"a" * size, b'"}']
    pieces = [{"type": "http.request", "body": part, "more_body": part != parts[-1]} for part in parts]
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([dict(scope["headers"]).get(b"x-session-id"), [await receive() for _ in parts]])

    async def receive() -> Any:
        return coming.pop(0)

    coming = list(pieces)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": given}
    asyncio.run(PrefixSessions(app)(scope, receive, None))  # type: ignore[arg-type]
    assert seen[1] == pieces
    assert seen[0] == (b"mine" if given else None if size == MAX_BODY else session_of(b"".join(parts)).encode())


def test_the_policy_follows_queued_tokens_and_requests():
    from bminf_lite.ray import QueuedTokens

    config = SimpleNamespace(get_target_ongoing_requests=lambda: 10.0)

    def wanted(queued: dict[str, float], requests: float) -> float:
        context: Any = SimpleNamespace(
            aggregated_metrics={"queued_tokens": queued}, total_num_requests=requests, config=config
        )
        return QueuedTokens(1000)(context)[0]

    assert wanted({"a": 500, "b": 2500}, 5) == 3
    assert wanted({}, 45) == 4.5
    with pytest.raises(UsageError, match="tokens_per_replica is 0"):
        QueuedTokens(0)


def test_wrong_options_are_named():
    from bminf_lite.ray import Deployment, app

    with pytest.raises(UsageError, match="args has no model"):
        app({"load_options": {}})
    build = Deployment.func_or_class.__mro__[1].__init__
    with pytest.raises(UsageError, match="there is no option served_model; there are served_model_name"):
        build(SimpleNamespace(), str(DEMO), served_model="x")
