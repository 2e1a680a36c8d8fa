"""The speed of the engine with many requests: all at once ("offline"), or arriving at random times ("online").

Every request has exactly the same numbers of prompt tokens and of new tokens: prompts are random token ids, and the
end-of-sequence token is ignored. Requests go through :class:`~bminf_lite.api.Model`, as those of any caller do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..api import Model
from ..errors import UsageError

PERCENTILES = (50, 99)
DRAFTS = ("drafts", "draft_tokens", "accepted_tokens")
"""What a result has of :class:`~bminf_lite.engine.core.EngineStats`."""


@dataclass(frozen=True)
class Load:
    """``requests`` of ``input_tokens`` prompt tokens and ``output_tokens`` new tokens each.

    ``rate`` is the mean number of requests that arrive per second, at the times of a Poisson process; None for all at
    once. Prompts share no prefix.
    """

    requests: int
    input_tokens: int
    output_tokens: int
    rate: float | None = None

    def __str__(self) -> str:
        arrival = "" if self.rate is None else f", {self.rate:g} per second"
        return f"{self.requests:,} requests of {self.input_tokens:,} / {self.output_tokens:,} tokens{arrival}"


@dataclass(frozen=True)
class ServingResult:
    """What a load took, in seconds.

    ``seconds`` is the time from the first request to the last token. ``first_token`` has the time from the arrival of
    each request to its first token. ``between_tokens`` has the times between two tokens of a request: each of them
    online, and offline the mean of each request, because a caller that waits for whole results sees no single tokens.
    In ``drafts`` checks ``accepted_tokens`` of ``draft_tokens`` were accepted.
    """

    load: Load
    seconds: float
    first_token: np.ndarray
    between_tokens: np.ndarray
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def output_rate(self) -> float:
        """New tokens per second."""
        return self.load.requests * self.load.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Prompt tokens and new tokens per second."""
        return self.output_rate * (1 + self.load.input_tokens / self.load.output_tokens)

    def to_dict(self) -> dict[str, Any]:
        """All numbers as JSON values; times in milliseconds."""
        found: dict[str, Any] = asdict(self.load)
        found |= {"seconds": self.seconds, "output_tokens_per_second": self.output_rate}
        found |= {"total_tokens_per_second": self.total_rate}
        for name, values in (("first_token", self.first_token), ("between_tokens", self.between_tokens)):
            for percentile in PERCENTILES:
                value = 1e3 * float(np.percentile(values, percentile)) if len(values) else None
                found[f"{name}_p{percentile}_ms"] = value
        return found | {name: getattr(self, name) for name in DRAFTS}

    def markdown(self) -> str:
        """A table of the numbers."""
        row = self.to_dict()
        lines = [
            ("output", f"{row['output_tokens_per_second']:,.0f} tokens/s"),
            ("prompts and output", f"{row['total_tokens_per_second']:,.0f} tokens/s"),
            ("time", f"{self.seconds:.2f} s"),
        ]
        for name, text in (("first_token", "time to first token"), ("between_tokens", "time between tokens")):
            if row[f"{name}_p50_ms"] is not None:
                lines.append((text, f"median {row[f'{name}_p50_ms']:,.1f} ms, p99 {row[f'{name}_p99_ms']:,.1f} ms"))
        if self.drafts:
            text = f"{self.accepted_tokens:,} of {self.draft_tokens:,} accepted"
            lines.append(("drafts", f"{text}, {1 + self.accepted_tokens / self.drafts:.2f} tokens a check"))
        return "\n".join([f"| {self.load} | |", "|---|---|", *(f"| {label} | {value} |" for label, value in lines)])


def run_load(model: Model, load: Load) -> ServingResult:
    """Run a load once, on a model that is warm: see :func:`warm_up`.

    Raises ``UsageError`` for a load that the model cannot take.
    """
    prompts, before = random_prompts(model, load), model.stats()
    result = _offline(model, load, prompts) if load.rate is None else asyncio.run(_online(model, load, prompts))
    after = model.stats()
    return replace(result, **{name: getattr(after, name) - getattr(before, name) for name in DRAFTS})


def warm_up(model: Model, load: Load) -> None:
    """Compile the kernels that a load needs, and capture the steps."""
    model.warm_up()
    few = replace(load, requests=min(load.requests, 4), output_tokens=min(load.output_tokens, 4), rate=None)
    run_load(model, few)


def random_prompts(model: Model, load: Load, seed: int = 0) -> list[list[int]]:
    """Prompts of random token ids. Raises ``UsageError`` if a request would not fit the model's context."""
    config = model.engine_config
    longest = config.context_length
    if load.input_tokens + load.output_tokens > longest:
        total = f"{load.input_tokens:,} + {load.output_tokens:,} tokens"
        raise UsageError(f"a request has {total}, but the model's context is {longest:,} tokens: use fewer")
    random = np.random.default_rng(seed)
    ids = random.integers(0, config.vocab_size, (load.requests, load.input_tokens))
    return [[int(token) for token in row] for row in ids]


def _offline(model: Model, load: Load, prompts: Sequence[Sequence[int]]) -> ServingResult:
    start = time.perf_counter()
    results = model.generate(prompts, max_new_tokens=load.output_tokens, ignore_eos=True, temperature=0.0)
    seconds = time.perf_counter() - start
    timings = [result.timings for result in results]
    steps = load.output_tokens - 1
    between = [t.decode_seconds / steps for t in timings] if steps else []
    first_token = np.array([t.queue_seconds + t.prompt_seconds for t in timings])
    return ServingResult(load, seconds, first_token, np.array(between))


async def _online(model: Model, load: Load, prompts: Sequence[Sequence[int]]) -> ServingResult:
    assert load.rate is not None
    gaps = np.random.default_rng(1).exponential(1 / load.rate, load.requests)
    first_token: list[float] = []
    between: list[float] = []

    async def request(prompt: Sequence[int]) -> None:
        last = begin = time.perf_counter()
        options: dict[str, Any] = {"max_new_tokens": load.output_tokens, "ignore_eos": True, "temperature": 0.0}
        async for _ in model.astream(prompt, **options):
            now = time.perf_counter()
            (first_token if last == begin else between).append(now - last)
            last = now

    start = time.perf_counter()
    due, tasks = start, []
    for prompt, gap in zip(prompts, gaps, strict=True):
        due += gap
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(request(prompt)))
    await asyncio.gather(*tasks)
    return ServingResult(load, time.perf_counter() - start, np.array(first_token), np.array(between))
