"""The decoding loop, in tokens: schedule, run, report. It knows neither architectures nor text.

Prompts wait until a slot of the key-value cache is free, are prefilled in chunks (several short prompts in one chunk, a
long prompt over several), and then decode together, a token each per step. An encoder-decoder first reads each
request's source, whole and several at once. The host may run ahead of the device by the backend's
``max_steps_in_flight``; tokens that turn out to lie behind a stop are dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import SamplerState
from ..backend.values import Array, ForwardBatch
from ..errors import BminfError, OutOfMemory
from ..layers.cache import CacheShape, KVCache, SourceCache
from .sampling_params import SamplingParams, sampler_state


class Network(Protocol):
    """A model as the loop sees it."""

    ops: Backend

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """Logits of a step; see the architectures."""
        ...


class EncoderDecoder(Network, Protocol):
    """A model with an encoder as the loop sees it."""

    def encode_to_cache(self, batch: ForwardBatch, source: SourceCache) -> None:
        """Encode whole sources; see the architectures."""
        ...


@dataclass(frozen=True)
class EngineConfig:
    """What bounds a run: the model's context, the vocabulary, sequences at once, and tokens per prefill chunk.

    An encoder-decoder takes sources of up to ``max_source_length`` tokens, and starts decoding with
    ``decoder_start_token_ids``.
    Where memory is short, the cache takes room for ``cache_tokens`` at once, shared by its sequences: growing in a
    memory that is nearly full leaves holes.
    """

    context_length: int
    vocab_size: int
    cache_shape: CacheShape
    max_batch: int = 16
    max_num_batched_tokens: int = 2048
    max_source_length: int = 0
    decoder_start_token_ids: tuple[int, ...] = ()
    cache_tokens: int = 0


@dataclass(eq=False)
class Request:
    """One prompt and what has become of it. Set ``finish_reason`` to end it from outside.

    ``source_token_ids`` are what the encoder of an encoder-decoder reads; ``prompt_token_ids`` are then what its
    decoder starts with.
    ``index`` tells the draws of requests with equal seeds apart, and ``params`` must have a seed. Times are those of
    ``time.perf_counter``: when its prefill began, and when its first and its last token came.
    """

    index: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    source_token_ids: Sequence[int] = ()
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    slot: int = -1
    num_prefilled_tokens: int = 0
    num_delivered: int = 0
    start_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0

    @property
    def input_token_ids(self) -> Sequence[int]:
        """The tokens that the caller gave."""
        return self.source_token_ids or self.prompt_token_ids

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the cache: the newest token is not there yet, those before it are."""
        return self.num_prefilled_tokens + max(len(self.output_token_ids) - 1, 0)

    @property
    def ended_by_eos(self) -> bool:
        """Whether the last token says that the text ends before it."""
        return bool(self.output_token_ids) and self.output_token_ids[-1] in self.eos_ids and not self.params.ignore_eos

    def remaining_tokens(self, context_length: int) -> int:
        """New tokens that this request may still get."""
        limit = min(self.params.max_new_tokens, context_length - len(self.prompt_token_ids))
        return limit - len(self.output_token_ids)

    def append_token(self, token: int, logprob: float, context_length: int) -> None:
        """Record one generated token and whether it is the last."""
        self.last_token_time = time.perf_counter()
        self.first_token_time = self.first_token_time or self.last_token_time
        self.output_token_ids.append(token)
        self.logprobs.append(logprob)
        if self.ended_by_eos:
            self.finish_reason = "stop"
        elif self.remaining_tokens(context_length) <= 0:
            self.finish_reason = "length"


