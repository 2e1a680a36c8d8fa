"""Decides which requests take part in the next step. It runs nothing and holds no arrays.

A request waits for memory in :attr:`Scheduler.waiting`: the key-value cache has a fixed number of slots, and
:meth:`Scheduler.admit` moves a waiting request on when one is free. Admitted prompts are prefilled in chunks: several
short prompts share a chunk, and a long prompt takes several. Prefilled requests decode together, one token per step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..backend.sampling import Choice
from ..backend.values import CACHE_BLOCK
from ..errors import BminfError
from .config import EngineConfig
from .request import Request


class ScheduledTokens(NamedTuple):
    """The tokens of one request in a step, and how many tokens it has in the cache before them."""

    request: Request
    token_ids: Sequence[int]
    num_cached_tokens: int

    @property
    def completes_prompt(self) -> bool:
        """Whether these are the last tokens of the prompt."""
        return self.num_cached_tokens + len(self.token_ids) == len(self.request.prompt_token_ids)


class Scheduler:
    """Requests in three states: ``waiting`` for a slot, ``prefilling``, and ``running`` (decoding)."""

    def __init__(self, requests: Sequence[Request], config: EngineConfig):
        self.config = config
        self.waiting = deque(requests)
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.num_slots = min(config.max_batch, len(requests))
        self.free_slots = list(range(self.num_slots))[::-1]

    @property
    def has_requests(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.running)

    def initial_capacity(self) -> int:
        """Tokens per slot that the cache has at first: the longest prompt and the first tokens after it."""
        limit = self.config.context_length
        longest = max(len(r.prompt_token_ids) + min(r.remaining_tokens(limit), CACHE_BLOCK) for r in self.waiting)
        return max(longest, min(self.config.cache_tokens // self.num_slots, limit))

    def admit(self) -> list[Request]:
        """Give free slots to waiting requests, in order; returns the requests that start now."""
        while self.waiting and self.free_slots:
            request = self.waiting.popleft()
            request.slot = self.free_slots.pop()
            request.start_time = time.perf_counter()
            self.prefilling.append(request)
        return self.prefilling

    def source_batches(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Requests whose sources are encoded together: as many as ``max_num_batched_tokens`` allows, at least one."""
        batches: list[list[Request]] = []
        budget = 0
        for request in requests:
            if len(request.source_token_ids) > budget:
                batches.append([])
                budget = self.config.max_num_batched_tokens
            batches[-1].append(request)
            budget -= len(request.source_token_ids)
        return batches

    def next_chunk(self) -> list[ScheduledTokens]:
        """The next ``max_num_batched_tokens`` prompt tokens to process; empty when all prompts are."""
        chunk: list[ScheduledTokens] = []
        budget = self.config.max_num_batched_tokens
        for request in self.prefilling:
            start = request.num_prefilled_tokens
            tokens = request.prompt_token_ids[start : start + budget]
            if len(tokens):
                chunk.append(ScheduledTokens(request, tokens, start))
            budget -= len(tokens)
        return chunk

    def finish_chunk(self, chunk: Sequence[ScheduledTokens], chosen: np.ndarray | None) -> list[Request]:
        """Record that a chunk was processed. Requests whose prompt is complete run now, and are returned.

        ``chosen`` holds their first tokens; see :meth:`postprocess`.
        """
        for request, token_ids, _ in chunk:
            request.num_prefilled_tokens += len(token_ids)
        self.prefilling = [r for r in self.prefilling if not r.is_prefilled]
        ready = [] if chosen is None else self.postprocess([part.request for part in chunk], chosen)
        self.running += ready
        return ready

    def should_continue(self, group: Sequence[Request], num_cached: int, in_flight: int, capacity: int) -> bool:
        """Whether to launch another decoding step of the same group.

        ``num_cached`` is the longest cache row of the group, ``in_flight`` the number of steps whose tokens are not
        known yet, ``capacity`` the cache's. The rows of finished requests stay in the group. It ends when a quarter
        of its rows are finished, or when one is while a request waits for a slot or the cache would have to grow.
        """
        context_length = self.config.context_length
        wanted = max((r.remaining_tokens(context_length) for r in group if not r.finish_reason), default=0)
        if wanted <= in_flight or num_cached >= context_length:
            return False
        finished = sum(r.finish_reason is not None for r in group)
        crowded = bool(self.waiting) or finished * 4 >= len(group) or num_cached >= capacity
        return not (finished and crowded)

    def postprocess(self, group: Sequence[Request], chosen: np.ndarray) -> list[Request]:
        """Record the tokens of a step, int32 as ``Backend.sample`` returns them.

        Drops the tokens of finished requests and of incomplete prompts, and returns the other requests. Raises
        ``BminfError`` where no token could be chosen.
        """
        receivers = []
        choice = Choice.unpack(chosen)
        for b, (request, token, logprob) in enumerate(zip(group, choice.tokens, choice.logprobs, strict=True)):
            if request.finish_reason or not request.is_prefilled:
                continue
            if token < 0:
                position = len(request.prompt_token_ids) + len(request.output_token_ids)
                raise BminfError(
                    f"prompt {request.index}: no token can be chosen at position {position}, because the model's "
                    "logits there hold a NaN or an infinity; load(..., check=True) or generate --check finds the layer"
                )
            top = choice.most_likely(b, request.params.logprobs or 0)
            request.append_token(int(token), float(logprob), self.config.context_length, top)
            receivers.append(request)
        return receivers

    def release(self) -> None:
        """Remove finished requests and free their slots."""
        self.free_slots += [r.slot for r in self.running if r.finish_reason]
        self.running = [r for r in self.running if not r.finish_reason]
