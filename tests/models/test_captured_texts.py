"""Texts that are computed in a padded, captured batch have the vectors that they have in one of their own."""

from __future__ import annotations

import numpy as np
import pytest
from test_encoders import cases
from tiny_models import RandomWeights, goldens
from tolerances import assert_close

from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import Pooling
from bminf_lite.engine.captured_texts import TextNetwork
from bminf_lite.engine.pooling import PoolingQueue, PoolingRequest, PoolingText

SIZES = (16, 64, 160)
BATCHES = [[1], [16], [5, 1, 9], [17], [63, 1, 64], [7] * 9, [130], [16, 16]]
"""Lengths of texts; the last two fit no size: a text is too long, or texts are too many for the padded batch."""
POOLINGS = (Pooling.MEAN, Pooling.LAST, Pooling.FIRST)
DECODERS = ("qwen3", "gemma2", "granitemoehybrid", "deepseek_v3", "qwen3_next")
ENCODERS = [case.name for case in cases()]
BERT = next(case.name for case in cases() if case.config["model_type"] == "bert")


def decoder(backend: Backend, family: str) -> TextNetwork:
    """A decoder that embeds, in w8a8."""
    config = next(goldens(family)).config | {"max_position_embeddings": 512, "n_positions": 512}
    architecture = models.embedder(models.find(config))
    weights = RandomWeights(config, 1, quantized=True, architecture=architecture)
    network: TextNetwork = architecture.Model(architecture.parse(config), weights, backend)
    return network


def encoder(backend: Backend, name: str) -> TextNetwork:
    """An encoder, in w8a8."""
    return next(case for case in cases() if case.name == name).network(backend, "w8a8")


def vectors(queue: PoolingQueue, texts: list[PoolingText], poolings: tuple[Pooling, ...]) -> list[np.ndarray]:
    """The vectors of texts, all in one batch."""
    request = PoolingRequest(texts, poolings, lambda request: None)
    queue.add(request)
    while queue.has_work:
        queue.advance()
    assert request.error is None
    return [np.array(vector) for vector in request.vectors]


def texts_of(lengths: list[int], with_types: bool = False) -> list[PoolingText]:
    """Random texts; the first token of every other one takes no part."""
    rng = np.random.default_rng(lengths)
    types = [[int(i >= n // 2) for i in range(n)] if with_types else None for n in lengths]
    return [PoolingText(rng.integers(3, 50, n).astype(np.int32), types[i], i % 2) for i, n in enumerate(lengths)]


def assert_alike(found: list[np.ndarray], expected: list[np.ndarray], backend: Backend) -> None:
    for one, other in zip(found, expected, strict=True):
        if backend.has_one_order:
            np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))
        else:
            assert_close(one, other, "logits", backend.activation_dtype, np.abs(other).max())


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_the_vectors_of_a_captured_batch_are_those_of_texts_alone(
    backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = decoder(backend, name) if name in DECODERS else encoder(backend, name)
    longest = SIZES[-1] if name in DECODERS else 40  # the tiny encoders have few positions
    alone = PoolingQueue(network, 1, 1)
    monkeypatch.setattr(backend, "text_sizes", SIZES)
    captured = PoolingQueue(network, 1 << 12, 100, captured_tokens=SIZES[-1])
    assert [size.tokens for size in captured._captured.sizes] == [*SIZES]
    for lengths in BATCHES:
        texts = texts_of([min(length, longest) for length in lengths])
        expected = vectors(alone, texts, POOLINGS)
        for _ in range(4):  # a GPU captures in the third run
            assert_alike(vectors(captured, texts, POOLINGS), expected, backend)
    captured.close()


def test_token_types_are_captured_beside_batches_without(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    network = encoder(backend, BERT)
    alone = PoolingQueue(network, 1, 1)
    monkeypatch.setattr(backend, "text_sizes", SIZES)
    captured = PoolingQueue(network, 1 << 12, 100, captured_tokens=SIZES[-1])
    for turn in range(8):
        texts = texts_of([9, 5], with_types=turn % 2 == 0)
        assert_alike(vectors(captured, texts, POOLINGS), vectors(alone, texts, POOLINGS), backend)
    assert len(captured._captured._captured) == 2
    captured.close()


def test_each_size_is_captured_at_the_warm_up_and_vectors_of_tokens_are_not(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "text_sizes", SIZES)
    captures, capture = list[object](), backend.capture

    def watched(work):  # type: ignore[no-untyped-def]
        captures.append(work)
        return capture(work)

    monkeypatch.setattr(backend, "capture", watched)
    network = decoder(backend, "qwen3")
    queue = PoolingQueue(network, 100, 100, captured_tokens=SIZES[-1])
    queue.warm_up()
    assert len(captures) == 2, "the size that is larger than a batch is left out"
    alone = PoolingQueue(network, 1, 1)
    texts = texts_of([30, 20])
    assert_alike(vectors(queue, texts, POOLINGS), vectors(alone, texts, POOLINGS), backend)
    assert_alike(vectors(queue, texts, ()), vectors(alone, texts, ()), backend)
    assert len(captures) == 2
    queue.close()
