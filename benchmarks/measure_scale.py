"""What one driver and one proxy of a Ray cluster carry, from which docs/ray.md computes what many GPUs give.

    python benchmarks/measure_scale.py [--blocks 8000] [--replicas 2] [--events 20000]

- The plan of a batch: bytes per second of JSON lines that are scanned, which the driver does once.
- The fleet: blocks per second that a driver gives to replicas which answer at once, and the driver's CPU time for each.
- A proxy of Ray Serve: its CPU time for a request and for an event of a stream, of a deployment that computes nothing.
  With ``RAY_SERVE_ENABLE_HA_PROXY=1`` that of HAProxy, which Ray Serve then starts.

The CPU times are those of one process, so other load on the machine counts little. Needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve

from bminf_lite.batch.plan import BatchBlock, plan_lines
from bminf_lite.batch.runner import Counts
from bminf_lite.batch.storage import LocalStorage
from bminf_lite.ray.fleet import Fleet

STREAMS = 40
EVENT = b'data: {"choices": [{"index": 0, "text": " a", "finish_reason": null}]}\n\n'


class Idle:
    """A replica that takes ``room`` blocks at a time, and ``seconds`` for each, in which it computes nothing."""

    def __init__(self, room: int, seconds: float):
        self._room, self._seconds = room, seconds

    async def start(self) -> int:
        """As a real one."""
        return self._room

    async def answer(self, block: BatchBlock) -> Counts:
        """Wait."""
        await asyncio.sleep(self._seconds)
        return Counts(rows=block.num_rows)

    async def progress(self, seconds: float) -> Counts:
        """As a real one."""
        await asyncio.sleep(seconds)
        return Counts()


async def events(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that streams as many events as its path says, with as many milliseconds between two."""
    if scope["type"] != "http":
        return
    count, pause = map(int, scope["path"].strip("/").split("/"))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(count):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(pause / 1000)
    await send({"type": "http.response.body", "body": b""})


@serve.deployment(max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.1})
@serve.ingress()
class Events:
    """The application in Ray Serve."""

    def __serve_build_asgi_app__(self) -> Any:
        return events


def measure_plan(megabytes: int) -> None:
    """Scan a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        line = json.dumps({"prompt": "a" * 2000, "max_tokens": 100}).encode() + b"\n"
        path.write_bytes(line * (megabytes * 1_000_000 // len(line)))
        started = time.process_time()
        plan = plan_lines(LocalStorage(), [str(path)])
        seconds = time.process_time() - started
        print(f"plan: {path.stat().st_size / seconds / 1e6:,.0f} MB/s of {plan.num_rows:,} rows, by CPU time")


def measure_fleet(num_blocks: int, replicas: int) -> None:
    """Hand out blocks to replicas that answer at once, and to some that have as many blocks as a thousand real ones."""
    actor = ray.remote(Idle).options(num_cpus=0.1)
    blocks = [BatchBlock("in.jsonl", i * 256, 256, i, i + 1) for i in range(num_blocks)]
    for room, pause in ((8, 0.0), (4000 // replicas, 5.0)):
        fleet = Fleet(partial(actor.remote, room, pause), lambda: replicas, lambda counts: None)
        started, cpu = time.perf_counter(), time.process_time()
        fleet.run(blocks)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        text = f"{num_blocks / seconds:,.0f} blocks/s, {1e3 * cpu / num_blocks:.2f} ms of the driver's CPU for each"
        print(f"fleet with {room * replicas:,} blocks under way: {text}")


def is_proxy(process: psutil.Process) -> bool:
    """Whether a process passes requests and events on: Ray Serve's own proxy, or HAProxy where it is used."""
    try:
        name = " ".join(process.cmdline()[:1])
    except psutil.Error:  # it has ended
        return False
    return name.endswith("/haproxy") if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else "ProxyActor" in name


def measure_proxy(num_events: int, num_requests: int) -> None:
    """Stream events, and ask for empty answers."""
    serve.start(http_options={"host": "127.0.0.1", "port": 8642})
    serve.run(Events.bind(), route_prefix="/")
    processes = list(filter(is_proxy, psutil.process_iter()))

    def proxy_seconds() -> float:
        times = [process.cpu_times() for process in processes]
        return sum(t.user + t.system for t in times)

    with httpx.Client(base_url="http://127.0.0.1:8642", timeout=120) as client:
        client.get("/100/0")
        started, before = time.perf_counter(), proxy_seconds()
        for _ in range(num_requests):
            client.get("/0/0")
        cpu, seconds = proxy_seconds() - before, time.perf_counter() - started
        each = 1e3 * cpu / num_requests
        print(f"proxy: {each:.2f} ms of its CPU for a request ({num_requests / seconds:.0f}/s one by one)")
        before, started = proxy_seconds(), time.perf_counter()
        with client.stream("GET", f"/{num_events}/0") as response:
            received = sum(len(chunk) for chunk in response.iter_raw())
        cpu, seconds = proxy_seconds() - before, time.perf_counter() - started
        assert received == num_events * len(EVENT)
        each = 1e6 * cpu / num_events
        print(f"proxy: {each:.0f} us of its CPU for an event of one fast stream ({num_events / seconds:,.0f}/s)")
    before, started = proxy_seconds(), time.perf_counter()
    asyncio.run(stream_slowly(STREAMS, num_events // STREAMS))
    cpu, seconds = proxy_seconds() - before, time.perf_counter() - started
    each, rate = 1e6 * cpu / num_events, num_events / seconds
    print(f"proxy: {each:.0f} us of its CPU for an event of {STREAMS} streams with 50 a second ({rate:,.0f}/s)")


async def stream_slowly(streams: int, count: int) -> None:
    """Read streams of 50 events a second."""

    async def read(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", f"/{count}/20") as response:
            assert sum([len(chunk) async for chunk in response.aiter_raw()]) == count * len(EVENT)

    async with httpx.AsyncClient(base_url="http://127.0.0.1:8642", timeout=300) as client:
        await asyncio.gather(*(read(client) for _ in range(streams)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--requests", type=int, default=300)
    options = parser.parse_args()
    measure_plan(options.megabytes)
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    measure_fleet(options.blocks, options.replicas)
    measure_proxy(options.events, options.requests)
    serve.shutdown()


if __name__ == "__main__":
    main()
