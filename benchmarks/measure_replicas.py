"""Measure replicas behind one server, and a batch beside its engine, on a checkpoint with random weights.

    python benchmarks/measure_replicas.py [--shape llama-3-8b] --folder /dev/shm/measure [--replicas 1,2] [--runs 3]
    python benchmarks/measure_replicas.py --shape llama-tiny --folder OUT --device cpu --requests 64 --tokens 16

``served``: ``bminf-lite serve --replicas N`` for each N of ``--replicas`` in turn. All requests are sent at once by
processes of their own, each over its own connection. Prompts are random token ids, with another salt in each run, so
that none is in the cache; a shorter run comes before those that count. ``batch``: the rows of a file of the same
prompts, answered by what ``bminf-lite batch`` runs, beside the same requests given to the same loaded model at once, as
``bench --offline`` does, each ``--runs`` times in turn. The time of a batch is that from the model that is loaded and
warm to the last block's file. The process of the rows prepares itself meanwhile, as it does while a model is loaded.

Each run prints a line of JSON with the tokens per second of all requests, and each part the ratio of medians; a run of
``served`` also how many requests each replica has answered, and the microseconds of processor time that a request took
in the engines' processes, the HTTP processes of all replicas, and the front processes. The folder is removed at the
end, unless it is kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import uvloop
from http_load import Exchange, completion_request, connect, run
from measure_loading import make_checkpoint
from measure_server import write_tokenizer

from bminf_lite.api import Model
from bminf_lite.batch.job import BatchJob, LoadOptions
from bminf_lite.batch.local import plan_input, run_local
from bminf_lite.batch.runner import Counts
from bminf_lite.batch.storage import LocalStorage
from bminf_lite.bench.model import read_shape
from bminf_lite.bench.serving import Load, run_load
from bminf_lite.bench.serving import warm_up as warm_up_load

NAME = "random"
SERVE = "import sys; from bminf_lite.cli import main; main(sys.argv[1:])"
READY_SECONDS = 300
ENDED = "vllm:request_success_total{"
METRICS_SECONDS = 0.5
"""After a run, until all of its requests are counted."""


@dataclass(frozen=True)
class Requests:
    """``count`` requests of ``inputs`` prompt tokens, which are random ids, and ``outputs`` new tokens."""

    count: int
    inputs: int
    outputs: int
    vocab_size: int

    def bodies(self, salt: str | None = None) -> list[dict[str, Any]]:
        ids = np.random.default_rng(0).integers(0, self.vocab_size, (self.count, self.inputs)).tolist()
        salted = {} if salt is None else {"cache_salt": salt}
        fixed = {"max_tokens": self.outputs, "ignore_eos": True, "temperature": 0.0} | salted
        return [{"prompt": prompt} | fixed for prompt in ids]


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


# -- replicas behind a server -----------------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, replicas: int, options: argparse.Namespace) -> Iterator[tuple[int, psutil.Process]]:
    """A server whose replicas are all ready: its port and its process."""
    arguments = ["serve", str(folder), "--port", "0", "--served-model-name", NAME, "--replicas", str(replicas)]
    arguments += ["--device", options.device, "--kv-cache", options.kv_cache, "--max-queue", str(1 << 16)]
    arguments += ["--limit", f"connections={1 << 16}", "--limit", f"requests={1 << 16}"]
    server = subprocess.Popen([sys.executable, "-c", SERVE, *arguments], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    lines: list[str] = []
    address = re.compile(rf"{'replicas are' if replicas > 1 else 'is'} served at http://[^ ]*:(\d+)")
    try:
        port, ready = 0, 0  # each replica of several says where it is served, too
        for line in server.stderr:
            lines.append(line)
            ready += bool(re.search(r"replica \d+ is ready", line))
            if found := address.search(line):
                port = int(found[1])
            if port and ready >= (replicas if replicas > 1 else 0):
                break
        else:
            raise RuntimeError(f"the server has ended: {''.join(lines)}")
        threading.Thread(target=server.stderr.read, daemon=True).start()  # so that it can go on writing
        deadline = time.monotonic() + READY_SECONDS
        while not is_ready(port):
            if time.monotonic() > deadline or server.poll() is not None:
                raise RuntimeError(f"the server is not ready: {''.join(lines)}")
            time.sleep(0.1)
        yield port, psutil.Process(server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def answered(port: int, replicas: int) -> list[int]:
    """How many completions each replica has ended, by its metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(ENDED)]
    own = ([line for line in lines if f'engine="{number}"' in line] for number in range(replicas))
    return [int(sum(float(line.rpartition(" ")[2]) for line in found)) for found in own]


def processor_seconds(server: psutil.Process) -> dict[str, float]:
    """What the processes of a server have used so far: ``engines``, ``http`` for each of them, and ``front``."""
    seconds = {"engines": 0.0, "http": 0.0, "front": 0.0}
    for process in (server, *server.children(recursive=True)):
        command = " ".join(process.cmdline())
        kind = "http" if "http_process" in command else "front" if "server.front" in command else "engines"
        times = process.cpu_times()
        seconds[kind] += times.user + times.system
    return seconds


