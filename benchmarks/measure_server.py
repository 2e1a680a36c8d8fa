"""Measure what a server gives over HTTP beside what its engine gives by itself, on a model with random weights.

    python benchmarks/measure_server.py [--shape llama-3-8b] [--device cuda] [--kv-cache int8] [--only http] [CASE ...]
    python benchmarks/measure_server.py --runs 1 --seconds 200 rows > results.jsonl

The server's processes are those of ``bminf_lite.serve``. Its engine is measured in the process that it serves from,
between the loads over HTTP: requests go to it directly, and their tokens are not read. So both have the same model and
the same captured steps. Load clients have processes of their own. Prompts are random token ids, the same for both, with
other salts, so that no prompt is in the cache. A CASE is the beginning of names of :data:`CASES` (by default all of
them) and :data:`ROWS`, ``rows`` for all of these, or any other load of streams as ``N of INPUTS/OUTPUTS``. Each case is
measured in turn with the engine and over HTTP, or on one side alone (``--only``), ``--runs`` times, after shorter runs
of each kind; with ``--whole`` also with requests to the engine that are not streamed. Each run prints a line of JSON
when it is over, and each case another one with medians and ratios:

- ``tokens_per_s``: from the first request to the last token, of all; ``decode_tokens_per_s``: from each first token.
- ``done``: of a run that ``--seconds`` has cut, the share of its tokens that came. A ratio compares what came.
- ``first_token_ms``: from the sending of a request to its first token, the median of all requests.
- ``step_ms``: the median time between two decode steps of the engine; ``launch_ms``: of it, for the host's launch.
- ``cpu_us``: processor time per token, of the engine's process, of the HTTP processes and of the load clients.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import uvloop
from http_load import Exchange, completion_request, connect, run
from measure_engine import StepLog, model_parser
from measure_grammar import END, SCHEMA, large_vocabulary

import bminf_lite
from bminf_lite import backend
from bminf_lite.api import Model
from bminf_lite.bench.model import random_model, read_shape
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.grammar import Grammar
from bminf_lite.request_builder import GenerationRequest
from bminf_lite.server.limits import Limits

NAME = "random"
ITEMS = {"type": "array", "items": SCHEMA, "minItems": 1000}
"""A schema whose texts do not end before a request does."""
IDLE_SECONDS = 0.02
"""Between two requests that are sent one at a time."""


@dataclass(frozen=True)
class Load:
    """``streams`` requests of ``inputs`` and ``outputs`` tokens, all at once or ``one_at_a_time``.

    ``kind`` is ``greedy``, ``drawn`` at temperature 1, or ``schema``: drawn, and JSON of a schema. After ``seconds``
    a request ends with the tokens that it has.
    """

    streams: int
    inputs: int
    outputs: int
    kind: str = "greedy"
    is_streamed: bool = True
    one_at_a_time: bool = False
    seconds: float | None = None
    seed: int = 0
    salt: str = ""

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random token ids."""
        ids = np.random.default_rng(self.seed).integers(0, vocab_size, (self.streams, self.inputs))
        found: list[list[int]] = ids.tolist()
        return found

    @property
    def temperature(self) -> float:
        """The temperature of sampling."""
        return 0.0 if self.kind == "greedy" else 1.0

    def body(self, prompt: list[int]) -> dict[str, Any]:
        """The request over HTTP."""
        body: dict[str, Any] = {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": self.outputs,
            "temperature": self.temperature,
            "ignore_eos": True,
            "seed": 1,
            "cache_salt": self.salt,
            "stream": self.is_streamed,
        }
        if self.seconds is not None:
            body["deadline"] = self.seconds
        if self.is_streamed:
            body["stream_options"] = {"include_usage": True}
        if self.kind == "schema":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "items", "schema": ITEMS}}
        return body


