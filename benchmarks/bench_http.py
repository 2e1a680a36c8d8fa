"""Measure what a streamed token costs on its way from the engine to a client over HTTP.

    python benchmarks/bench_http.py --streams 256 --rate 30000 --tokens 400

Three kinds of processes run, as in a server: the engine's (a fake engine, which has no model, behind the real
connections), HTTP processes (uvicorn, uvloop, the tokenizer of the bundled model), and a load client over raw asyncio.
All of them are on this machine, so the CPU seconds of each kind per token are the figure to compare; the rate reached
also depends on the number of cores. Prints a JSON object. ``idle_request_ms_median`` is the whole time of a request
for one token while nothing else runs, engine included.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import click
import msgspec
import psutil
import uvloop
from fake_engine import FakeEngine, fake_info
from http_load import completion_request, connect, run
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import bminf_lite
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.request_builder import GenerationRequest
from bminf_lite.server import http_process
from bminf_lite.server.app import create_app
from bminf_lite.server.client import EngineClient, Generation
from bminf_lite.server.engine_server import EngineServer
from bminf_lite.server.event_stream import EventStream, EventStreamResponse
from bminf_lite.server.security import Guard
from bminf_lite.server.settings import ServerSettings
from bminf_lite.server.state import ServerState
from bminf_lite.text.checkpoint_files import load_tokenizer
from bminf_lite.text.text_stream import TextStream

DEMO = Path(bminf_lite.__file__).parent / "demo_model"
VOCAB_SIZE = 2048
SETTINGS = ServerSettings(("demo",))


def minimal_app(client: EngineClient, settings: ServerSettings) -> ASGIApp:
    """One route, as ``/v1/completions`` with ``stream`` would answer: the least that the real one has to do."""
    server = ServerState(client, settings)
    tokenizer = server.prompts.tokenizer

    async def completions(request: Request) -> Response:
        wanted = msgspec.json.decode(await request.body())
        prompt = server.prompts.encode(wanted["prompt"])
        params = SamplingParams(max_new_tokens=wanted["max_tokens"])
        generation = await client.generate(GenerationRequest(prompt, params, is_streamed=True))
        text = TextStream(tokenizer, (), prompt.before_text(has_grammar=False))
        return EventStreamResponse(generation, lambda stream: write(stream, generation, text))

    app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    return Guard(app, settings.security, settings.limits)


PREFIX = b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1790000000,' + (
    b'"model":"demo","choices":[{"index":0,"text":'
)
MIDDLE = b',"logprobs":null,"finish_reason":null}]}\n\n'


async def write(stream: EventStream, generation: Generation, text: TextStream) -> bytes:
    """Each output as an event."""
    encode = msgspec.json.Encoder().encode
    async for output in generation:
        new = text.push(output.token_ids, output.finish_reason)
        await stream.write(PREFIX + encode(new.text) + MIDDLE)
    return b"data: [DONE]\n\n"


# -- the load client, in a process of its own -------------------------------------------------------------------------


def request(port: int, tokens: int, keep_alive: bool = False) -> bytes:
    """A streamed request for ``tokens`` tokens."""
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": tokens, "stream": True}
    return completion_request(port, body, keep_alive)


async def idle_seconds(port: int, count: int = 100) -> float:
    """The median time of a request for one token, one after another over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        writer.write(request(port, 1, keep_alive=True))
        await reader.readuntil(b"[DONE]\n\n")
        seconds.append(time.perf_counter() - started)
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return sorted(seconds)[count // 2]


async def load(port: int, streams: int, tokens: int) -> dict[str, float]:
    """Open all connections, then send all requests at once, and read them to their ends."""
    idle = await idle_seconds(port)
    exchanges = await connect(port, [request(port, tokens)] * streams)
    started = time.perf_counter()
    await run(exchanges)
    seconds = time.perf_counter() - started
    firsts = sorted(e.first - e.started for e in exchanges)
    return {
        "seconds": seconds,
        "idle_request_seconds": idle,
        "events": sum(e.num_events for e in exchanges),
        "bytes": sum(e.num_bytes for e in exchanges),
        "first_event_seconds_median": firsts[len(firsts) // 2],
        "first_event_seconds_last": firsts[-1],
    }


# -- the engine's process, which starts the others --------------------------------------------------------------------


def spawn(*arguments: object, fds: tuple[int, ...] = (), **options: object) -> subprocess.Popen[str]:
    """This file in another process."""
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(command, pass_fds=fds, text=True, **options)  # type: ignore[call-overload]


def cpu_seconds(*pids: int) -> tuple[float, float]:
    """User and system time of processes so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(t.user for t in times), sum(t.system for t in times)


@click.group(invoke_without_command=True)
@click.option("--streams", default=256, show_default=True, help="Streams at a time.")
@click.option("--rate", default=30_000.0, show_default=True, help="Tokens per second of all streams; 0 is no bound.")
@click.option("--tokens", default=400, show_default=True, help="Tokens of each stream.")
@click.option("--http-workers", default=1, show_default=True, help="HTTP processes.")
@click.option(
    "--app",
    type=click.Choice(["server", "minimal"]),
    default="server",
    show_default=True,
    help="The server's application, or the least that a stream needs.",
)
@click.option("--profile", type=click.Path(), help="Write the HTTP process's cProfile statistics there.")
@click.pass_context
def main(
    context: click.Context, streams: int, rate: float, tokens: int, http_workers: int, app: str, profile: str | None
) -> None:
    """Measure the HTTP path with a fake engine."""
    if context.invoked_subcommand is not None:
        return
    text = (DEMO / "heldout.txt").read_text()[:40_000]
    engine = FakeEngine(
        load_tokenizer(DEMO, VOCAB_SIZE).encode(text, False), streams, streams * 2, streams / rate if rate else 0.0
    )
    server = EngineServer(engine, fake_info(str(DEMO), VOCAB_SIZE))
    server.set_ready()
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    workers = []
    for _ in range(http_workers):
        end = server.connect()
        fds = end.fileno(), listener.fileno()
        workers.append(spawn("http", *fds, app, *([profile] if profile else ()), fds=fds))
        end.close()
    port, pids = listener.getsockname()[1], [worker.pid for worker in workers]
    for _ in range(2):  # the first run fills caches
        user, system = cpu_seconds(*pids)
        own, thread = sum(cpu_seconds(os.getpid())), engine.busy_seconds
        client = spawn("load", port, streams, tokens, stdout=subprocess.PIPE)
        report = json.loads(client.communicate()[0])
    count = streams * tokens
    user, system = (after - before for after, before in zip(cpu_seconds(*pids), (user, system), strict=True))
    own = sum(cpu_seconds(os.getpid())) - own
    server.close()
    click.echo(
        json.dumps(
            {
                "app": app,
                "streams": streams,
                "http_workers": http_workers,
                "wanted_tokens_per_s": rate,
                "tokens_per_s": round(count / report["seconds"]),
                "http_us_per_token": round((user + system) / count * 1e6, 2),
                "http_system_us_per_token": round(system / count * 1e6, 2),
                "engine_process_us_per_token": round(own / count * 1e6, 2),
                "engine_thread_us_per_token": round((engine.busy_seconds - thread) / count * 1e6, 2),
                "client_us_per_token": round(report["client_cpu_seconds"] / count * 1e6, 2),
                "tokens_per_event": round(count / report["events"], 2),
                "idle_request_ms_median": round(report["idle_request_seconds"] * 1e3, 2),
                "first_event_ms_median": round(report["first_event_seconds_median"] * 1e3, 2),
                "first_event_ms_last": round(report["first_event_seconds_last"] * 1e3, 2),
            },
            indent=2,
        )
    )


@main.command("http", hidden=True)
@click.argument("engine_fd", type=int)
@click.argument("listener_fd", type=int)
@click.argument("app")
@click.argument("profile", required=False)
def _http(engine_fd: int, listener_fd: int, app: str, profile: str | None) -> None:
    make = create_app if app == "server" else minimal_app
    if profile is None:
        http_process.run(engine_fd, listener_fd, SETTINGS, make)
        return
    import cProfile

    profiler = cProfile.Profile()
    profiler.enable()
    http_process.run(engine_fd, listener_fd, SETTINGS, make)
    profiler.disable()
    profiler.dump_stats(profile)


@main.command("load", hidden=True)
@click.argument("port", type=int)
@click.argument("streams", type=int)
@click.argument("tokens", type=int)
def _load(port: int, streams: int, tokens: int) -> None:
    report = uvloop.run(load(port, streams, tokens))
    click.echo(json.dumps(report | {"client_cpu_seconds": time.process_time()}))


if __name__ == "__main__":
    main()
