"""Ranks that load at once have the shards of a whole load, read each byte of a file once, and stop together."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_peers import Ranks

from bminf_lite.backend.quantization import Int8Weight, weight_columns
from bminf_lite.backend.stored_matrix import StoredMatrix
from bminf_lite.backend.values import Placement
from bminf_lite.errors import CheckpointError
from bminf_lite.memory import staging

pytestmark = pytest.mark.gpu
OUT, IN, LAYERS = 96, 384, 3
STAGING = "bminf-lite-read", "bminf-lite-copy"


@pytest.fixture(params=["one GPU", "two GPUs", "three ranks"])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Ranks whose staging buffers hold a few rows."""
    monkeypatch.setattr(staging, "BUFFER_BYTES", 4096)
    devices = {"one GPU": (0, 0), "three ranks": (0, 0, 0)}.get(request.param, (0, 1))
    before = set(threading.enumerate())  # a model that another test left open may have readers
    with closing(Ranks(devices)) as made:
        yield made
    assert not [t.name for t in set(threading.enumerate()) - before if t.name.startswith(STAGING)]


class File:
    """Matrices that are read as those of a file, and how many bytes of it were read."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()
        self.fails_at: np.ndarray | None = None

    def stored(self, values: np.ndarray) -> Any:
        content = np.ascontiguousarray(values).view(np.uint8).reshape(-1)

        def read(buffer: memoryview, offset: int) -> None:
            if self.fails_at is values:
                raise CheckpointError("model.safetensors: changed")
            np.frombuffer(buffer, np.uint8)[...] = content[offset : offset + len(buffer)]
            with self.lock:
                self.count += len(buffer)

        return StoredMatrix(values.shape, values.dtype, read)


def matrices(dtype: Any) -> list[np.ndarray]:
    """For each layer a matrix whose rows are divided and one whose columns are."""
    random = np.random.default_rng(0)
    shapes = [(OUT, IN), (OUT, IN)] * LAYERS
    return [random.integers(-100, 100, shape).astype(dtype) for shape in shapes]


def load(ops: Any, rank: int, file: File, found: list[np.ndarray], size: int, place: Placement) -> Any:
    """The layers of a rank: its rows of every other matrix, its columns of the rest."""
    rows = slice(rank * OUT // size, (rank + 1) * OUT // size)
    columns = slice(rank * IN // size, (rank + 1) * IN // size)

    def weight(values: np.ndarray, is_divided_by_rows: bool) -> Any:
        whole: Any = file.stored(values)
        if values.dtype == np.int8:
            whole = Int8Weight(whole, np.ones(OUT, np.float16), dynamic=False)
            if is_divided_by_rows:
                return Int8Weight(whole.codes[rows], whole.scale[rows], dynamic=False)
        return whole[rows] if is_divided_by_rows else weight_columns(whole, columns)

    def layer(index: int) -> list[Any]:
        first, second = found[2 * index : 2 * index + 2]
        return [ops.weight([weight(first, True)]), ops.weight([weight(second, False)])]

    return ops.loader.blocks(layer, LAYERS, place)


def on_host(ops: Any, layers: Any) -> list[np.ndarray]:
    found = []
    for layer in layers:
        for weight in layer:
            ops.stream.synchronize()
            with ops.arrays.current():
                found.append(weight.matrix.get()[: weight.out_features, : weight.in_features])
    return found


@pytest.mark.parametrize("dtype", [np.int8, np.float16, ml_dtypes.bfloat16], ids=["int8", "fp16", "bf16"])
@pytest.mark.parametrize("streamed", [(), (0, 1, 2)], ids=["resident", "streamed"])
def test_shards_equal_those_of_a_whole_load(ranks: Ranks, dtype: Any, streamed: tuple[int, ...]) -> None:
    size, file, whole = len(ranks.backends), File(), matrices(dtype)
    nbytes = 4 * OUT * IN * np.dtype(np.float16).itemsize
    place = Placement(streamed=streamed, slots=2, slot_size=nbytes) if streamed else Placement()
    layers = ranks.run(lambda ops, rank: load(ops, rank, file, whole, size, place))
    assert file.count == sum(values.nbytes for values in whole)
    kept = np.int8 if dtype is np.int8 else np.float16
    for rank, shards in enumerate(ranks.run(lambda ops, rank: on_host(ops, layers[rank]))):
        for index, (values, shard) in enumerate(zip(whole, shards, strict=True)):
            parts = np.split(values.astype(kept), size, axis=index % 2)
            np.testing.assert_array_equal(shard, parts[rank])


@pytest.mark.parametrize("fails", ["reading rows", "reading columns", "making a layer"])
def test_an_error_of_one_rank_ends_all_and_leaves_nothing(ranks: Ranks, fails: str) -> None:
    size, file, whole = len(ranks.backends), File(), matrices(np.int8)
    used = [ops.arena.used for ops in ranks.backends]
    if fails != "making a layer":
        file.fails_at = whole[2 if "rows" in fails else 3]

    def work(ops: Any, rank: int) -> Any:
        if rank == 1 and fails == "making a layer":
            with ops.loader.uploading():
                load(ops, rank, file, whole[:2] * LAYERS, size, Placement())
                raise CheckpointError("model.safetensors: changed")
        return load(ops, rank, file, whole, size, Placement())

    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"^model\.safetensors: changed$"):
            ranks.run(work)
    file.fails_at = None
    layers = ranks.run(lambda ops, rank: load(ops, rank, file, whole, size, Placement()))
    found = ranks.run(lambda ops, rank: on_host(ops, layers[rank]))
    np.testing.assert_array_equal(found[1][-1], np.split(whole[-1], size, axis=1)[1])
    layers.clear()
    found.clear()
    gc.collect()  # tracebacks refer to themselves
    assert [ops.arena.used for ops in ranks.backends] == used
