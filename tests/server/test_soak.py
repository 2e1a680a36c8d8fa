"""A server under mixed traffic keeps nothing and loses nothing; a server that is killed leaves nothing behind."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("starlette", reason="the server needs the extra serve")

import httpx
import psutil
import soak_server
from server_process import NAME, ServerProcess, demo_folder

pytestmark = pytest.mark.slow


def test_twenty_seconds_of_mixed_traffic():
    """Memory still grows in the first seconds: caches of the interpreter, buffers, the prefix cache's index."""
    report = soak_server.run(None, clients=6, seconds=20, allowed_growth=32 << 20)
    assert report["problems"] == []
    kinds = len(soak_server.Soak("", 0)._kinds)
    assert len(report["answered"].keys() | report["left"].keys()) == kinds, "every kind has been sent"


def test_a_killed_server_leaves_nothing_and_starts_again_at_its_port(tmp_path):
    folder = demo_folder(tmp_path / "model", soak_server.TEMPLATE)
    server = ServerProcess(folder)
    children = psutil.Process(server.process.pid).children(recursive=True)
    body = {"model": NAME, "prompt": "The", "max_tokens": 900, "n": 4, "ignore_eos": True, "stream": True}
    begun, ended = threading.Event(), threading.Event()

    def read():
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                pieces = []
                for piece in response.iter_text():
                    pieces.append(piece)
                    begun.set()
                assert "data: [DONE]" not in "".join(pieces)
        except httpx.HTTPError:
            pass  # the connection breaks, or an error event ends the stream
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    assert begun.wait(60)
    server.kill()
    assert ended.wait(60), "the client of a running request waits for ever"
    assert psutil.wait_procs(children, timeout=60)[1] == [], "the server's processes outlive it"
    again = ServerProcess(folder, "--port", str(server.port))
    try:
        answer = httpx.post(f"{again.url}/v1/completions", json={"model": NAME, "prompt": "The", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
    finally:
        assert again.stop() == 0
