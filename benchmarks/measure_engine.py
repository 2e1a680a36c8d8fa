"""Measure the engine under load on one model with random weights: throughput, steps, times between tokens, equal bits.

    python benchmarks/measure_engine.py [--shape llama-3-8b] [--kv-cache int8] [--context 40960] [PART ...]

Parts, which run in the order given, by default all but those of full size: see :data:`PARTS`. Each prints a line of
JSON when it is done. The model is loaded and warmed up once; for ``decoding`` it is loaded before that once more, and
``bench`` decodes, because the engine takes all memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from measure_grammar import SCHEMA, large_vocabulary

from bminf_lite import backend
from bminf_lite.api import Model
from bminf_lite.bench.model import BenchModel, random_model, read_shape
from bminf_lite.bench.runner import Workload, make_profiler, run_tests
from bminf_lite.bench.serving import Load, run_load
from bminf_lite.engine.core import Launched
from bminf_lite.engine.step import Step, StepResult
from bminf_lite.grammar.matcher import GrammarCompiler

Part = Callable[[Model, "StepLog"], dict[str, Any]]
OPTIONS: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}
IDLE_SECONDS = 0.02
"""Until the steps that were in flight when a request ended are over."""
DECODED = {1: Workload("tg", 256, 512, 1), 16: Workload("tg", 256, 512, 16)}
"""What ``decoding`` compares, by the number of sequences."""
ROUNDS = 4
"""Requests that each caller of ``decoding`` makes, one after another."""


@dataclass
class StepLog:
    """What steps of each kind took: the host to launch and to wait for one, and from the end of the step before."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    launch_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    wait_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    decoded: list[tuple[int, int, float]] = field(default_factory=list)
    """Each step without prompt tokens: its sequences, the sum of their positions, seconds from the step before."""
    last_end: float = 0.0
    is_captured: bool = False

    def watch(self, runner: Any) -> None:
        """Record the steps of a ``ModelRunner`` from now on."""
        launch, build = runner.launch, runner.builder.build

        def build_and_note(step: Step) -> Any:
            plan = build(step)
            self.is_captured = plan.is_captured
            return plan

        def launch_and_log(step: Step) -> Launched:
            start = time.perf_counter()
            launched = launch(step)
            kind = "decode" if not step.pieces else "mixed" if step.num_decodes else "prompts"
            kind += " captured" if self.is_captured else " eager"
            self.counts[kind] += 1
            self.tokens[kind] += step.num_decodes + step.num_prompt_tokens
            self.launch_seconds[kind] += time.perf_counter() - start
            return LoggedStep(launched, step, kind, self)

        runner.launch, runner.builder.build = launch_and_log, build_and_note

    def clear(self) -> None:
        """Forget all steps."""
        for values in (self.counts, self.tokens, self.launch_seconds, self.wait_seconds, self.seconds, self.decoded):
            values.clear()  # type: ignore[attr-defined]
        self.last_end = 0.0

    def table(self) -> dict[str, Any]:
        """For each kind: steps, mean tokens, the host's mean milliseconds to launch and wait, median milliseconds.

        If the host hardly waits, the host limits these steps and not the device.
        """
        return {
            kind: {
                "steps": count,
                "tokens": round(self.tokens[kind] / count, 1),
                "launch_ms": round(1e3 * self.launch_seconds[kind] / count, 3),
                "wait_ms": round(1e3 * self.wait_seconds[kind] / count, 3),
                "median_ms": round(1e3 * float(np.median(self.seconds[kind])), 3) if self.seconds[kind] else None,
            }
            for kind, count in self.counts.items()
        }


@dataclass
class LoggedStep:
    """A launched step that tells its log when it has ended."""

    launched: Launched
    step: Step
    kind: str
    log: StepLog

    @property
    def waits_for_tokens(self) -> bool:
        return self.launched.waits_for_tokens

    def sample(self) -> None:
        self.launched.sample()

    def fetch(self) -> StepResult:
        start = time.perf_counter()
        result, now = self.launched.fetch(), time.perf_counter()
        self.log.wait_seconds[self.kind] += now - start
        if self.log.last_end:
            self.log.seconds[self.kind].append(now - self.log.last_end)
            if not self.step.others:
                positions = self.step.positions
                self.log.decoded.append((len(positions), sum(positions), now - self.log.last_end))
        self.log.last_end = now
        return result


def random_prompts(model: Model, lengths: list[int], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.engine_config.vocab_size, n).tolist() for n in lengths]


def first_token(model: Model, prompt: list[int]) -> float:
    """Seconds from the call to the first token in the caller's hands."""
    start = time.perf_counter()
    with closing(model.stream(prompt, max_new_tokens=2, **OPTIONS)) as pieces:
        next(pieces)
        return time.perf_counter() - start


def offline(requests: int, input_tokens: int, output_tokens: int) -> Part:
    """A load of requests that are all there at once."""

    def run(model: Model, log: StepLog) -> dict[str, Any]:
        before = model.stats().preemptions
        found = run_load(model, Load(requests, input_tokens, output_tokens)).to_dict()
        return found | {"preemptions": model.stats().preemptions - before}

    return run