CASES = {
    "first token, idle": Load(20, 128, 1, one_at_a_time=True),
    "1 stream of 128/128": Load(1, 128, 128),
    "1 stream of 512/512": Load(1, 512, 512),
    "32 streams of 128/128": Load(32, 128, 128),
    "32 streams of 128/256, drawn": Load(32, 128, 256, "drawn"),
    "32 streams of 128/256, schema": Load(32, 128, 256, "schema"),
    "256 streams of 128/128": Load(256, 128, 128),
    "256 streams of 128/256, drawn": Load(256, 128, 256, "drawn"),
    "256 streams of 128/256, schema": Load(256, 128, 256, "schema"),
    "768 streams of 128/128": Load(768, 128, 128),
    "768 whole answers of 128/128": Load(768, 128, 128, is_streamed=False),
}
ROWS = {
    f"{streams} of {inputs}/{outputs}": Load(streams, inputs, outputs)
    for streams, inputs, outputs in (
        (4096, 128, 128), (2048, 128, 2048), (2048, 1000, 1000), (1024, 2048, 2048), (1024, 2048, 128),
    )
}  # fmt: skip
"""The rows of TensorRT-LLM's published table, streamed: up to minutes each, and left out by default."""
ALL_ROWS = "rows"
MOST = 1 << 16
"""Requests that an HTTP process of the server takes at a time, so that one of them can have all."""


def find_cases(wanted: str) -> dict[str, Load]:
    """The load ``N of INPUTS/OUTPUTS``, all rows, or the cases whose name begins so. ``ValueError`` for none."""
    if wanted == ALL_ROWS:
        return ROWS
    if numbers := re.fullmatch(r"(\d+) of (\d+)/(\d+)", wanted):
        return {wanted: Load(*map(int, numbers.groups()))}
    found = {name: load for name, load in (CASES | ROWS).items() if name.startswith(wanted)}
    if not found:
        raise ValueError(f"{wanted!r} is neither N of INPUTS/OUTPUTS nor the beginning of a case")
    return found


@dataclass
class Measured:
    """What one run of a load took; times of ``time.perf_counter``."""

    tokens: int
    started: list[float]
    first: list[float]
    ended: list[float]

    def __add__(self, other: Measured) -> Measured:
        """Both at the same time."""
        lists = (a + b for a, b in zip(self.times, other.times, strict=True))
        return Measured(self.tokens + other.tokens, *lists)

    @property
    def times(self) -> tuple[list[float], list[float], list[float]]:
        return self.started, self.first, self.ended

    def summary(self, load: Load) -> dict[str, float]:
        """The numbers of a run; those of whole answers have no first token, and of a run that was cut only a rate."""
        expected = load.streams * load.outputs
        found = {"tokens_per_s": self.tokens / (max(self.ended) - min(self.started))}
        if self.tokens != expected:
            if load.seconds is None:
                raise RuntimeError(f"{self.tokens:,} tokens came, not {expected:,}")
            found["done"] = self.tokens / expected
        elif all(self.first):
            waits = [first - start for first, start in zip(self.first, self.started, strict=True)]
            found["first_token_ms"] = 1e3 * median(waits)
            if load.outputs > 1:
                decode = max(end - first for end, first in zip(self.ended, self.first, strict=True))
                found["decode_tokens_per_s"] = load.streams * (load.outputs - 1) / decode
        return found


# -- the engine's process, which also serves --------------------------------------------------------------------------


class OwnLoad:
    """Sends a load to the engine directly."""

    def __init__(self, model: Model):
        self._model = model

    def run(self, load: Load) -> Measured:
        """Run it."""
        measured = Measured(0, [], [], [])
        prompts = load.prompts(self._model.engine_config.vocab_size)
        requests = self._model.requests.build(*(self._request(load, prompt) for prompt in prompts))
        for batch in [[r] for r in requests] if load.one_at_a_time else [requests]:
            left = threading.Semaphore(0)

            def on_update(request: Request, left: threading.Semaphore = left) -> None:
                if request.finish_reason is not None:
                    left.release()

            for request in batch:
                request.on_update = on_update
            started = time.perf_counter()
            for request in batch:
                request.deadline = None if load.seconds is None else started + load.seconds
            self._model.engine.submit(batch)
            for _ in batch:
                left.acquire()
            measured += Measured(
                sum(len(r.output_token_ids) for r in batch),
                [started] * len(batch),
                [r.first_token_time for r in batch],
                [r.last_token_time for r in batch],
            )
            if load.one_at_a_time:
                time.sleep(IDLE_SECONDS)
        return measured

    def _request(self, load: Load, prompt: list[int]) -> GenerationRequest:
        return GenerationRequest(
            self._model.encode(prompt),
            SamplingParams(max_new_tokens=load.outputs, temperature=load.temperature, ignore_eos=True, seed=1),
            cache_salt=load.salt,
            is_streamed=load.is_streamed,
            grammar=Grammar.json_schema(ITEMS) if load.kind == "schema" else None,
        )


