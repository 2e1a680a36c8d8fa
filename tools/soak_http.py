"""Send mixed traffic to a server for a while, and check that nothing is lost and memory stays flat.

    python tools/soak_http.py --minutes 60

Starts ``bminf-lite serve`` with the bundled model on the CPU. Clients send whole and streamed completions, several of a
prompt, log-probabilities, constrained and wrong requests; a part of them goes away at a random moment. Prints sixty
lines of JSON meanwhile. In the end the engine must hold no request and no block, every request must have had the answer
that its kind has, and no process may have grown by more than ``--growth`` MiB since a fifth of the time had passed.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import click
import httpx
import psutil

import bminf_lite

DEMO = Path(bminf_lite.__file__).parent / "demo_model"
PROMPTS = ("Once upon a time", "If the file", "Return", "The value of the", "def main")
NUM_REPORTS = 60
SMALL_CACHE = ("--max-batch", "8")
"""A cache of 8 contexts, which prefixes of early requests fill, so that it grows no more afterwards."""
SCHEMA = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}


def random_request(draw: random.Random) -> tuple[str, dict[str, object], int]:
    """A path, a body, and the status that it must get."""
    body: dict[str, object] = {"prompt": draw.choice(PROMPTS) * draw.randint(1, 8), "max_tokens": draw.randint(1, 60)}
    kind = draw.choice(("plain", "plain", "stream", "stream", "stream", "several", "scores", "json", "echo", "wrong"))
    if kind == "stream":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    elif kind == "several":
        body |= {"n": 3, "temperature": 1.0, "stream": draw.random() < 0.5, "stop": ["the"]}
    elif kind == "scores":
        body |= {"logprobs": 3, "stream": draw.random() < 0.5}
    elif kind == "json":
        body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    elif kind == "echo":
        body |= {"echo": True, "logprobs": 0}
    elif kind == "wrong":
        wrong = ({"temperature": -1}, {"prompt": []}, {"max_tokens": "many"}, {"n": 0}, {"logit_bias": {"a": 1}})
        return "/v1/completions", body | draw.choice(wrong), 400
    return "/v1/completions", body, 200


class Soak:
    """The clients, and what they saw."""

    def __init__(self, url: str, seed: int):
        self.seen: Counter[str] = Counter()
        self._http = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None))
        self._draw = random.Random(seed)

    async def client(self, until: float) -> None:
        """One request after another."""
        while time.monotonic() < until:
            path, body, expected = random_request(self._draw)
            leaves = self._draw.random() < 0.25
            try:
                work = self._ask(path, body, expected)
                await asyncio.wait_for(work, self._draw.random() * 0.5 if leaves else None)
            except asyncio.TimeoutError:
                self.seen["left"] += 1

    async def _ask(self, path: str, body: dict[str, object], expected: int) -> None:
        async with self._http.stream("POST", path, json=body) as response:
            text = (await response.aread()).decode()
        whole = "[DONE]" in text if body.get("stream") and expected == 200 else text.endswith("}")
        if response.status_code == expected and whole and '{"error"' not in (text if expected == 200 else ""):
            self.seen[f"as expected, {expected}"] += 1
        else:
            self.seen["lost"] += 1
            click.echo(f"{response.status_code} instead of {expected}: {json.dumps(body)} -> {text[-300:]}", err=True)

    async def gauges(self) -> dict[str, float]:
        """What ``/metrics`` says of the engine."""
        text = (await self._http.get("/metrics")).text
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return {n: float(re.search(rf"^vllm:{n}{{.*}} (\S+)$", text, re.MULTILINE)[1]) for n in names}  # type: ignore[index]


def resident(process: psutil.Process) -> dict[str, float]:
    """MiB of the server's processes, by what they do."""
    found = {"engine": process.memory_info().rss / 2**20}
    for number, child in enumerate(process.children(recursive=True)):
        found[f"child {number}"] = child.memory_info().rss / 2**20
    return {name: round(size, 1) for name, size in found.items()}


async def soak(url: str, process: psutil.Process, seconds: float, clients: int, seed: int, growth: float) -> list[str]:
    """Run the traffic; returns what is wrong."""
    traffic, started = Soak(url, seed), time.monotonic()
    running = asyncio.gather(*(traffic.client(started + seconds) for _ in range(clients)))
    early: dict[str, float] = {}
    while not running.done():
        await asyncio.wait([running], timeout=seconds / NUM_REPORTS)
        passed = time.monotonic() - started
        memory = resident(process)
        if passed > seconds / 5 and not early:
            early = memory
        click.echo(json.dumps({"seconds": round(passed), **traffic.seen, "MiB": memory}))
    await running
    for _ in range(50):
        gauges = await traffic.gauges()
        if not any(gauges.values()):
            break
        await asyncio.sleep(0.1)
    problems = [f"{name} is {value} at the end" for name, value in gauges.items() if value]
    if traffic.seen["lost"]:
        problems.append(f"{traffic.seen['lost']} requests had a wrong answer")
    grown = {name: size - early.get(name, size) for name, size in resident(process).items()}
    click.echo(json.dumps({"grown_MiB": grown, **gauges}))
    return problems + [f"{name} has grown by {size:.1f} MiB" for name, size in grown.items() if size > growth]


@click.command()
@click.option("--minutes", default=60.0, show_default=True)
@click.option("--clients", default=12, show_default=True, help="Requests at a time.")
@click.option("--seed", default=0, show_default=True)
@click.option("--growth", default=20.0, show_default=True, help="MiB that a process may grow by.")
@click.option("--http-workers", default=2, show_default=True)
def main(minutes: float, clients: int, seed: int, growth: float, http_workers: int) -> None:
    """Send mixed traffic to a server, and check what is left."""
    command = [sys.executable, "-m", "bminf_lite", "serve", str(DEMO), "--device", "cpu", "--port", "0", *SMALL_CACHE]
    server = subprocess.Popen([*command, "--http-workers", str(http_workers)], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        line = next(line for line in server.stderr if " is served at " in line)
        url = line.split(" is served at ")[1].strip()
        problems = asyncio.run(soak(url, psutil.Process(server.pid), minutes * 60, clients, seed, growth))
        server.send_signal(signal.SIGTERM)
        if (code := server.wait(60)) != 0:
            problems.append(f"the server ended with {code}")
    finally:
        server.kill()
    if problems:
        raise click.ClickException("; ".join(problems))
    click.echo("nothing was lost")


if __name__ == "__main__":
    main()
