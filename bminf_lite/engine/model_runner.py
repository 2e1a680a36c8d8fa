"""Runs a model on the requests of a step: device arrays, the key-value cache and its memory, captured steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import numpy as np

from ..backend.base import Backend
from ..backend.sampling import SamplerState, state_of
from ..backend.values import Array, ForwardBatch
from ..errors import OutOfMemory
from ..layers.cache import KVCache, SourceCache
from .config import EngineConfig
from .request import Request
from .sampling_params import sequence_sampling
from .scheduler import ScheduledTokens


class Network(Protocol):
    """A model as the runner calls it; see :mod:`bminf_lite.models`."""

    ops: Backend

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """Logits fp32: of each sequence's last token ``[B, vocab]``, or of all tokens ``[T, vocab]``."""
        ...


class EncoderDecoder(Network, Protocol):
    """A model that has an encoder."""

    def encode_to_cache(self, batch: ForwardBatch, source: SourceCache) -> None:
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
        shape = config.cache_shape
        with _memory_for(slots, capacity):
            self.cache = KVCache(self.ops, shape, slots, capacity, config.context_length)
            if config.is_encoder_decoder:
                try:
                    self.cache.source = SourceCache(self.ops, shape, slots, source_capacity, config.max_source_length)
                except BaseException:
                    self.close()
                    raise

    def close(self) -> None:
        """Give the memory back; nothing can be run afterwards."""
        self.cache.close()

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` per slot. A cache that grows moves to another address."""
        with _memory_for(self.cache.slots, tokens):
            self.cache.reserve(tokens)

    def encode_sources(self, sources: Mapping[int, Sequence[int]]) -> None:
        """Encode the source token ids of some slots, all in one step."""
        assert self.cache.source is not None
        self.cache.source.set_lengths({slot: len(ids) for slot, ids in sources.items()})
        batch = ForwardBatch.packed(self.ops.array, list(sources.values()), slots=list(sources))
        cast(EncoderDecoder, self.network).encode_to_cache(batch, self.cache.source)

    def prefill(self, chunk: Sequence[ScheduledTokens]) -> np.ndarray | None:
        """Process prompt tokens; returns what ``Backend.sample`` does, or None if no prompt is complete yet."""
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
        size = len(token_ids) if all_at_once else self.config.max_num_batched_tokens
        for start in range(0, len(token_ids), size):
            batch = ForwardBatch.packed(self.ops.array, [token_ids[start : start + size]], [start])
            yield self.network(batch, self.cache, all_logits=True)

    def make_batch(self, parts: Sequence[ScheduledTokens]) -> ForwardBatch:
        """The arguments of a step, on the device."""
        requests, token_ids, context_lens = zip(*parts, strict=True)
        return ForwardBatch.packed(self.ops.array, token_ids, context_lens, [r.slot for r in requests])

    def make_sampler(self, requests: Sequence[Request]) -> SamplerState:
        """The sampler state of requests on the device, after the tokens that they have generated."""
        sequences = [
            sequence_sampling(r.params, r.index, r.prompt_token_ids, r.output_token_ids, r.eos_ids) for r in requests
        ]
        return state_of(sequences, self.config.vocab_size).map(self.ops.array)


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
        if self.num_cached_tokens > runner.cache.capacity:
            self._replay = None
            runner.reserve(self.num_cached_tokens)
        if self._replay is None:
            self._batch.max_context_len = runner.cache.capacity
            self._replay = ops.capture(
                lambda: ops.sample(runner.network(self._batch, runner.cache), self._sampler, self._batch)
            )
        self._in_flight.append(ops.fetch(self._replay()))

    def fetch(self) -> np.ndarray:
        """The result of ``Backend.sample`` of the oldest step in flight. Waits for the device."""
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