def serve_engine(shape: str, device: str, kv_cache: str, context: int, http_workers: int | None, folder: str) -> None:
    """Serve a model, and obey the lines of standard input: a load to run, or null for the log of steps."""
    config = read_shape(shape) | {"max_position_embeddings": context}
    ops = backend.create(device)
    found = random_model(shape, config, ops, kv_cache)
    with Model(found.network, replace(found.engine_config, max_queue=1 << 20), Path(folder)) as model:
        log = StepLog()

        def obey() -> None:
            runner = model.engine._runner
            assert runner is not None
            log.watch(runner)
            own = OwnLoad(model)
            for line in sys.stdin:
                value = json.loads(line)
                if value is None:
                    tell(log.table())
                    log.clear()
                else:
                    tell(asdict(own.run(Load(**value))))
            os.kill(os.getpid(), signal.SIGTERM)

        def on_message(message: str) -> None:
            url = message.partition(" is served at ")[2]
            if url:
                facts = {"device": ops.describe(), "max_num_seqs": model.engine_config.max_num_seqs}
                tell({"port": int(url.rpartition(":")[2]), "facts": facts})
                threading.Thread(target=obey, daemon=True).start()
            else:
                print(message, file=sys.stderr, flush=True)

        limits = Limits(requests=MOST, connections=MOST)
        bminf_lite.serve(
            model, port=0, served_model_name=NAME, http_workers=http_workers, limits=limits, log=on_message
        )


def tell(value: Any) -> None:
    """Print a line: the answer to the process that started this one, or a result."""
    print(json.dumps(value), flush=True)


# -- a load client's process ------------------------------------------------------------------------------------------


def load_client(port: int, vocab_size: int) -> None:
    """Send the share of a load that a line of standard input names, when the next line comes."""
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))

    async def exchange(load: Load, share: int, shares: int) -> list[Exchange]:
        prompts = load.prompts(vocab_size)[share::shares]
        exchanges = await connect(port, [completion_request(port, load.body(p)) for p in prompts])
        tell("connected")
        sys.stdin.readline()
        for batch in [[e] for e in exchanges] if load.one_at_a_time else [exchanges]:
            await run(batch)
            if load.one_at_a_time:
                time.sleep(IDLE_SECONDS)
        return exchanges

    while line := sys.stdin.readline():
        load, share, shares = json.loads(line)
        found = uvloop.run(exchange(Load(**load), share, shares))
        tell(
            asdict(
                Measured(
                    sum(e.num_tokens for e in found),
                    [e.started for e in found],
                    [e.first for e in found],
                    [e.ended for e in found],
                )
            )
        )


# -- the process that starts the others -------------------------------------------------------------------------------