class Scheduler:
    """Runs requests to their end. Iterate, once, to get each request again whenever it has a new token.

    Close it, whether it ended, failed or was interrupted: that gives back its memory at once, even while a traceback
    still refers to it. The prompts must be shorter than the context.
    """

    def __init__(self, network: Network, requests: Sequence[Request], config: EngineConfig):
        self.network = network
        self.ops = network.ops
        self.config = config
        self.waiting = deque(requests)
        self.running: list[Request] = []
        slots = min(config.max_batch, len(requests))
        self.free_slots = list(range(slots))[::-1]
        reach = max(
            len(r.prompt_token_ids) + min(r.remaining_tokens(config.context_length), KVCache.BLOCK) for r in requests
        )
        reach = max(reach, min(config.cache_tokens // slots, config.context_length))
        with self._memory_for(slots, reach):
            self.cache = KVCache(self.ops, config.cache_shape, slots, reach, config.context_length)
            if config.max_source_length:
                longest = max(len(r.source_token_ids) for r in requests)
                self.cache.source = SourceCache(self.ops, config.cache_shape, slots, longest, config.max_source_length)
        self._replay: Callable[[], Array] | None = None

    def __iter__(self) -> Iterator[Request]:
        while self.waiting or self.running:
            yield from self._admit()
            yield from self._decode()

    def close(self) -> None:
        """Give the memory back; nothing can be generated afterwards."""
        self._replay = None
        self.cache.close()

    # -- schedule -------------------------------------------------------------------------------------------------

    def _admit(self) -> Iterator[Request]:
        """Prefill waiting prompts while slots are free."""
        admitted: list[Request] = []
        while self.waiting and self.free_slots:
            request = self.waiting.popleft()
            request.slot = self.free_slots.pop()
            request.start_time = time.perf_counter()
            admitted.append(request)
        if self.cache.source is not None:
            self._read_sources(admitted, self.cache.source)
        while admitted:
            ready = self._prefill_chunk(admitted)
            admitted = [r for r in admitted if r not in ready]
            self.running += ready
            yield from ready
            self._release()

    def _release(self) -> None:
        """Take finished requests out and free their slots."""
        self.free_slots += [r.slot for r in self.running if r.finish_reason]
        self.running = [r for r in self.running if not r.finish_reason]

    def _should_continue(self, group: list[Request], filled: int, in_flight: int) -> bool:
        """Whether a group goes on: a row needs another token, and no other group would be better.

        ``filled`` is the cache's fullest row, ``in_flight`` the steps whose tokens are not known yet. The rows of
        finished requests go on idly, and fill the cache, until a quarter is idle, or a prompt waits for a slot, or the
        cache would grow for them.
        """
        wanted = max((r.remaining_tokens(self.config.context_length) for r in group if not r.finish_reason), default=0)
        if wanted <= in_flight or filled >= self.config.context_length:
            return False
        finished = sum(r.finish_reason is not None for r in group)
        crowded = bool(self.waiting) or finished * 4 >= len(group) or filled >= self.cache.capacity
        return not (finished and crowded)

    # -- run ------------------------------------------------------------------------------------------------------

    def _read_sources(self, requests: list[Request], cache: SourceCache) -> None:
        """Encode the sources of requests into their slots, as many at once as a chunk holds, but one at least."""
        network = cast(EncoderDecoder, self.network)
        left = deque(requests)
        while left:
            group = [left.popleft()]
            while (
                left
                and sum(len(r.source_token_ids) for r in group) + len(left[0].source_token_ids)
                <= self.config.max_num_batched_tokens
            ):
                group.append(left.popleft())
            cache.set_lengths({r.slot: len(r.source_token_ids) for r in group})
            network.encode_to_cache(self._step([(r, r.source_token_ids, 0) for r in group]), cache)

    def _prefill_chunk(self, requests: list[Request]) -> list[Request]:
        """Run the next chunk of prompt tokens; returns the requests whose prompt is complete: they have a token now."""
        parts: list[tuple[Request, Sequence[int], int]] = []
        budget = self.config.max_num_batched_tokens
        for request in requests:
            tokens = request.prompt_token_ids[request.num_prefilled_tokens : request.num_prefilled_tokens + budget]
            if len(tokens):
                parts.append((request, tokens, request.num_prefilled_tokens))
            budget -= len(tokens)
        self._reserve(max(cached + len(tokens) for _, tokens, cached in parts))
        logits = self.network(self._step(parts), self.cache)
        for request, tokens, _ in parts:
            request.num_prefilled_tokens += len(tokens)
        group = [r for r, _, _ in parts]
        ready = [r for r in group if r.num_prefilled_tokens == len(r.prompt_token_ids)]
        if ready:
            self._postprocess(group, self.ops.fetch(self.ops.sample(logits, self._sampler(group)))(), ready)
        return ready

    def _decode(self) -> Iterator[Request]:
        """Decode the active requests together until enough of them have finished, or a waiting prompt can start."""
        group = list(self.running)
        if not group:
            return
        batch = self._step([(r, r.output_token_ids[-1:], r.num_cached_tokens) for r in group])
        sampler = self._sampler(group)
        filled = max(r.num_cached_tokens for r in group)
        in_flight: deque[Callable[[], np.ndarray]] = deque()
        while True:
            if self._should_continue(group, filled, len(in_flight)):
                filled += 1
                if filled > self.cache.capacity:
                    self._replay = None  # a recording has the cache's old place in it
                    self._reserve(filled)
                if self._replay is None:
                    batch.max_context_len = self.cache.capacity
                    self._replay = self.ops.capture(
                        lambda: self.ops.sample(self.network(batch, self.cache), sampler, batch)
                    )
                in_flight.append(self.ops.fetch(self._replay()))
                if len(in_flight) <= self.ops.max_steps_in_flight:
                    continue
            elif not in_flight:
                break
            running = [r for r in group if not r.finish_reason]
            self._postprocess(group, in_flight.popleft()(), running)
            yield from running
        self._replay = None
        self._release()

    def _postprocess(self, group: list[Request], chosen: np.ndarray, receivers: list[Request]) -> None:
        """Record a step's tokens and log-probabilities, int32 ``[2, B]`` as ``sample`` returns them."""
        for request, token, logprob in zip(group, chosen[0], chosen[1].view(np.float32), strict=True):
            if request not in receivers:
                continue
            if token < 0:
                position = len(request.prompt_token_ids) + len(request.output_token_ids)
                raise BminfError(
                    f"prompt {request.index}: no token can be chosen at position {position}, because the model's "
                    "logits there hold a NaN or an infinity; load(..., check=True) or generate --check finds the layer"
                )
            request.append_token(int(token), float(logprob), self.config.context_length)

    # -- device arrays --------------------------------------------------------------------------------------------

    def _step(self, parts: list[tuple[Request, Sequence[int], int]]) -> ForwardBatch:
        """A step of requests, each with its new tokens and how many it has in the cache already."""
        requests, tokens, past = zip(*parts, strict=True)
        return ForwardBatch.packed(self.ops.array, tokens, past, [r.slot for r in requests])

    def _sampler(self, requests: list[Request]) -> SamplerState:
        """The device's sampler state, continuing where each request is."""
        state = sampler_state(
            [r.params for r in requests],
            [r.prompt_token_ids for r in requests],
            self.config.vocab_size,
            [r.index for r in requests],
        )
        state.step[:] = [len(r.output_token_ids) for r in requests]
        if state.counts is not None:
            for row, request in zip(state.counts, requests, strict=True):
                np.add.at(row, request.output_token_ids, 1)
        return state.map(self.ops.array)

    # -- memory ---------------------------------------------------------------------------------------------------

    def _reserve(self, tokens: int) -> None:
        with self._memory_for(self.cache.slots, tokens):
            self.cache.reserve(tokens)

    @contextmanager
    def _memory_for(self, slots: int, tokens: int) -> Iterator[None]:
        """Say what the memory was for, where there is not enough."""
        try:
            yield
        except MemoryError as error:
            raise OutOfMemory(
                f"no room for {tokens:,} tokens of {slots} sequences in the key-value cache: {error}. Generate fewer "
                "tokens, or fewer sequences at a time (max_batch)"
            ) from error