def same_bits(model: Model, log: StepLog) -> dict[str, Any]:
    """Ragged requests together, again in another order behind cached prefixes, and a few of them alone."""
    rng = np.random.default_rng(3)
    longest = min(1500, model.engine_config.context_length - 100)
    prompts = random_prompts(model, rng.integers(1, longest, 64).tolist(), 4)
    options = {**OPTIONS, "logprobs": 0, "max_new_tokens": 48}

    def bits(results: list[Any]) -> list[Any]:
        return [(r.token_ids, np.array(r.logprobs, np.float32).tobytes()) for r in results]

    together = bits(model.generate(prompts, **options))
    order = rng.permutation(len(prompts))
    shuffled = bits(model.generate([prompts[i] for i in order], **options))
    streamed: list[Any] = [None] * len(prompts)
    for piece in model.stream(prompts, cache_salt="again", **options):  # prompts in smaller pieces
        if piece.result is not None:
            streamed[piece.index] = piece.result
    alone = bits([model.generate(p, cache_salt=str(i), **options) for i, p in enumerate(prompts[:8])])
    return {
        "shuffled and cached": sum(shuffled[k] != together[i] for k, i in enumerate(order)),
        "streamed": sum(a != b for a, b in zip(bits(streamed), together, strict=True)),
        "alone": sum(a != b for a, b in zip(alone, together, strict=False)),
    }


def bench_speeds(bench_model: BenchModel, decoded: Mapping[int, Workload]) -> dict[int, float]:
    """Tokens per second of each workload of :data:`DECODED`, as ``bench -p 0 -n 256 -d 512 -b 1,16`` gives them."""
    measured = run_tests(bench_model, make_profiler(bench_model.ops), decoded.values(), repetitions=5)
    return {count: found.speed for count, found in zip(decoded, measured, strict=True)}


def decoding(speeds: Mapping[int, float], decoded: Mapping[int, Workload] = DECODED) -> Part:
    """Decoding while requests come and go, and the share that this is of the ``speeds`` of ``bench``.

    ``batch`` callers each make requests of ``depth`` prompt tokens, one after another. Counted are the steps without
    prompt tokens in which all of them decode. The first requests are as if they had begun earlier, at equal distances.
    So a counted token has on the average the context that it has in ``bench``: from ``depth`` to ``depth + tokens``.
    """

    async def serve(model: Model, workload: Workload, caller: int) -> None:
        end, phase = workload.depth + workload.tokens, workload.tokens * caller // workload.batch
        lengths = [workload.depth + phase, *[workload.depth] * (ROUNDS - 1)]
        for prompt in random_prompts(model, lengths, 100 * workload.batch + caller):
            await model.agenerate(prompt, max_new_tokens=end - len(prompt) + 1, **OPTIONS)

    async def serve_all(model: Model, workload: Workload) -> None:
        await asyncio.gather(*(serve(model, workload, caller) for caller in range(workload.batch)))

    def run(model: Model, log: StepLog) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for count, workload in decoded.items():
            before = len(log.decoded)
            asyncio.run(serve_all(model, workload))
            steps = [step for step in log.decoded[before:] if step[0] == count]
            tokens = count * len(steps)
            speed = tokens / sum(seconds for *_, seconds in steps)
            found[f"{count} sequences"] = {
                "engine": round(speed, 1),
                "bench": round(speeds[count], 1),
                "ratio": round(speed / speeds[count], 4),
                "steps": len(steps),
                "mean_position": round(sum(positions for _, positions, _ in steps) / tokens, 1),
                "bench_mean_position": workload.depth + (workload.tokens - 1) / 2,
            }
        return found

    return run


