"""A server in processes of its own, over the bundled model on the CPU, and what a test asks of it."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

import bminf_lite

DEMO = Path(bminf_lite.__file__).parent / "demo_model"


def _is_http_process(process: psutil.Process) -> bool:
    try:
        return "http_process" in " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


PROGRAM = """
import dataclasses, json, signal, sys, time
import bminf_lite
from bminf_lite.engine.model_runner import ModelRunner

launch = ModelRunner.launch

def slowly(self, step):
    time.sleep(0.01)
    return launch(self, step)

ModelRunner.launch = slowly
options = json.loads(sys.argv[2])
model = bminf_lite.load(sys.argv[1], device="cpu", max_batch=16, **options.pop("load", {}))

def tell(*_):
    print("stats " + json.dumps(dataclasses.asdict(model.stats())), file=sys.stderr, flush=True)

signal.signal(signal.SIGUSR1, tell)
bminf_lite.serve(model, port=0, **options)
"""
"""A user's own script. SIGUSR1 prints the engine's statistics.

A step takes 10 ms at least: however fast the machine, a stream of 1000 tokens runs while a test does something.
"""

FAILING_COMMAND = """
import sys, time
from bminf_lite.cli import main
from bminf_lite.engine.model_runner import ModelRunner

launch = ModelRunner.launch

def failing(self, step):
    time.sleep(0.01)
    if len(step.requests) > 1:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return launch(self, step)

ModelRunner.launch = failing
main(["serve", sys.argv[1], "--device", "cpu", "--port", "0", "--http-workers", "1"])
"""
"""A server whose first step for two requests fails."""


class ServeProcess:
    """The process that owns the model. ``http`` sends requests to its server."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._stats: queue.SimpleQueue[dict[str, int]] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(300) and self.url, "".join(self.lines)
        self.http = httpx.Client(base_url=self.url, timeout=300)

    def _read(self) -> None:
        self.url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("stats "):
                self._stats.put(json.loads(line.removeprefix("stats ")))
            elif " is served at " in line:
                self.url = line.split(" is served at ")[1].strip()
                self._ready.set()
        self._ready.set()

    def stats(self) -> dict[str, int]:
        """The engine's statistics."""
        self.process.send_signal(signal.SIGUSR1)
        return self._stats.get(timeout=300)

    def is_idle(self) -> bool:
        """Whether the engine holds no request and no block of one."""
        stats = self.stats()
        return stats["running"] == stats["waiting"] == stats["blocks_used"] == 0

    def http_processes(self) -> list[psutil.Process]:
        """The HTTP processes, not those that they start for chat templates."""
        return [p for p in psutil.Process(self.process.pid).children() if _is_http_process(p)]

    def complete(self, **fields: Any) -> httpx.Response:
        """A short completion."""
        body = {"model": "demo_model", "prompt": "Once upon a time", "max_tokens": 4, **fields}
        return self.http.post("/v1/completions", json=body)

    @contextmanager
    def stream(self, tokens: int = 1000) -> Iterator[httpx.Response]:
        """A stream that has begun."""
        body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=300) as client, client.stream("POST", f"{self.url}/v1/completions", json=body) as got:
            yield got

    def wait(self, seconds: float = 300) -> int:
        """The exit code, after all that was printed is read."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def close(self) -> None:
        """End it."""
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def served(load: dict[str, Any] | None = None, **options: Any) -> Iterator[ServeProcess]:
    """A script that serves the bundled model."""
    arguments = json.dumps({"http_workers": 1, "load": load or {}, **options})
    server = ServeProcess([sys.executable, "-c", PROGRAM, str(DEMO), arguments])
    try:
        yield server
    finally:
        server.close()


def until(condition: Callable[[], bool], seconds: float = 300) -> None:
    """Wait for a condition. The bound is for a server that hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
