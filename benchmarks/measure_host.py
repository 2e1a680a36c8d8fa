"""Measure the processor time that the host spends in steps of many sequences, with a device that computes nothing.

    python benchmarks/measure_host.py [--requests 4096] [--sequences 1024] [--tokens 128] [--step-ms 20]

All requests are there at once, with ``--tokens`` prompt tokens and as many new ones. Steps are captured sizes, as on a
GPU. The time is that of the engine's thread, so other load on the machine counts little. A GPU does not wait for the
host if these times are well below those of its steps.

The same requests then go through ``Model.generate`` with a device that takes ``--step-ms`` for each step. What it took
longer than these steps, the host did not hide: among it, what the caller's thread does while the engine's waits.

At last a stream of 128 tokens behind 30,000 cached ones begins, again and again, after a pause: the second turn of a
chat. What its first token takes longer than its step is the host's, wake-ups of threads and cold caches included.

Then one sequence checks seven drafts in each step, all of them wrong. A GPU waits from a step's end until the next one
is built and launched, so its parts are printed; what a GPU's driver takes is not in them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np

from bminf_lite.api import Model
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.values import BLOCK_SIZE
from bminf_lite.bench.serving import Load, run_load
from bminf_lite.engine.block_manager import BlockManager
from bminf_lite.engine.config import EngineConfig
from bminf_lite.engine.drafts import Drafter
from bminf_lite.engine.model_runner import ModelRunner
from bminf_lite.engine.network import Network
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.engine.scheduler import Scheduler
from bminf_lite.engine.speculative import SpeculativeConfig
from bminf_lite.layers.cache import CacheLayout
from bminf_lite.request_builder import GenerationRequest, RequestBuilder
from bminf_lite.text.prompts import EncodedPrompt, PromptEncoder

VOCAB = 1000
LARGE_VOCAB = 128_256
PAUSE_SECONDS = 0.03


class NoLogits:
    """Logits that are never read."""

    def __getitem__(self, rows: object) -> NoLogits:
        return self


class NoDevice(CpuBackend):
    """A backend whose models compute nothing, in ``step_seconds``, and choose the same token always."""

    decode_sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    mixed_sizes = tuple((decodes, tokens) for tokens in (128, 256, 512) for decodes in (0, 16, 64))
    max_steps_in_flight = 1
    step_seconds = 0.0
    busy_seconds = 0.0
    _free_at = 0.0

    def capture(self, work: Callable[[], Any]) -> Callable[[], Any]:
        return NoLogits

    def sample(self, logits: Any, sampler: Any) -> Any:
        self._free_at = max(self._free_at, time.perf_counter()) + self.step_seconds
        self.busy_seconds += self.step_seconds
        return np.full((2, len(sampler.rows)), 7, np.int32)

    def fetch(self, x: Any) -> Callable[[], np.ndarray]:
        end = self._free_at

        def wait() -> np.ndarray:
            time.sleep(max(end - time.perf_counter(), 0.0))
            return cast(np.ndarray, x)

        return wait

    def write_step(self, target: Any, values: Any, num_tokens: int, sampler: Any) -> None:
        pass


class NoNetwork:
    """A model that computes nothing."""

    def __init__(self) -> None:
        self.ops = NoDevice()

    def __call__(self, batch: Any, cache: Any, all_logits: bool = False) -> Any:
        return NoLogits()


def measure_turns(cached: int, new: int, step_seconds: float, turns: int = 60) -> list[float]:
    """Seconds from a call to its first token, without its step, each after a pause; the first ten are left out."""
    network, rng = NoNetwork(), np.random.default_rng(0)
    blocks = 4 * (cached + new) // BLOCK_SIZE + 64
    config = EngineConfig(cached + 2048, LARGE_VOCAB, CacheLayout.uniform(1, kv_heads=1, head_dim=2), (blocks,), 0, 16)
    seconds = []
    with Model(cast(Network, network), config, eos_ids=frozenset()) as model:
        model.warm_up()
        history = rng.integers(0, LARGE_VOCAB, cached).tolist()
        model.generate(history, max_new_tokens=1)
        network.ops.step_seconds = step_seconds
        for _ in range(turns):
            prompt = history + rng.integers(0, LARGE_VOCAB, new).tolist()
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            with closing(model.stream(prompt, max_new_tokens=2)) as pieces:
                next(pieces)
                seconds.append(time.perf_counter() - start - step_seconds)
    return seconds[10:]


def make_config(sequences: int, tokens: int) -> EngineConfig:
    """An engine with room for ``sequences`` of ``tokens`` prompt tokens and as many new ones."""
    shape, blocks = CacheLayout.uniform(1, kv_heads=1, head_dim=2), 1 + sequences * (2 * tokens // BLOCK_SIZE + 2)
    return EngineConfig(8192, VOCAB, shape, (blocks,), 0, sequences, max_num_batched_tokens=2048)


def measure_calls(requests: int, sequences: int, tokens: int, step_seconds: float) -> tuple[float, float]:
    """Seconds of ``requests`` in one call of ``Model.generate``, and of their steps alone."""
    network = NoNetwork()
    with Model(cast(Network, network), make_config(sequences, tokens), eos_ids=frozenset()) as model:
        model.warm_up()
        network.ops.step_seconds, network.ops.busy_seconds = step_seconds, 0.0
        result = run_load(model, Load(requests, tokens, tokens))
    return result.seconds, network.ops.busy_seconds


def measure(requests: int, sequences: int, tokens: int) -> tuple[list[float], list[float]]:
    """Seconds of the steps that decode alone, and of those with prompts, while ``requests`` are served."""
    config = make_config(sequences, tokens)
    manager = BlockManager(config.cache_layout.groups, config.num_blocks, 0, max_piece=config.max_num_batched_tokens)
    runner = ModelRunner([cast(Network, NoNetwork())], config, manager)
    scheduler, random = Scheduler(config, manager, runner), np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=0)
    prompts = PromptEncoder(None, config)
    wanted = (
        GenerationRequest(prompts.encode(random.integers(0, VOCAB, tokens).tolist()), params) for _ in range(requests)
    )
    for request in RequestBuilder(config, (), lambda: prompts.tokenizer).build(*wanted):
        request.limit_length(config.context_length)
        scheduler.add(request)
    decoding: list[float] = []
    mixed: list[float] = []
    in_flight: deque[Any] = deque()
    start = time.thread_time()
    while scheduler.has_requests:
        while len(in_flight) <= runner.max_steps_in_flight and (step := scheduler.schedule()):
            in_flight.append((step, runner.launch(step)))
        step, launched = in_flight.popleft()
        scheduler.postprocess(step, launched.fetch())
        start, before = time.thread_time(), start
        (mixed if step.pieces else decoding).append(start - before)
    runner.close()
    return decoding, mixed


class WrongDrafter(Drafter):
    """Proposes what :class:`NoDevice` never chooses."""

    def propose(self, request: Request, count: int) -> Sequence[int]:
        return [8] * count


def measure_checks(steps: int = 1000, drafts: int = 7) -> dict[str, float]:
    """Median seconds of the parts of steps that check the ``drafts`` of one sequence, none of which is right."""
    config = EngineConfig(2 * steps, VOCAB, CacheLayout.uniform(1, kv_heads=1, head_dim=2), (steps,), 0, 1)
    config = replace(config, num_draft_tokens=drafts, speculative=SpeculativeConfig("ngram", adaptive=False))
    manager = BlockManager(config.cache_layout.groups, config.num_blocks, 0, max_piece=config.max_num_batched_tokens)
    runner = ModelRunner([cast(Network, NoNetwork())], config, manager)
    scheduler, executor = Scheduler(config, manager, runner, WrongDrafter()), runner.executors[0]
    wanted = GenerationRequest(EncodedPrompt((1, 2, 3)), SamplingParams(max_new_tokens=steps, ignore_eos=True, seed=0))
    for request in RequestBuilder(config, (), lambda: cast(Any, None)).build(wanted):
        request.limit_length(config.context_length)
        scheduler.add(request)
    seconds = defaultdict[str, list[float]](list)
    while scheduler.has_requests:
        marks = [time.thread_time()]
        step = scheduler.schedule()
        assert step is not None
        marks.append(time.thread_time())
        plan = runner.builder.build(step)
        marks.append(time.thread_time())
        executed = executor.execute(plan)
        marks.append(time.thread_time())
        executor.sample(executed)
        marks.append(time.thread_time())
        scheduler.postprocess(step, executed.fetch())
        marks.append(time.thread_time())
        for name, (start, end) in zip(("plan", "build", "execute", "sample", "record"), pairwise(marks), strict=True):
            seconds[name].append(end - start)
    runner.close()
    return {name: statistics.median(found) for name, found in seconds.items()}


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=1024, help="of a step, at most")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the device, for Model.generate")
    options = parser.parse_args(arguments)
    kinds = measure(options.requests, options.sequences, options.tokens)
    for name, seconds in zip(("that decode alone", "with prompts"), kinds, strict=True):
        if seconds:
            print(f"{len(seconds)} steps {name}: median {1e3 * statistics.median(seconds):.2f} ms")
    print(f"all: {sum(map(sum, kinds)):.2f} s")
    elapsed, busy = measure_calls(options.requests, options.sequences, options.tokens, 1e-3 * options.step_ms)
    share = 100 * (elapsed / busy - 1)
    print(f"Model.generate: {elapsed:.2f} s with steps of {options.step_ms:g} ms, {share:.1f} % longer than these")
    turns = measure_turns(30_000, 128, 3e-3)
    print(f"first token behind 30,000 cached: median {1e3 * statistics.median(turns):.2f} ms longer than its step")
    parts = ", ".join(f"{name} {1e6 * each:.0f}" for name, each in measure_checks().items())
    print(f"a check of 1 + 7, none right, microseconds: {parts}")


if __name__ == "__main__":
    main()