def prompts_beside_streams(model: Model, log: StepLog) -> dict[str, Any]:
    """64 streams decode, and a prompt of 4,096 tokens arrives every second: time between tokens, p99 over median."""
    length = min(4096, model.engine_config.context_length // 2)
    streams, ended = random_prompts(model, [100] * 64, 6), threading.Event()
    first_tokens: list[float] = []

    def arrive() -> None:
        for prompt in random_prompts(model, [length] * 60, 7):
            if ended.wait(1.0):
                return
            first_tokens.append(first_token(model, prompt))

    times: dict[int, list[float]] = defaultdict(list)
    pieces = model.stream(streams, max_new_tokens=1200, **OPTIONS)
    arriving = threading.Thread(target=arrive)
    arriving.start()
    for piece in pieces:
        times[piece.index].append(time.perf_counter())
    ended.set()
    arriving.join()
    gaps = 1e3 * np.concatenate([np.diff(t)[64:] for t in times.values()])
    median, p99 = np.percentile(gaps, [50, 99])
    return {
        "median_ms": round(median, 2),
        "p99_ms": round(p99, 2),
        "ratio": round(p99 / median, 2),
        "first_token_ms": [round(1e3 * t, 1) for t in first_tokens[:5]],
    }


def second_turn(model: Model, log: StepLog) -> dict[str, Any]:
    """The time from a call of an idle engine to the first token of 128 and 16 new tokens behind a cached prompt."""
    length = min(30_000, model.engine_config.context_length - 1024)
    (history,) = random_prompts(model, [length], 8)
    model.generate(history, max_new_tokens=1, **OPTIONS)
    found: dict[str, Any] = {"cached": length}
    for count in (128, 16):
        seconds = []
        for turn in range(6):
            (new,) = random_prompts(model, [count], 10 * count + turn)
            time.sleep(IDLE_SECONDS)
            seconds.append(first_token(model, history + new))
        found[f"{count} new_ms"] = round(1e3 * float(np.median(seconds[3:])), 2)
    return found


def grammars(model: Model, log: StepLog) -> dict[str, Any]:
    """Tokens per second of sequences that follow a JSON schema, and of free ones, all drawn at random."""
    vocabulary = large_vocabulary(model.engine_config.vocab_size)
    model.requests._eos_ids = frozenset(vocabulary.eos_ids)
    model.requests.grammars = GrammarCompiler(vocabulary, model.engine_config.vocab_size)
    schema = {"type": "array", "items": SCHEMA, "minItems": 1000}
    found: dict[str, Any] = {}
    for count in (1, 32, 256):
        rates = []
        for kind in ({}, {"json_schema": schema}):
            options = {**OPTIONS, "temperature": 1.0, "seed": 1, "max_new_tokens": 257, **kind}
            prompts = random_prompts(model, [128] * count, 9)
            model.generate(prompts, **{**options, "max_new_tokens": 3})
            seconds = []
            for _ in range(3):
                results = model.generate(prompts, **options)
                assert {len(r.token_ids) for r in results} == {257}
                seconds.append(max(r.timings.decode_seconds for r in results))
            rates.append(count * 256 / float(np.median(seconds)))
        free, constrained = rates
        found[f"{count} sequences"] = {
            "free": round(free, 1),
            "constrained": round(constrained, 1),
            "ratio": round(constrained / free, 3),
        }
    return found


PARTS: dict[str, Part] = {
    "bits": same_bits,
    "turn": second_turn,
    "streams": prompts_beside_streams,
    "grammars": grammars,
    "768 of 128/128": offline(768, 128, 128),
    "4096 of 128/128": offline(4096, 128, 128),
    "512 of 2048/128": offline(512, 2048, 128),
    "1024 of 1000/300": offline(1024, 1000, 300),
    "1024 of 128/512": offline(1024, 128, 512),
}
FULL_PARTS: dict[str, Part] = {
    "2048 of 128/2048": offline(2048, 128, 2048),
    "2048 of 1000/1000": offline(2048, 1000, 1000),
    "1024 of 2048/2048": offline(1024, 2048, 2048),
    "1024 of 2048/128": offline(1024, 2048, 128),
}
"""The rows of TensorRT-LLM's published table, minutes each."""


def model_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments that say which model is measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache", default="int8", choices=("fp16", "int8"))
    parser.add_argument("--context", type=int, default=40960, help="positions of the model (default: %(default)s)")
    return parser


def main(arguments: list[str] | None = None, decoded: Mapping[int, Workload] = DECODED) -> None:
    parser = model_parser(__doc__)
    parser.add_argument("--max-batch", type=int)
    names = ["decoding", *PARTS, *FULL_PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(names)}")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts).difference(names):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen: list[str] = options.parts or ["decoding", *PARTS]
    parts = PARTS | FULL_PARTS
    config = read_shape(options.shape) | {"max_position_embeddings": options.context}
    if "decoding" in chosen:
        with closing(backend.create(options.device)) as ops:
            bench_model = random_model(options.shape, config, ops, options.kv_cache, options.max_batch)
            parts["decoding"] = decoding(bench_speeds(bench_model, decoded), decoded)
            del bench_model
    start = time.perf_counter()
    ops = backend.create(options.device)
    found = random_model(options.shape, config, ops, options.kv_cache, options.max_batch)
    engine_config = replace(found.engine_config, max_queue=1 << 20)
    with Model(found.network, engine_config) as model:
        loaded = time.perf_counter()
        model.warm_up()
        warm = time.perf_counter()
        runner = model._engine._runner
        assert runner is not None
        captured = len(runner.executors[0].captured)  # type: ignore[attr-defined]
        log = StepLog()
        log.watch(runner)
        config_facts = {"max_num_seqs": engine_config.max_num_seqs, "num_blocks": engine_config.num_blocks}
        seconds = {"load_s": round(loaded - start, 1), "warm_up_s": round(warm - loaded, 1)}
        print(json.dumps({"device": ops.describe(), **seconds, "captured": captured, **config_facts}), flush=True)
        for name in chosen:
            log.clear()
            begin = time.perf_counter()
            result = parts[name](model, log)
            result |= {"part_s": round(time.perf_counter() - begin, 1), "steps": log.table()}
            print(json.dumps({"part": name, **result}), flush=True)
        added = len(runner.executors[0].captured) - captured  # type: ignore[attr-defined]
        print(json.dumps({"captured after the warm-up": added, "memory": ops.memory()}), flush=True)


if __name__ == "__main__":
    main()
