"""Runs a model on the requests of a step: device arrays, the key-value cache and its memory, captured steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import SamplerState
from ..backend.values import BLOCK_SIZE, Array, ForwardBatch, sequential_tables
from ..errors import OutOfMemory
from ..layers.cache import KVCache, blocks_for
from .config import EngineConfig
from .request import Request
from .sampling_params import sampler_state
from .scheduler import ScheduledTokens


class Network(Protocol):
    """A model as the runner calls it; see :mod:`bminf_lite.models`."""

    ops: Backend

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """Logits fp32: of each sequence's last token ``[B, vocab]``, or of all tokens ``[T, vocab]``."""
        ...


class EncoderDecoder(Network, Protocol):
    """A model that has an encoder."""

    def encode_to_cache(self, batch: ForwardBatch, source: KVCache) -> None:
        """Encode whole sources, and store the decoder's keys and values of them in ``source``."""
        ...


class ModelRunner:
    """A model and a key-value cache of ``slots`` rows of ``capacity`` tokens, which grows when needed.

    ``source_capacity`` is the longest source that an encoder-decoder reads. :meth:`close` gives the memory back even
    while a traceback still refers to the runner. Raises ``OutOfMemory`` where the cache does not fit.
    """

    def __init__(self, network: Network, config: EngineConfig, slots: int, capacity: int, source_capacity: int = 0):
        self.network = network
        self.ops = network.ops
        self.config = config
        self.slots = slots
        self.max_source_len = source_capacity
        self.source_lens = np.zeros(slots, np.int32)
        shape = config.cache_shape
        with _memory_for(slots, capacity):
            self.cache = KVCache.for_sequences(self.ops, shape, slots, capacity)
            self.table = sequential_tables(slots, capacity)
            if config.is_encoder_decoder:
                try:
                    self.cache.source = KVCache.for_sequences(self.ops, shape, slots, source_capacity)
                    self.source_table = sequential_tables(slots, source_capacity)
                except BaseException:
                    self.close()
                    raise

    def close(self) -> None:
        """Give the memory back; nothing can be run afterwards."""
        self.cache.close()

    @property
    def capacity(self) -> int:
        """Tokens that fit per slot."""
        return int(self.table.shape[1]) * BLOCK_SIZE

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` per slot. A cache that grows by half at least, and moves to another address."""
        if tokens <= self.capacity:
            return
        width = blocks_for(max(tokens, min(self.config.context_length, self.capacity * 3 // 2)))
        added = np.arange(self.slots * (width - self.table.shape[1]), dtype=np.int32).reshape(self.slots, -1)
        table = np.concatenate([self.table, self.table.size + 1 + added], axis=1)
        with _memory_for(self.slots, tokens):
            for group in range(len(self.cache.num_blocks)):
                self.cache.grow(group, 1 + table.size)
        self.table = table

    def tables(self, slots: list[int]) -> tuple[Array, ...]:
        """The block tables of some slots on the device."""
        return tuple(self.ops.array(self.table[slots]) for _ in self.cache.num_blocks)

    def encode_sources(self, sources: Mapping[int, Sequence[int]]) -> None:
        """Encode the source token ids of some slots, all in one step."""
        assert self.cache.source is not None
        slots = list(sources)
        self.source_lens[slots] = [len(ids) for ids in sources.values()]
        table = self.source_table[slots]
        batch = ForwardBatch.packed(self.ops.array, list(sources.values()), source_tables=table)
        cast(EncoderDecoder, self.network).encode_to_cache(batch, self.cache.source)

    def prefill(self, chunk: Sequence[ScheduledTokens]) -> np.ndarray | None:
        """Process prompt tokens; returns the chosen tokens int32 ``[2, B]``, or None if no prompt is complete yet."""
        self.reserve(max(part.num_cached_tokens + len(part.token_ids) for part in chunk))
        logits = self.network(self.make_batch(chunk), self.cache)
        if not any(part.completes_prompt for part in chunk):
            return None
        sampler = self.make_sampler([part.request for part in chunk])
        return self.ops.fetch(self.ops.sample(logits, sampler))()

    def logits(self, token_ids: np.ndarray, source: Sequence[int], all_at_once: bool = False) -> Iterator[Array]:
        """Logits after each of the tokens of one sequence, fp32 ``[T, vocab]``, chunk by chunk.

        The arrays are the backend's. With ``all_at_once`` there is one chunk.
        """
        if self.config.is_encoder_decoder:
            self.encode_sources({0: source})
        self.reserve(len(token_ids))
        size = len(token_ids) if all_at_once else self.config.max_num_batched_tokens
        for start in range(0, len(token_ids), size):
            batch = self._packed([token_ids[start : start + size]], [start], [0])
            yield self.network(batch, self.cache, all_logits=True)

    def make_batch(self, parts: Sequence[ScheduledTokens]) -> ForwardBatch:
        """The arguments of a step, on the device."""
        requests, token_ids, context_lens = zip(*parts, strict=True)
        return self._packed(token_ids, context_lens, [r.slot for r in requests])

    def _packed(
        self, token_ids: Sequence[Sequence[int] | np.ndarray], context_lens: Sequence[int], slots: list[int]
    ) -> ForwardBatch:
        tables = [self.table[slots]] * len(self.cache.num_blocks)
        if self.cache.source is None:
            return ForwardBatch.packed(self.ops.array, token_ids, context_lens, tables)
        lens = [int(n) for n in self.source_lens[slots]]
        return ForwardBatch.packed(self.ops.array, token_ids, context_lens, tables, self.source_table[slots], lens)

    def make_sampler(self, requests: Sequence[Request]) -> SamplerState:
        """The sampler state of requests on the device, after the tokens that they have generated."""
        params, prompts = [r.params for r in requests], [r.prompt_token_ids for r in requests]
        state = sampler_state(params, prompts, self.config.vocab_size, [r.index for r in requests])
        state.step[:] = [len(r.output_token_ids) for r in requests]
        if state.counts is not None:
            for row, request in zip(state.counts, requests, strict=True):
                np.add.at(row, request.output_token_ids, 1)
        return state.map(self.ops.array)


class DecodingGroup:
    """Requests that decode together, a token each per step.

    A step is captured once and replayed. It is captured again when the cache grows, because a captured step holds the
    cache's address. Several steps may be in flight: launched, with tokens that the host has not fetched yet.
    """

    def __init__(self, runner: ModelRunner, requests: Sequence[Request]):
        self.requests = requests
        self.num_cached_tokens = max(r.num_cached_tokens for r in requests)
        self._runner = runner
        self._batch = runner.make_batch(
            [ScheduledTokens(r, r.output_token_ids[-1:], r.num_cached_tokens) for r in requests]
        )
        self._sampler = runner.make_sampler(requests)
        self._replay: Callable[[], Array] | None = None
        self._in_flight: deque[Callable[[], np.ndarray]] = deque()

    @property
    def steps_in_flight(self) -> int:
        """Steps whose tokens are not known yet."""
        return len(self._in_flight)

    def launch(self) -> None:
        """Start the next step of all rows."""
        runner, ops = self._runner, self._runner.ops
        self.num_cached_tokens += 1
        if self.num_cached_tokens > runner.capacity:
            self._replay = None
            runner.reserve(self.num_cached_tokens)
            self._batch.block_tables = runner.tables([r.slot for r in self.requests])
        if self._replay is None:
            self._batch.max_context_len = runner.capacity
            self._replay = ops.capture(
                lambda: ops.sample(runner.network(self._batch, runner.cache), self._sampler, self._batch)
            )
        self._in_flight.append(ops.fetch(self._replay()))

    def fetch(self) -> np.ndarray:
        """The tokens of the oldest step in flight, int32 ``[2, B]``. Waits for the device."""
        return self._in_flight.popleft()()

    def close(self) -> None:
        """Give the captured step's memory back."""
        self._replay = None


@contextmanager
def _memory_for(slots: int, tokens: int) -> Iterator[None]:
    """Turn a ``MemoryError`` into ``OutOfMemory`` with the purpose of the memory."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(
            f"no room for {tokens:,} tokens of {slots} sequences in the key-value cache: {error}. Generate fewer "
            "tokens, or fewer sequences at a time (max_batch)"
        ) from error
