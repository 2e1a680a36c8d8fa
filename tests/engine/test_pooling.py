"""The queue of texts that become vectors: batches in order, too little memory, errors, and cancelled requests."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest

from bminf_lite.backend.base import Backend
from bminf_lite.backend.operations.rows import pooled
from bminf_lite.backend.values import ForwardBatch, Pooling
from bminf_lite.engine.pooling import PoolingQueue, PoolingRequest, PoolingText
from bminf_lite.errors import OutOfMemory


class StubNetwork:
    """A token's vector is its number and its position, and batches of more than ``room`` tokens do not fit.

    It has two layers.
    """

    parts_at_once = 2

    def __init__(self, room: int = 1 << 20, reads_pieces: bool = False):
        self.ops = Backend(np.float32)
        self.room = room
        self.reads_pieces = reads_pieces
        self.batches: list[list[int]] = []
        self.error: BaseException | None = None

    def tables(self, lengths: Sequence[int]) -> list[np.ndarray]:
        return []

    def caches(self, tokens: int, texts: int) -> Any:
        raise AssertionError("nothing is captured")

    def __call__(self, batch: ForwardBatch, caches: Any = None) -> Any:
        if self.error is not None:
            raise self.error
        if len(batch.tokens) > self.room:
            raise OutOfMemory("no room")
        self.batches.append(np.diff(batch.cu_seqlens).tolist())
        return np.stack([batch.tokens, np.arange(len(batch.tokens))], axis=1).astype(np.float32)

    def pieces(self, tokens: np.ndarray, size: int) -> Generator[None, None, list[Any]]:
        count = -(-len(tokens) // size)
        for _ in range(2 * count):
            if size > self.room:
                raise OutOfMemory("no room")
            yield
        self.batches.append([size] * count)
        return np.array_split(np.stack([tokens, np.arange(len(tokens))], axis=1).astype(np.float32), count)


def request_of(*lengths: int, poolings: tuple[Pooling, ...] = (Pooling.LAST,)) -> PoolingRequest:
    texts = [PoolingText([10 * n + i for i in range(n)]) for n in lengths]
    return PoolingRequest(texts, poolings, lambda request: ended.append(request))


ended: list[PoolingRequest] = []


@pytest.fixture(autouse=True)
def nothing_ended() -> None:
    ended.clear()


def run(queue: PoolingQueue) -> None:
    for _ in range(100):
        if not queue.has_work:
            return
        queue.advance()
    raise AssertionError("the queue does not end")


def test_texts_are_batched_in_order_up_to_a_number_of_tokens():
    network = StubNetwork()
    queue = PoolingQueue(network, max_tokens=10, max_texts=3)
    requests = [request_of(4, 5), request_of(3), request_of(12), request_of(1, 1, 1, 1)]
    for request in requests:
        queue.add(request)
    run(queue)
    assert network.batches == [[4, 5], [3], [12], [1, 1, 1], [1]]
    assert ended == requests and queue.num_texts == 8 and queue.num_waiting == 0
    for request in requests:
        lasts = [text.token_ids[-1] for text in request.texts]
        assert [vector[0] for vector in request.vectors] == lasts


def test_requests_of_other_poolings_have_batches_of_their_own_and_tokens_have_vectors():
    network = StubNetwork()
    queue = PoolingQueue(network, 100, 100)
    whole, joined = request_of(3, 2, poolings=()), request_of(4, poolings=(Pooling.FIRST, Pooling.LAST))
    queue.add(whole)
    queue.add(joined)
    run(queue)
    assert network.batches == [[3, 2], [4]]
    assert [vectors.shape for vectors in whole.vectors] == [(3, 2), (2, 2)]
    assert joined.vectors[0].tolist() == [40, 0, 43, 3]


def test_too_little_memory_halves_batches_and_ends_what_never_fits():
    network = StubNetwork(room=9)
    queue = PoolingQueue(network, 100, 100)
    fits, never = request_of(4, 4, 4, 4), request_of(10)
    queue.add(fits)
    queue.add(never)
    run(queue)
    assert len(fits.vectors) == 4 and fits.error is None
    assert isinstance(never.error, OutOfMemory) and set(ended) == {fits, never}


def test_a_bound_that_was_lowered_rises_again_up_to_the_first_one():
    network = StubNetwork(room=30)
    queue = PoolingQueue(network, 40, 100)
    bounds = []
    for _ in range(30):
        queue.add(request_of(10, 10, 10, 10))
        run(queue)
        bounds.append(queue.max_tokens)
        if len(bounds) == 20:
            network.room = 100
    assert bounds[:4] == [20, 20, 20, 40], "eight batches fit, then the bound rises"
    assert bounds[4:11] == [20] * 7 and bounds[11:13] == [40, 20], "which takes longer after each failure"
    assert bounds[-1] == 40 and len(ended) == 30 and all(request.error is None for request in ended)


def test_a_text_of_more_tokens_than_a_batch_is_computed_in_pieces_between_steps():
    network = StubNetwork(reads_pieces=True)
    queue = PoolingQueue(network, 40, 100)
    every = tuple(Pooling)
    long, short = request_of(130, poolings=every), request_of(9, poolings=every)
    last, tokens = request_of(130), request_of(130, poolings=())
    for request in (long, short, last, tokens):
        queue.add(request)
    turns = 0
    while not long.vectors:
        queue.advance()
        turns += 1
    assert turns == 5, "four pieces of two layers, two parts in a turn"
    run(queue)
    assert network.batches == [[40] * 4, [9], [40] * 4, [40] * 4] and queue.num_texts == 4
    expected = np.stack([np.arange(1300, 1430), np.arange(130)], axis=1).astype(np.float32)
    np.testing.assert_array_equal(long.vectors[0], np.concatenate([pooled(expected, pooling) for pooling in every]))
    np.testing.assert_array_equal(last.vectors[0], expected[-1])
    np.testing.assert_array_equal(tokens.vectors[0], expected)


def test_pieces_become_smaller_where_memory_is_short_and_end_with_their_request():
    network = StubNetwork(room=50, reads_pieces=True)
    queue = PoolingQueue(network, 200, 100)
    fits, dropped, failed = request_of(150), request_of(150), request_of(150)
    queue.add(fits)
    run(queue)
    assert network.batches == [[37] * 5] and fits.error is None and len(fits.vectors) == 1
    queue.add(dropped)
    queue.advance()
    dropped.is_cancelled = True
    run(queue)
    network.room = 9
    queue.add(failed)
    run(queue)
    assert isinstance(failed.error, OutOfMemory) and not dropped.vectors
    network.room = 99
    queue.add(other := request_of(150))
    queue.advance()
    queue.fail(RuntimeError("the device is gone"))
    assert "is gone" in str(other.error) and not queue.has_work


def test_a_piece_has_no_fewer_tokens_than_the_bound_however_short_memory_was():
    """Many short texts that did not fit together lower the bound below it; a longer text goes on in such pieces."""
    network = StubNetwork(room=0, reads_pieces=True)
    queue = PoolingQueue(network, 32, 100)
    queue.add(request_of(*[1] * 32))
    run(queue)
    assert queue.max_tokens == 1
    network.room = 40
    queue.add(whole := request_of(30))
    queue.add(cut := request_of(100))
    run(queue)
    assert network.batches == [[30], [32] * 4]
    assert whole.error is None and cut.error is None and len(cut.vectors) == 1


def test_another_error_ends_the_requests_and_is_raised():
    network = StubNetwork()
    queue = PoolingQueue(network, 5, 100)
    first, second = request_of(4), request_of(4)
    queue.add(first)
    queue.add(second)
    network.error = RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="is gone"):
        queue.advance()
    queue.fail(network.error)
    assert first.error is second.error is network.error and ended == [first, second] and not queue.has_work


def test_a_cancelled_request_is_left_out():
    network = StubNetwork()
    queue = PoolingQueue(network, 100, 100)
    kept, dropped = request_of(2), request_of(3)
    for request in (dropped, kept):
        queue.add(request)
    dropped.is_cancelled = True
    run(queue)
    assert network.batches == [[2]] and ended == [kept]
