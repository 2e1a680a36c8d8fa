"""Texts that become vectors, beside the requests that generate: whole texts, packed, one batch between two steps.

A text is computed in one batch, and keeps nothing. Batches are made in the order in which texts come, so a request of
many texts takes several. The queue runs in the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from ..backend.base import Backend
from ..backend.values import Array, ForwardBatch, Pooling
from ..errors import OutOfMemory


class TextNetwork(Protocol):
    """A model that makes vectors of the tokens of whole texts."""

    ops: Backend

    def __call__(self, batch: ForwardBatch) -> Array:
        """The vectors of all tokens, fp32 ``[T, features]``; ``batch`` has the block tables of :meth:`tables`."""
        ...

    def tables(self, lengths: Sequence[int]) -> list[np.ndarray]:
        """The block tables of a step of texts of these lengths."""
        ...


@dataclass(frozen=True)
class PoolingText:
    """A text in tokens, int32 ``[n]`` or a list; ``token_types`` are its tokens' segments, or None for zeros.

    The first ``num_skipped`` tokens take no part in the pooling.
    """

    token_ids: Sequence[int] | np.ndarray
    token_types: Sequence[int] | None = None
    num_skipped: int = 0


@dataclass(eq=False)
class PoolingRequest:
    """Texts, and what is wanted of them: the ``poolings`` of each, joined, or without any a vector of each token.

    ``on_update`` is called in the engine's thread when all ``vectors`` are there, fp32 ``[features]`` or ``[n,
    features]`` of each text, or when there is an ``error``.
    """

    texts: Sequence[PoolingText]
    poolings: tuple[Pooling, ...]
    on_update: Callable[[PoolingRequest], None]
    vectors: list[np.ndarray] = field(default_factory=list)
    error: BaseException | None = None
    is_cancelled: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or self.is_cancelled or len(self.vectors) == len(self.texts)


@dataclass(frozen=True)
class PoolingBatch:
    """Texts that are computed together: each with its request."""

    texts: tuple[tuple[PoolingRequest, PoolingText], ...]
    fetch: Callable[[], list[np.ndarray]]


class PoolingQueue:
    """The texts that wait, and the batches that the device computes. ``max_tokens`` bounds the tokens of a batch.

    One text may have more tokens than that.
    """

    def __init__(self, network: TextNetwork, max_tokens: int, max_texts: int):
        self.network = network
        self.ops = network.ops
        self.max_tokens = max_tokens
        self.max_texts = max_texts
        self.num_batches = 0
        self.num_texts = 0
        self.num_tokens = 0
        self._waiting: deque[tuple[PoolingRequest, PoolingText]] = deque()
        self._in_flight: deque[PoolingBatch] = deque()

    @property
    def num_waiting(self) -> int:
        """Texts that are in no batch yet."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether there is something to launch or to fetch."""
        return bool(self._waiting or self._in_flight)

    def add(self, request: PoolingRequest) -> None:
        """Let the texts of a request wait behind others."""
        self._waiting.extend((request, text) for text in request.texts)

    def advance(self) -> None:
        """Launch the next batch, and hand over the oldest one if another is under way or nothing waits."""
        if chosen := self._next_texts():
            self._in_flight.append(self._launch(chosen))
        if self._in_flight and (len(self._in_flight) > 1 or not chosen):
            self._hand_over(self._in_flight.popleft())

    def fail(self, error: BaseException) -> None:
        """End all requests with an error."""
        texts = (*self._waiting, *(pair for batch in self._in_flight for pair in batch.texts))
        self._waiting.clear()
        self._in_flight.clear()
        _end_all(texts, error)

    def _next_texts(self) -> tuple[tuple[PoolingRequest, PoolingText], ...]:
        """The next texts that fit into a batch; those of requests that have ended are dropped."""
        chosen: list[tuple[PoolingRequest, PoolingText]] = []
        tokens = 0
        while self._waiting:
            request, text = self._waiting[0]
            if not request.has_ended:
                tokens += len(text.token_ids)
                is_other = bool(chosen) and request.poolings != chosen[0][0].poolings
                if chosen and (tokens > self.max_tokens or len(chosen) == self.max_texts or is_other):
                    break
                chosen.append((request, text))
            self._waiting.popleft()
        return tuple(chosen)

    def _launch(self, chosen: tuple[tuple[PoolingRequest, PoolingText], ...]) -> PoolingBatch:
        texts, poolings = [text for _, text in chosen], chosen[0][0].poolings
        try:
            fetches = self._compute(texts, poolings)
        except MemoryError as error:
            if len(chosen) == 1:
                _end(chosen[0][0], error)
                return PoolingBatch((), list)
            self._waiting.extendleft(reversed(chosen))
            self.max_tokens = max(sum(len(text.token_ids) for text in texts) // 2, 1)
            return PoolingBatch((), list)
        except BaseException as error:
            _end_all(chosen, error)
            raise
        self.num_batches += 1
        self.num_texts += len(texts)
        self.num_tokens += sum(len(text.token_ids) for text in texts)
        lengths = [len(text.token_ids) for text in texts]

        def fetch() -> list[np.ndarray]:
            arrays = [np.asarray(one(), np.float32) for one in fetches]
            if not poolings:
                return [rows.copy() for rows in np.split(arrays[0], np.cumsum(lengths)[:-1])]
            return list(arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1))

        return PoolingBatch(chosen, fetch)

    def _compute(self, texts: Sequence[PoolingText], poolings: tuple[Pooling, ...]) -> list[Callable[[], np.ndarray]]:
        ops = self.ops
        tokens = [np.asarray(text.token_ids, np.int32) for text in texts]
        tables = self.network.tables([len(own) for own in tokens])
        batch = ForwardBatch.packed(ops.array, tokens, block_tables=tables)
        if any(text.token_types is not None for text in texts):
            types = [np.asarray(t.token_types or [0] * len(t.token_ids), np.int32) for t in texts]
            batch = replace(batch, token_types=ops.array(np.concatenate(types)))
        skipped = None
        if any(text.num_skipped for text in texts):
            skipped = ops.array(np.array([text.num_skipped for text in texts], np.int32))
        with ops.step(batch):
            vectors = self.network(batch)
            if not poolings:
                return [ops.fetch(vectors)]
            return [ops.fetch(ops.pool(vectors, batch, pooling, skipped)) for pooling in poolings]

    def _hand_over(self, batch: PoolingBatch) -> None:
        if not batch.texts:
            return
        try:
            vectors = batch.fetch()
        except BaseException as error:
            _end_all(batch.texts, error)
            raise
        touched: dict[PoolingRequest, None] = {}
        for (request, _), vector in zip(batch.texts, vectors, strict=True):
            if not request.has_ended:
                request.vectors.append(vector)
                touched[request] = None
        for request in touched:
            if request.has_ended:
                request.on_update(request)


def _end_all(texts: Sequence[tuple[PoolingRequest, PoolingText]], error: BaseException) -> None:
    """End the requests of some texts with an error."""
    for request in dict.fromkeys(request for request, _ in texts):
        _end(request, error)


def _end(request: PoolingRequest, error: BaseException) -> None:
    """End a request with an error, once."""
    if not request.has_ended:
        if isinstance(error, MemoryError) and not isinstance(error, OutOfMemory):
            error = OutOfMemory(f"no room to compute the texts: {error}")
        request.error = error
        request.on_update(request)
