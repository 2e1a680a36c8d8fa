"""The decoding loop, in tokens: schedule, run, report. It knows neither architectures nor text.

Prompts wait until a slot of the key-value cache is free, are prefilled in chunks (several short prompts in one chunk,
a long prompt over several), and then decode together, a token each per step. The host may run ahead of the device by
the backend's ``lookahead``; tokens that turn out to lie behind a stop are dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import SamplerState
from ..backend.values import Array, Step
from ..errors import BminfError
from ..layers.cache import CacheShape, KVCache
from .sampling import SamplingParams, sampler_state


class Network(Protocol):
    """A model as the loop sees it."""

    ops: Backend

    def __call__(self, step: Step, cache: KVCache, all_logits: bool = False) -> Array:
        """Logits of a step; see the architectures."""
        ...


@dataclass(frozen=True)
class Limits:
    """What bounds a run: the model's context, the vocabulary, sequences at once, and tokens per prefill chunk."""

    context_length: int
    vocab_size: int
    cache_shape: CacheShape
    max_batch: int = 16
    chunk: int = 2048


@dataclass
class Request:
    """One prompt and what has become of it. Set ``finish_reason`` to end it from outside; ``params`` has a seed."""

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    slot: int = -1
    prefilled: int = 0
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def room(self, context_length: int) -> int:
        """New tokens that this request may still get."""
        limit = min(self.params.max_new_tokens, context_length - len(self.prompt))
        return limit - len(self.tokens)

    def accept(self, token: int, logprob: float, context_length: int) -> None:
        """Record one generated token and whether it is the last."""
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.eos_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif self.room(context_length) <= 0:
            self.finish_reason = "length"


class Generation:
    """Runs requests to their end; iterate to get each request again whenever it has a new token."""

    def __init__(self, network: Network, requests: Sequence[Request], limits: Limits):
        self.network = network
        self.ops = network.ops
        self.limits = limits
        self.waiting = deque(r for r in requests if r.room(limits.context_length) > 0)
        self.active: list[Request] = []
        slots = min(limits.max_batch, len(self.waiting))
        self.free_slots = list(range(slots))[::-1]
        reach = (len(r.prompt) + min(r.room(limits.context_length), KVCache.BLOCK) for r in self.waiting)
        longest = max(reach, default=1)
        self.cache = KVCache(self.ops, limits.cache_shape, max(slots, 1), longest, limits.context_length)

    def __iter__(self) -> Iterator[Request]:
        while self.waiting or self.active:
            yield from self._admit()
            yield from self._decode()

    # -- schedule -------------------------------------------------------------------------------------------------

    def _admit(self) -> Iterator[Request]:
        """Prefill waiting prompts while slots are free."""
        admitted: list[Request] = []
        while self.waiting and self.free_slots:
            request = self.waiting.popleft()
            request.slot = self.free_slots.pop()
            admitted.append(request)
        now = time.perf_counter()
        for request in admitted:
            request.started = now
        while admitted:
            ready = self._prefill_chunk(admitted)
            admitted = [r for r in admitted if r not in ready]
            self.active += ready
            yield from ready
            self._release()

    def _release(self) -> None:
        """Take finished requests out and free their slots."""
        self.free_slots += [r.slot for r in self.active if r.finish_reason]
        self.active = [r for r in self.active if not r.finish_reason]

    # -- run ------------------------------------------------------------------------------------------------------

    def _prefill_chunk(self, requests: list[Request]) -> list[Request]:
        """Run the next chunk of prompt tokens; returns the requests whose prompt is complete; they have a token."""
        parts: list[tuple[Request, int]] = []
        budget = self.limits.chunk
        for request in requests:
            take = min(budget, len(request.prompt) - request.prefilled)
            if take == 0:
                break
            parts.append((request, take))
            budget -= take
        self.cache.reserve(max(r.prefilled + n for r, n in parts))
        tokens = np.concatenate([np.asarray(r.prompt[r.prefilled : r.prefilled + n], np.int32) for r, n in parts])
        step = self._step(tokens, parts)
        chosen = self.ops.fetch(self.ops.sample(self.network(step, self.cache), self._sampler([r for r, _ in parts])))()
        ready = []
        for (request, taken), token, logprob in zip(parts, chosen[0], chosen[1].view(np.float32), strict=True):
            request.prefilled += taken
            if request.prefilled == len(request.prompt):
                self._accept(request, int(token), float(logprob))
                ready.append(request)
        return ready

    def _decode(self) -> Iterator[Request]:
        """Decode the active requests together until enough of them have finished, or a waiting prompt can start."""
        requests = list(self.active)
        if not requests:
            return
        step = self._step(np.array([r.tokens[-1] for r in requests], np.int32), [(r, 1) for r in requests])
        sampler = self._sampler(requests)
        filled = max(r.prefilled + len(r.tokens) - 1 for r in requests)
        work: Callable[[], Array] | None = None
        under_way: deque[Callable[[], np.ndarray]] = deque()
        while True:
            wanted = max((r.room(self.limits.context_length) for r in requests if not r.finish_reason), default=0)
            if wanted > len(under_way) and not self._should_regroup(requests):
                filled += 1
                if self.cache.reserve(min(filled, self.limits.context_length)) or work is None:
                    step.reach = self.cache.capacity
                    work = self.ops.repeated(lambda: self.ops.sample(self.network(step, self.cache), sampler, step))
                under_way.append(self.ops.fetch(work()))
                if len(under_way) <= self.ops.lookahead:
                    continue
            elif not under_way:
                break
            chosen = under_way.popleft()()
            for request, token, logprob in zip(requests, chosen[0], chosen[1].view(np.float32), strict=True):
                if not request.finish_reason:
                    self._accept(request, int(token), float(logprob))
                    yield request
        self._release()

    def _should_regroup(self, requests: list[Request]) -> bool:
        """Whether to stop decoding this group: someone waits for a slot, or many of its rows are idle."""
        finished = sum(r.finish_reason is not None for r in requests)
        return finished > 0 and (bool(self.waiting) or finished * 4 >= len(requests))

    def _accept(self, request: Request, token: int, logprob: float) -> None:
        if token < 0:
            position = len(request.prompt) + len(request.tokens)
            raise BminfError(f"prompt {request.index}: the model's logits are NaN at token {position}")
        request.accept(token, logprob, self.limits.context_length)

    # -- device arrays --------------------------------------------------------------------------------------------

    def _step(self, tokens: np.ndarray, parts: list[tuple[Request, int]]) -> Step:
        counts = [n for _, n in parts]
        # A decoding request's newest token is not in the cache yet, its earlier ones are.
        past = [r.prefilled + max(len(r.tokens) - 1, 0) for r, _ in parts]
        array = self.ops.array
        return Step(
            tokens=array(tokens),
            starts=array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
            past=array(np.array(past, np.int32)),
            slots=array(np.array([r.slot for r, _ in parts], np.int32)),
            count=len(parts),
            longest=max(counts),
            reach=max(p + n for p, n in zip(past, counts, strict=True)),
        )

    def _sampler(self, requests: list[Request]) -> SamplerState:
        """The device's sampler state, continuing where each request is."""
        state = sampler_state(
            [r.params for r in requests],
            [r.prompt for r in requests],
            self.limits.vocab_size,
            [r.index for r in requests],
        )
        state.step[:] = [len(r.tokens) for r in requests]
        if state.counts is not None:
            for row, request in zip(state.counts, requests, strict=True):
                np.add.at(row, request.tokens, 1)
        return state.map(self.ops.array)
