"""Metrics and the request log of a server: what each kind of end counts as, and the sums over its processes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn")

from api_kit import DEMO, NAME, VOCAB_SIZE, LiveServer
from fake_engine import FakeEngine, fake_info
from http_kit import post
from serve_kit import until
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.request_builder import GenerationRequest
from bminf_lite.server.client import EngineClient
from bminf_lite.server.engine_server import EngineServer
from bminf_lite.server.recorder import Recorder
from bminf_lite.server.request_log import RequestLog
from bminf_lite.server.request_record import Observer
from bminf_lite.server.settings import ServerSettings
from bminf_lite.text.prompts import EncodedPrompt


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    engine = FakeEngine(range(1, VOCAB_SIZE), seconds_per_step=0.02)  # 900 tokens take 18 s
    settings = ServerSettings((NAME, "alias"), request_log=str(tmp_path / "log"))
    server = LiveServer(engine, fake_info(str(DEMO), VOCAB_SIZE, context_length=1024), settings)
    yield server
    server.close()


def metrics(server: LiveServer) -> dict[str, float]:
    """The samples of a scrape that are not zero, by name and the label that tells them apart."""
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = re.findall(
        r'^(vllm:\w+){engine="0",(?:(?:finished_reason="(\w+)"),)?model_name="test-model"} (.*)$',
        response.text,
        re.MULTILINE,
    )
    return {f"{name} {reason}".strip(): float(value) for name, reason, value in samples if float(value)}


def log_lines(tmp_path: Path, count: int) -> list[dict[str, Any]]:
    """The lines of the log when there are ``count``."""
    deadline = time.monotonic() + 300
    while len(lines := (tmp_path / "log").read_text().splitlines()) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(lines) == count
    return [json.loads(line) for line in lines]


def test_what_requests_count_as(server: LiveServer, tmp_path: Path) -> None:
    body = {"model": "alias", "prompt": [1, 2, 3], "max_tokens": 8}
    whole = server.post("/v1/completions", body | {"n": 2})
    text = whole.json()["choices"][0]["text"]
    server.events("/v1/completions", body | {"stop": text[3:6]})
    found = metrics(server)
    assert found["vllm:request_success_total length"] == 2 and found["vllm:request_success_total stop"] == 1
    assert found["vllm:generation_tokens_total"] == found["vllm:request_generation_tokens_sum"] > 16
    assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:e2e_request_latency_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] <= found["vllm:generation_tokens_total"] - 3
    assert found["vllm:request_params_max_tokens_sum"] == 16 and found["vllm:request_params_n_sum"] == 3
    first, second = log_lines(tmp_path, 2)
    assert first["id"] == whole.headers["x-request-id"] and (first["model"], first["status"]) == (NAME, 200)
    assert (first["prompt_tokens"], first["output_tokens"], first["finish_reasons"]) == (3, 16, {"length": 2})
    assert second["finish_reasons"] == {"stop": 1}


def test_a_client_that_goes_away(server: LiveServer, tmp_path: Path) -> None:
    body = {"prompt": "x", "max_tokens": 100_000, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body | {"max_tokens": 900}) as response:
        next(response.iter_lines())
    (line,) = log_lines(tmp_path, 1)
    assert (line["status"], line["finish_reasons"]) == (200, {"cancelled": 1}) and line["output_tokens"] < 900
    url, content = httpx.URL(server.url), json.dumps(body | {"stream": False, "max_tokens": 900}).encode()
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(post("/v1/completions", content))
        until(lambda: server.engine.stats().running == 1)
    assert log_lines(tmp_path, 2)[1]["finish_reasons"] == {"cancelled": 1}
    assert metrics(server)["vllm:request_success_total abort"] == 2


def test_refused_requests_are_logged_without_what_they_said(server: LiveServer, tmp_path: Path) -> None:
    refused = [
        server.post("/v1/completions", {"prompt": "my secret", "max_tokens": -1}),
        server.post("/v1/my-secret", {}),
        server.http.post("/v1/completions", content="my secret", headers={"Authorization": "Bearer my-secret"}),
        server.http.post("/v1/completions", json={}, headers={"Host": "my-secret.example"}),
    ]
    server.http.get("/v1/models")
    lines = log_lines(tmp_path, 4)
    assert [line["status"] for line in lines] == [response.status_code for response in refused] == [400, 404, 415, 421]
    assert [line["id"] for line in lines] == [response.headers["x-request-id"] for response in refused]
    assert lines[1]["route"] == "unknown" and all(line["finish_reasons"] == {} for line in lines)
    assert "secret" not in (tmp_path / "log").read_text()
    assert not any("request" in name for name in metrics(server))


def test_a_failing_engine_is_counted(server: LiveServer, tmp_path: Path) -> None:
    with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 900, "stream": True}) as r:
        lines = r.iter_lines()
        next(lines)
        server.engine.fail()
        assert "CUDA error" in "".join(lines)
    assert log_lines(tmp_path, 1)[0]["finish_reasons"] == {"error": 1}
    assert server.http.get("/metrics").status_code == 503


def test_every_process_shows_what_all_have_counted() -> None:
    async def serve() -> None:
        server = EngineServer(FakeEngine(range(1, 100)), fake_info(str(DEMO), VOCAB_SIZE, context_length=64))
        clients = [await EngineClient.connect(server.connect()) for _ in range(3)]
        for client in clients[:2]:
            observer = Observer(64, client.observe)
            record = observer.begin("/v1/completions", "id", NAME)
            request = GenerationRequest(EncodedPrompt([1]), SamplingParams(max_new_tokens=5))
            async with await client.generate(request, record=record) as generation:
                outputs = [output async for output in generation]
            record.end(200)
            assert sum(len(output.token_ids) for output in outputs) == 5
            observer.close()
        clients[1].close()
        while (await clients[2].stats()).observed[:1] != [10.0]:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.close)

    asyncio.run(asyncio.wait_for(serve(), 300))


def test_a_mounted_application_logs_its_own_paths(tmp_path: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(status_code=204)(scope, receive, send)

    async def serve() -> None:
        observer = Observer(64, lambda values: None, RequestLog(str(tmp_path / "log")))
        recorder = Recorder(app, observer, NAME, ["/v1/completions"])
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/llm/v1/completions", "root_path": "/llm", "headers": []}
        await recorder(scope, receive=lambda: asyncio.sleep(0), send=send)
        observer.close()
        assert any(name == b"x-request-id" for name, _ in sent[0]["headers"])

    asyncio.run(serve())
    (line,) = log_lines(tmp_path, 1)
    assert (line["route"], line["status"]) == ("/v1/completions", 204)