class Child:
    """This file in another process: lines of JSON in, lines of JSON out."""

    def __init__(self, role: str, arguments: Sequence[Any]):
        command = [sys.executable, __file__, role, json.dumps(arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process has ended with {self.process.wait()}: {self.process.args}")
        return json.loads(line)

    def ask(self, value: Any) -> Any:
        self.send(value)
        return self.receive()

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


SIDES = ("engine", "http")
WHOLE = "engine, not streamed"


class Bench:
    """The processes of a measurement."""

    def __init__(self, engine: Child, clients: Sequence[Child]):
        self._engine = engine
        self._clients = clients
        self._salt = 0
        parent = psutil.Process(engine.process.pid)
        self._processes = {
            "engine": [parent],
            "http": [p for p in parent.children() if "http_process" in " ".join(p.cmdline())],
            "clients": [psutil.Process(c.process.pid) for c in clients],
        }
        self.num_http = len(self._processes["http"])

    def measure(self, case: str, load: Load, runs: int, sides: Sequence[str] = SIDES) -> dict[str, Any]:
        """A load's numbers: medians of some runs, after shorter ones. Prints those of each run."""
        few = replace(load, outputs=min(load.outputs, 4), streams=min(load.streams, 64))
        for _ in range(min(runs, 2)):
            for side in sides:
                self._run(side, few)
        results: list[dict[str, dict[str, float]]] = []
        for number in range(runs):
            results.append({})
            for side in sides:
                results[-1][side] = self._run(side, load)
                tell({"case": case, "run": number, side: _medians([results[-1][side]])})
        report: dict[str, Any] = {"case": case, **{s: _medians([result[s] for result in results]) for s in sides}}
        if not {"engine", "http"} <= report.keys():
            return report
        own, http = report["engine"], report["http"]
        for name in ("tokens_per_s", "decode_tokens_per_s"):
            if name in own and name in http and not load.one_at_a_time:
                report[f"{name}, of the engine's"] = round(http[name] / own[name], 4)
        if "first_token_ms" in own and "first_token_ms" in http:
            report["first_token_ms, added"] = round(http["first_token_ms"] - own["first_token_ms"], 3)
        if WHOLE in report:
            rate = http["tokens_per_s"] / report[WHOLE]["tokens_per_s"]
            report[f"tokens_per_s, of the {WHOLE}'s"] = round(rate, 4)
        return report

    def _run(self, side: str, load: Load) -> dict[str, float]:
        if side == WHOLE:
            load = replace(load, is_streamed=False)
        return self._over_http(load) if side == "http" else self._own(load)

    def _own(self, load: Load) -> dict[str, float]:
        self._steps()
        measured = Measured(**self._engine.ask(asdict(self._new(load))))
        return measured.summary(load) | self._steps()

    def _over_http(self, load: Load) -> dict[str, float]:
        clients = self._clients[: 1 if load.one_at_a_time else load.streams]
        fields = asdict(self._new(load))
        for share, client in enumerate(clients):
            client.send([fields, share, len(clients)])
        for client in clients:
            client.receive()
        self._steps()
        before = self._cpu_seconds()
        for client in clients:
            client.send("go")
        measured = Measured(0, [], [], [])
        for client in clients:
            measured += Measured(**client.receive())
        seconds = {name: after - before[name] for name, after in self._cpu_seconds().items()}
        found = measured.summary(load) | self._steps()
        return found | {f"{name}_cpu_us": 1e6 * value / measured.tokens for name, value in seconds.items()}

    def _new(self, load: Load) -> Load:
        """The load with prompts that are not in the cache."""
        self._salt += 1
        return replace(load, salt=str(self._salt))

    def _steps(self) -> dict[str, float]:
        """The engine's decode steps since the last call."""
        kinds = [value for kind, value in self._engine.ask(None).items() if kind.startswith("decode")]
        if not kinds:
            return {}
        most = max(kinds, key=lambda value: value["steps"])
        return {"step_ms": most["median_ms"], "launch_ms": most["launch_ms"]}

    def _cpu_seconds(self) -> dict[str, float]:
        return {name: sum(sum(p.cpu_times()[:2]) for p in processes) for name, processes in self._processes.items()}


def _medians(results: Sequence[dict[str, float]]) -> dict[str, float]:
    names = [name for name in results[0] if all(result.get(name) is not None for result in results)]
    return {name: round(median(result[name] for result in results), 4) for name in names}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """The files of a tokenizer for a vocabulary of any size, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").is_file():
        (folder / "tokenizer.json").write_text(large_vocabulary(vocab_size).to_json())
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def main() -> None:
    parser = model_parser(__doc__)
    parser.add_argument("--http-workers", type=int, help="HTTP processes (default: those that a server starts)")
    parser.add_argument("--clients", type=int, default=4, help="processes of the load client (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="of each case (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="cut each run after SECONDS: its requests end")
    parser.add_argument("--only", choices=SIDES, help="measure one of them (default: both)")
    parser.add_argument("--whole", action="store_true", help="also measure the engine with whole answers")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="keep the vocabulary, which takes seconds")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join([*CASES, *ROWS, ALL_ROWS])}")
    options = parser.parse_args()
    try:
        cases = {name: load for case in options.cases for name, load in find_cases(case).items()} or CASES
    except ValueError as error:
        parser.error(str(error))
    sides = [side for side in SIDES if options.only in (None, side)] + [WHOLE] * options.whole
    vocab_size = read_shape(options.shape)["vocab_size"]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as children:
        folder = options.tokenizer or Path(scratch)
        write_tokenizer(folder, vocab_size)
        served = (options.shape, options.device, options.kv_cache, options.context, options.http_workers)
        engine = children.enter_context(closing(Child("engine", [*served, str(folder)])))
        ready = engine.receive()
        clients = [
            children.enter_context(closing(Child("load", [ready["port"], vocab_size]))) for _ in range(options.clients)
        ]
        bench = Bench(engine, clients)
        tell({**ready["facts"], "http processes": bench.num_http})
        for name, load in cases.items():
            tell(bench.measure(name, replace(load, seconds=options.seconds), options.runs, sides))


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        serve_engine(*json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["load"]:
        load_client(*json.loads(sys.argv[2]))
    else:
        main()
