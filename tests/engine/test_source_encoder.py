"""Encoding sources at captured sizes equals encoding each of them alone, and captures nothing after a warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_kit import WatchedBackend, make_model

from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import BLOCK_SIZE, Placement
from bminf_lite.cuda.runtime.graphs import CudaGraph
from bminf_lite.engine.source_encoder import SourceEncoder
from bminf_lite.layers.cache import KVCache, blocks_for

CONFIG: dict[str, Any] = {
    "model_type": "cpm2",
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "max_position_embeddings": 300,
}
NUM_BLOCKS = 12


def make_encoder(ops: Backend, int8: bool = False, chunk: int = 2048) -> SourceEncoder:
    """An encoder of a small w8a8 model, whose cache holds ones where nothing is written."""
    model = make_model(ops, quantized=True, **CONFIG)
    cache = KVCache(ops, model.engine_config.cache_layout.with_int8(int8), [NUM_BLOCKS])
    for layer in cache.layers:
        for array in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            if array is not None:
                ops.assign(array, np.ones(array.shape, array.dtype))
    return SourceEncoder(model.network, cache, chunk)  # type: ignore[arg-type]


def contents(encoder: SourceEncoder) -> list[np.ndarray]:
    host = encoder.network.ops.host
    arrays = [
        x for c in encoder.cache.layers for x in (c.keys, c.values, c.key_scales, c.value_scales) if x is not None
    ]
    return [np.array(host(x)) for x in arrays]


def blocks_of(lengths: list[int], order: np.random.Generator) -> list[list[int]]:
    """Blocks for each source, none of them shared."""
    free = list(order.permutation(np.arange(1, NUM_BLOCKS)))
    return [[int(free.pop()) for _ in range(blocks_for(n))] for n in lengths]


def sources_of(lengths: list[int]) -> list[list[int]]:
    return [np.random.default_rng([i, n]).integers(0, 61, n).tolist() for i, n in enumerate(lengths)]


SIZES = (5, 32, 64, 100, 256)
PADDED, ALONE = make_encoder(WatchedBackend(source_sizes=SIZES)), make_encoder(WatchedBackend())


@settings(max_examples=12)
@given(st.lists(st.integers(1, 130), min_size=1, max_size=4), st.integers(0, 99))
def test_any_sources_fill_their_blocks_and_no_others(lengths: list[int], seed: int) -> None:
    tables, sources = blocks_of(lengths, np.random.default_rng(seed)), sources_of(lengths)
    for encoder in (PADDED, ALONE):
        for layer in encoder.cache.layers:
            layer.keys[:] = layer.values[:] = 1
    PADDED.encode(sources, tables)
    for source, table in zip(sources, tables, strict=True):
        ALONE.encode_eagerly([source], [table])
    for found, expected in zip(contents(PADDED), contents(ALONE), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_each_size_is_captured_once_at_the_warm_up() -> None:
    ops = WatchedBackend(source_sizes=SIZES)
    encoder = make_encoder(ops, chunk=100)
    encoder.warm_up()
    assert ops.captures == 4, "the size that is larger than a planned step is left out"
    for lengths in ([1], [5], [6], [100], [40, 60], [101], [1] * 11):
        encoder.encode(sources_of(lengths), blocks_of(lengths, np.random.default_rng(0)))
    assert ops.captures == 4


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_sizes(cuda_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(cuda_backend, "source_sizes", (16, 64, 128, 256))
    return cuda_backend


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The graphs that are replayed, by their ``id``."""
    found, replay = list[int](), CudaGraph.replay

    def watched(graph: CudaGraph[Any], stream: int) -> None:
        found.append(id(graph))
        replay(graph, stream)

    monkeypatch.setattr(CudaGraph, "replay", watched)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True], ids=["fp16 cache", "int8 cache"])
def test_the_same_bits_as_launched_one_by_one(with_sizes: Backend, replays: list[int], int8: bool) -> None:
    captured, eager = make_encoder(with_sizes, int8), make_encoder(with_sizes, int8)
    captured.warm_up()
    replays.clear()
    mixtures = [[1], [16], [17], [128], [130], [63, 1, 64], [5] * 5, [200], [9] * 3]
    for lengths in mixtures:
        tables, sources = blocks_of(lengths, np.random.default_rng(len(lengths))), sources_of(lengths)
        captured.encode(sources, tables)
        for source, table in zip(sources, tables, strict=True):
            eager.encode_eagerly([source], [table])
        for found, expected in zip(contents(captured), contents(eager), strict=True):
            assert found.tobytes() == expected.tobytes(), lengths
    assert len(replays) == len(mixtures) and len(set(replays)) == 4
    for encoder in (captured, eager):
        encoder.close()
        encoder.cache.close()


@pytest.fixture
def streaming_backend() -> Iterator[Any]:
    from bminf_lite.backend.cuda.backend import CudaBackend

    backend = CudaBackend(0)
    yield backend
    backend.close()


@pytest.mark.gpu
@pytest.mark.parametrize("streamed", [(0, 1, 2), (3, 4, 5)], ids=["encoder", "decoder"])
def test_streamed_layers_are_not_captured(
    streaming_backend: Any, with_sizes: Backend, streamed: tuple[int, ...]
) -> None:
    """Neither those of an encoder, nor those of a decoder, which projects the source's keys and values."""
    sizes = {**CONFIG, "num_layers": 3, "num_decoder_layers": 3, "limits": {"prefix_cache": False}}
    streaming_backend.placement = Placement(streamed, 2, 1 << 20)
    streaming_backend.source_sizes = with_sizes.source_sizes
    streaming, resident = (make_model(ops, quantized=True, **sizes) for ops in (streaming_backend, with_sizes))
    for source in sources_of([20, BLOCK_SIZE, 30, 60]):
        options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        expected = resident.generate(source, **options).token_ids
        assert streaming.generate(source, **options).token_ids == expected
    assert {step.forward.graph is None for step in captured_encodings(streaming)} == {True}
    assert {step.forward.graph is None for step in captured_encodings(resident)} == {False}


def captured_encodings(model: Model) -> list[Any]:
    runner: Any = model._engine._runner
    return list(runner.executors[0].encoder._captured.values())