def send_share(port: int, bodies: Sequence[dict[str, Any]], parent: Connection) -> None:
    """Connect for each body, say so, and send them all at the parent's word. The answer: tokens and the last end."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def exchange() -> list[Exchange]:
        exchanges = await connect(port, [completion_request(port, {"model": NAME, **body}) for body in bodies])
        parent.send("connected")
        parent.recv()
        await run(exchanges)
        return exchanges

    found = uvloop.run(exchange())
    parent.send((sum(e.num_tokens for e in found), min(e.started for e in found), max(e.ended for e in found)))


def tokens_per_second(port: int, requests: Requests, options: argparse.Namespace, salt: str) -> float:
    """Those of all requests, sent at once over HTTP by some processes."""
    spawned, clients = multiprocessing.get_context("spawn"), options.clients
    bodies, pairs = requests.bodies(salt), [spawned.Pipe() for _ in range(clients)]
    if options.stream:
        bodies = [{**body, "stream": True, "stream_options": {"include_usage": True}} for body in bodies]
    processes = [
        spawned.Process(target=send_share, args=(port, bodies[share::clients], own))
        for share, (_, own) in enumerate(pairs)
    ]
    for process in processes:
        process.start()
    for ours, _ in pairs:
        ours.recv()
    for ours, _ in pairs:
        ours.send("go")
    tokens, started, ended = zip(*(ours.recv() for ours, _ in pairs), strict=True)
    for process in processes:
        process.join()
    return float(sum(tokens) / (max(ended) - min(started)))


def measure_served(folder: Path, requests: Requests, options: argparse.Namespace) -> None:
    medians: dict[int, float] = {}
    short = replace(requests, count=min(requests.count, 512), outputs=min(requests.outputs, 4))
    for replicas in map(int, options.replicas.split(",")):
        rates = []
        with serving(folder, replicas, options) as (port, server):
            tokens_per_second(port, short, options, f"{replicas}")
            for number in range(options.runs):
                time.sleep(METRICS_SECONDS)
                before, used = answered(port, replicas), processor_seconds(server)
                rates.append(tokens_per_second(port, requests, options, f"{replicas}-{number}"))
                each = {k: round(1e6 * (v - used[k]) / requests.count) for k, v in processor_seconds(server).items()}
                time.sleep(METRICS_SECONDS)
                shares = [after - b for after, b in zip(answered(port, replicas), before, strict=True)]
                rate = round(rates[-1], 1)
                say(part="served", replicas=replicas, tokens_per_second=rate, answered=shares, us_per_request=each)
        medians[replicas] = median(rates)
    first, *others = medians
    for other in others:
        say(part="served", replicas=other, over=first, ratio=round(medians[other] / medians[first], 4))


# -- a batch beside its engine ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedJob(BatchJob):
    """A batch whose model is there already, and stays. ``beside`` is called where a model would be warmed up."""

    loaded: Model | None = None
    beside: Callable[[], None] = lambda: None

    @contextmanager
    def open_model(self) -> Iterator[Model]:  # type: ignore[override]
        assert self.loaded is not None
        yield self.loaded

    def warm_up(self, model: Model) -> None:
        self.beside()


def measure_batch(folder: Path, requests: Requests, options: argparse.Namespace) -> None:
    load = Load(requests.count, requests.inputs, requests.outputs)
    rates: dict[str, list[float]] = {"offline": [], "batch": []}
    job = BatchJob(str(folder), LoadOptions(options.device, kv_cache=options.kv_cache))
    with job.open_model() as model:
        warm_up_load(model, load)
        for number in range(options.runs):
            started, ended, tokens = 0.0, 0.0, 0

            def offline() -> None:
                nonlocal started
                rates["offline"].append(run_load(model, load).output_rate)
                started = time.perf_counter()

            def told(counts: Counts) -> None:
                nonlocal ended, tokens
                ended, tokens = time.perf_counter(), tokens + counts.new_tokens

            rows = folder.parent / "rows.jsonl"
            rows.write_text("".join(json.dumps(body) + "\n" for body in requests.bodies(f"batch-{number}")))
            timed = TimedJob(job.model, job.load, loaded=model, beside=offline)
            plan, wanted = plan_input(LocalStorage(), str(rows), timed)
            counts = run_local(wanted, plan, folder.parent / f"answers-{number}.jsonl", told)
            rates["batch"].append(tokens / (ended - started))
            say(part="batch", **{kind: round(own[-1], 1) for kind, own in rates.items()}, errors=counts.errors)
    say(part="batch", ratio=round(median(rates["batch"]) / median(rates["offline"]), 4))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b", help="a name as in bench --shape")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-cache", default="fp16")
    parser.add_argument("--parts", default="served,batch")
    parser.add_argument("--replicas", default="1,2", help="how many, or several numbers, which are served in turn")
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=128, help="of a prompt, and as many new ones")
    parser.add_argument("--clients", type=int, default=4, help="processes that send requests")
    parser.add_argument("--keep", action="store_true", help="keep the folder, and use the checkpoint that is there")
    parser.add_argument("--stream", action="store_true", help="served answers are streamed")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(arguments)
    config = read_shape(options.shape)
    requests = Requests(options.requests, options.tokens, options.tokens, config["vocab_size"])
    checkpoint = options.folder / NAME
    os.makedirs(options.folder, exist_ok=options.keep)
    try:
        if not checkpoint.exists():
            make_checkpoint(checkpoint, options.shape)
            write_tokenizer(checkpoint, config["vocab_size"])
        parts = options.parts.split(",")
        if "served" in parts:
            measure_served(checkpoint, requests, options)
        if "batch" in parts:
            measure_batch(checkpoint, requests, options)
    finally:
        if not options.keep:
            shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
