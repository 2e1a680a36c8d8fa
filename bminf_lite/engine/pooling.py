"""Texts that become vectors, beside the requests that generate: whole texts, packed, one batch between two steps.

A text is computed in one batch, and keeps nothing. Batches are made in the order in which texts come, so a request of
many texts takes several. A text of more tokens than a batch is computed in pieces, between several steps, by a model
whose tokens see none behind them. The queue runs in the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..backend.operations.rows import pooled
from ..backend.values import Array, ForwardBatch, Pooling
from ..errors import OutOfMemory
from .captured_texts import CapturedTexts, TextNetwork

FEWEST_TOKENS = 32
"""A piece of a text has no fewer tokens, however short memory is."""
SUCCESSES = 8
"""Batches that must fit after one that did not, before larger ones are tried; twice as many after each failure."""
MOST_SUCCESSES = 1024


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


PoolingPair = tuple[PoolingRequest, PoolingText]
"""A text with its request."""


@dataclass(frozen=True)
class PoolingBatch:
    """Texts that are computed together: each with its request."""

    texts: tuple[PoolingPair, ...]
    fetch: Callable[[], list[np.ndarray]]


@dataclass(frozen=True)
class LongText:
    """A text that is computed in pieces of ``size`` tokens, as far as ``work`` has come."""

    pair: PoolingPair
    size: int
    work: Generator[None, None, list[Array]]


class PoolingQueue:
    """The texts that wait, and the batches that the device computes. ``max_tokens`` bounds the tokens of a batch.

    One text may have more tokens than that. A batch for which there is no memory is halved, and so is the bound until
    enough batches have fit; then it doubles, up to ``most_tokens``. Batches of up to ``captured_tokens`` tokens are
    captured, if the backend has sizes for them.
    """

    def __init__(self, network: TextNetwork, max_tokens: int, max_texts: int, captured_tokens: int = 0):
        self.network = network
        self.ops = network.ops
        self.max_tokens = self.most_tokens = max_tokens
        self.max_texts = max_texts
        self.num_batches = 0
        self.num_texts = 0
        self.num_tokens = 0
        self._captured = CapturedTexts(network, min(captured_tokens, max_tokens))
        self._waiting: deque[PoolingPair] = deque()
        self._in_flight: deque[PoolingBatch] = deque()
        self._long: LongText | None = None
        self._successes_left = self._successes = SUCCESSES

    @property
    def num_waiting(self) -> int:
        """Texts that are in no batch yet."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether there is something to launch or to fetch."""
        return bool(self._waiting or self._in_flight or self._long)

    def add(self, request: PoolingRequest) -> None:
        """Let the texts of a request wait behind others."""
        self._waiting.extend((request, text) for text in request.texts)

    def advance(self) -> None:
        """Launch the next batch, and hand over the oldest one if another is under way or nothing waits.

        Of a text in pieces, about the work of one batch is done.
        """
        launched = self._long is None and (chosen := self._next_texts()) and self._launch(chosen)
        if launched:
            self._in_flight.append(launched)
        elif self._long is not None:
            self._go_on(self._long)
        if self._in_flight and (len(self._in_flight) > 1 or not launched):
            self._hand_over(self._in_flight.popleft())

    def fail(self, error: BaseException) -> None:
        """End all requests with an error."""
        texts = (*self._waiting, *(pair for batch in self._in_flight for pair in batch.texts))
        if self._long is not None:
            texts += (self._long.pair,)
            self._long.work.close()
        self._long = None
        self._waiting.clear()
        self._in_flight.clear()
        self._captured.close()
        _end_all(texts, error)

    def warm_up(self) -> None:
        """Capture the batches of few tokens. Raises ``OutOfMemory``."""
        self._captured.warm_up()

    def close(self) -> None:
        """Give the memory of captured batches back."""
        self._captured.close()

    def _next_texts(self) -> tuple[PoolingPair, ...]:
        """The next texts that fit into a batch; those of requests that have ended are dropped."""
        chosen: list[PoolingPair] = []
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

    def _launch(self, chosen: tuple[PoolingPair, ...]) -> PoolingBatch | None:
        """Start to compute texts. None for those that cannot be now, and for one that is computed in pieces."""
        texts, poolings = [text for _, text in chosen], chosen[0][0].poolings
        count = sum(len(text.token_ids) for text in texts)
        size = max(self.max_tokens, FEWEST_TOKENS)
        if len(chosen) == 1 and count > size and self.network.reads_pieces:
            tokens = np.asarray(texts[0].token_ids, np.int32)
            self._long = LongText(chosen[0], size, self.network.pieces(tokens, size))
            return None
        try:
            fetches = self._compute(texts, poolings)
        except MemoryError as error:
            can_halve = len(chosen) > 1 or (self.network.reads_pieces and count > FEWEST_TOKENS)
            if not can_halve:
                _end(chosen[0][0], error)
                return None
            self._waiting.extendleft(reversed(chosen))
            self._lower_bound(count)
            return None
        except BaseException as error:
            _end_all(chosen, error)
            raise
        self._count(texts)
        lengths = [len(text.token_ids) for text in texts]

        def fetch() -> list[np.ndarray]:
            arrays = [np.asarray(one(), np.float32) for one in fetches]
            if not poolings:
                return [rows.copy() for rows in np.split(arrays[0], np.cumsum(lengths)[:-1])]
            return list(arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1))

        return PoolingBatch(chosen, fetch)

    def _go_on(self, long: LongText) -> None:
        """Compute the next parts of a text in pieces, about the work of a batch."""
        request, text = long.pair
        if request.has_ended:
            long.work.close()
            self._long = None
            return
        try:
            for _ in range(self.network.parts_at_once):
                next(long.work)
        except StopIteration as end:
            self._long = None
            self._count([text])
            vectors: list[Array] = end.value
            self._in_flight.append(PoolingBatch((long.pair,), lambda: [self._joined(vectors, request, text)]))
        except MemoryError as error:
            self._long = None
            if long.size <= FEWEST_TOKENS:
                _end(request, error)
                return
            self._waiting.appendleft(long.pair)
            self._lower_bound(long.size)
        except BaseException as error:
            self._long = None
            _end(request, error)
            raise

    def _joined(self, vectors: list[Array], request: PoolingRequest, text: PoolingText) -> np.ndarray:
        """What is wanted of a text whose pieces have ``vectors``."""
        if request.poolings == (Pooling.LAST,):
            vectors = vectors[-1:]
        rows = np.concatenate([np.asarray(self.ops.host(piece), np.float32) for piece in vectors])
        if not request.poolings:
            return rows
        left = len(text.token_ids) - text.num_skipped
        if left <= 0:
            return np.zeros(rows.shape[1] * len(request.poolings), np.float32)
        return np.concatenate([pooled(rows[-left:], pooling, text.num_skipped) for pooling in request.poolings])

    def _count(self, texts: Sequence[PoolingText]) -> None:
        """Note that texts were computed. Enough of them raise a bound that was lowered."""
        self.num_batches += 1
        self.num_texts += len(texts)
        self.num_tokens += sum(len(text.token_ids) for text in texts)
        if self.max_tokens < self.most_tokens:
            self._successes_left -= 1
            if self._successes_left <= 0:
                self.max_tokens = min(2 * self.max_tokens, self.most_tokens)
                self._successes_left = self._successes

    def _lower_bound(self, tokens: int) -> None:
        """Let batches have at most half of ``tokens``, for which there is no memory."""
        self.max_tokens = max(min(tokens, self.max_tokens) // 2, 1)
        self._successes_left = self._successes
        self._successes = min(2 * self._successes, MOST_SUCCESSES)

    def _compute(self, texts: Sequence[PoolingText], poolings: tuple[Pooling, ...]) -> list[Callable[[], np.ndarray]]:
        """Start to compute texts. The results return the vectors of each pooling, or without any of all tokens."""
        ops, types = self.ops, None
        tokens = [np.asarray(text.token_ids, np.int32) for text in texts]
        if any(text.token_types is not None for text in texts):
            types = np.concatenate([np.asarray(t.token_types or [0] * len(t.token_ids), np.int32) for t in texts])
        captured = self._captured.run(tokens, types) if poolings else None  # which another batch may overwrite
        if captured is not None:
            batch, vectors = captured
            with ops.step(batch):
                return self._pooled(vectors, batch, texts, poolings)
        batch = ForwardBatch.packed(ops.upload, tokens, block_tables=self.network.tables([len(own) for own in tokens]))
        if types is not None:
            batch = replace(batch, token_types=ops.upload(types))
        with ops.step(batch):
            vectors = self.network(batch)
            return self._pooled(vectors, batch, texts, poolings) if poolings else [ops.fetch(vectors)]

    def _pooled(
        self, vectors: Array, batch: ForwardBatch, texts: Sequence[PoolingText], poolings: tuple[Pooling, ...]
    ) -> list[Callable[[], np.ndarray]]:
        """Start to pool the ``vectors`` of a batch, in which padding may follow the ``texts``."""
        ops, skipped = self.ops, None
        if any(text.num_skipped for text in texts):
            counts = np.zeros(batch.batch_size, np.int32)
            counts[: len(texts)] = [text.num_skipped for text in texts]
            skipped = ops.upload(counts)
        return [ops.fetch(ops.pool(vectors, batch, pooling, skipped)[: len(texts)]) for pooling in poolings]

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


def _end_all(texts: Sequence[PoolingPair], error: BaseException) -> None:
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
