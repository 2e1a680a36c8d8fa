"""What the survey counts is what the GPU's loader allocates, for every architecture, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cupy import FakeStream, HostPages, replace_cupy
from model_kit import CONFIG
from tiny_models import ENCODER_DECODERS, FAMILIES, GPTS, Golden, RandomWeights, goldens

pytest.importorskip("cupy", reason="CuPy is not installed")

from bminf_lite import models
from bminf_lite import placement as planning
from bminf_lite.backend.base import Backend
from bminf_lite.backend.cuda import streamed_weights as streaming
from bminf_lite.backend.cuda import weight_loader as loading
from bminf_lite.backend.cuda.backend import HEAD_PAD
from bminf_lite.backend.cuda.weight_loader import Loader
from bminf_lite.backend.meta import MetaBackend
from bminf_lite.backend.values import Placement
from bminf_lite.checkpoint.recipe import Scheme
from bminf_lite.cuda.kernels.arrays import round_up
from bminf_lite.cuda.kernels.gemm.plans import GemmKind, GemmLayouts
from bminf_lite.errors import OutOfMemory
from bminf_lite.memory.arena import ALIGNMENT, Arena
from bminf_lite.memory.planner import Machine, plan_memory
from bminf_lite.memory.streaming import StreamedBlocks

CASES = [golden for family in (*FAMILIES, *GPTS, *ENCODER_DECODERS) for golden in goldens(family)]


class FakeArray(np.ndarray):
    """A CuPy array as far as loading uses it."""

    block: Any = None

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)

    def set(self, values: np.ndarray, stream: object) -> None:
        self[...] = values


class FakeArrays:
    """``Arrays`` whose sizes are booked in a real arena, and whose values are elsewhere."""

    device = 0

    def __init__(self, arena: Arena) -> None:
        self.allocator: Any = arena
        self.stream = FakeStream()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> FakeArray:
        array = np.zeros(shape, dtype).view(FakeArray)
        array.block = self.allocator.allocate(array.nbytes)
        return array

    zeros = empty

    def vector(self, values: np.ndarray) -> FakeArray:
        return self.empty((round_up(len(values), 32),), np.float32)[: len(values)]

    def upload(self, values: np.ndarray) -> FakeArray:
        return self.empty(values.shape, values.dtype)

    def current(self) -> Any:
        return nullcontext()

    @contextmanager
    def within(self, allocator: Any) -> Iterator[None]:
        before, self.allocator = self.allocator, allocator
        yield
        self.allocator = before


class FakeCuda(Backend):
    """The loading half of a ``CudaBackend`` over a real arena of host memory."""

    def __init__(self, placement: Placement, limit: int = 1 << 24) -> None:
        super().__init__(np.float16)
        self.placement = placement
        self.arena = Arena(HostPages(limit), limit)
        self.arrays = FakeArrays(self.arena)
        int8_gemm = SimpleNamespace(plan=lambda n, k: SimpleNamespace(layouts=GemmLayouts(GemmKind.ROW_MAJOR, n, k)))
        launches = SimpleNamespace(to_half=lambda matrix, out: None)
        self.loader = Loader(self.arena, self.arrays, launches, int8_gemm)  # type: ignore[arg-type]

    def array(self, values: np.ndarray) -> Any:
        return self.arrays.upload(np.asarray(values))

    def weight(self, parts: Sequence[Any], biases: Sequence[Any] = ()) -> Any:
        return self.loader.weight(parts, biases)

    def blocks(self, build: Callable[[int], Any], count: int) -> Any:
        return self.loader.blocks(build, count, self.placement)

    def table(self, values: np.ndarray) -> Any:
        return self.loader.table(values, self.placement.host_tables)

    def vector(self, values: np.ndarray) -> Any:
        return self.arrays.vector(values)


@pytest.fixture(autouse=True)
def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_cupy(streaming, False, monkeypatch)
    monkeypatch.setattr(loading, "cp", SimpleNamespace(asarray=np.asarray))
    monkeypatch.setattr(loading, "runtime", SimpleNamespace(memcpyAsync=lambda *_: None, memcpyDeviceToHost=2))
    monkeypatch.setattr(loading, "host_table", lambda rows, pitch, _: np.zeros((rows, pitch), "f2").view(FakeArray))
    monkeypatch.setattr(planning, "LIBRARY_BYTES", 0)


def meta_of(golden: Golden, weights: RandomWeights) -> MetaBackend:
    architecture, meta = models.find(golden.config), MetaBackend()
    architecture.Model(architecture.parse(golden.config), weights, meta)
    return meta


def build(golden: Golden, weights: RandomWeights, placement: Placement) -> tuple[FakeCuda, Any]:
    architecture, backend = models.find(golden.config), FakeCuda(placement)
    return backend, architecture.Model(architecture.parse(golden.config), weights, backend)


@pytest.mark.parametrize("kind", ["float", "w8a8", "w8a16"])
@pytest.mark.parametrize("golden", CASES[::4], ids=str)
def test_it_counts_what_loading_allocates(golden: Golden, kind: str) -> None:
    """Never less; a little more where sizes are no multiples of 32."""
    weights = RandomWeights(golden.config, golden.seed, kind != "float", kind == "w8a8")
    meta = meta_of(golden, weights)
    backend, _ = build(golden, weights, Placement())
    counted = meta.non_layer_bytes + sum(map(sum, meta.layer_bytes))
    assert backend.arena.used <= counted <= 1.5 * backend.arena.used


@pytest.mark.parametrize("kind", ["float", "w8a8", "w8a16"])
def test_it_counts_to_the_byte_what_needs_no_padding(kind: str) -> None:
    config = CONFIG | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320}
    weights = RandomWeights(config, 1, kind != "float", kind == "w8a8")
    architecture, meta, backend = models.find(config), MetaBackend(), FakeCuda(Placement())
    built = [architecture.Model(architecture.parse(config), weights, ops) for ops in (meta, backend)]
    assert len(built) == 2 and backend.arena.used == meta.non_layer_bytes + sum(meta.layer_bytes[0])


@pytest.mark.parametrize("golden", CASES[::4], ids=str)
def test_every_layer_fits_a_slot_of_the_size_that_it_says(golden: Golden) -> None:
    weights = RandomWeights(golden.config, golden.seed, True)
    meta = meta_of(golden, weights)
    largest = max(map(max, meta.layer_bytes))
    count = sum(map(len, meta.layer_bytes))
    backend, model = build(golden, weights, Placement(tuple(range(count)), 2, largest))
    assert backend.arena.used <= meta.non_layer_bytes + 2 * largest * len(meta.layer_bytes)
    for link, stack in zip(backend.loader._links, meta.layer_bytes, strict=True):
        assert all(image.nbytes <= size for image, size in zip(link.images, stack, strict=True))
    assert any(isinstance(value, StreamedBlocks) for value in vars(model).values())
    backend.loader.close()


def test_heads_are_padded_as_planned() -> None:
    assert planning.HEAD_PAD == HEAD_PAD


def test_a_plan_holds_what_it_promises() -> None:
    """Loading under the limit and then taking the cache and scratch that were planned never runs out of memory."""
    config = CONFIG | {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 320}
    architecture, weights = models.find(config), RandomWeights(config, 1, True)
    requirements = planning.requirements(architecture, config, lambda name: Scheme.W8A8)
    streamed = set()
    for limit in range(512, 700 << 10, 7 << 10):
        try:
            plan = plan_memory(requirements, Machine(limit // ALIGNMENT * ALIGNMENT), 64)
        except OutOfMemory:
            assert not streamed
            continue
        backend = FakeCuda(plan.placement, limit)
        model = architecture.Model(architecture.parse(config), weights, backend)
        layer = plan.cache_bytes // (len(requirements.layers) + 1) // 2 // ALIGNMENT * ALIGNMENT
        kept = [backend.arena.allocate(layer) for _ in range(2 * len(requirements.layers))]
        kept.append(backend.arena.allocate(plan.scratch_bytes // ALIGNMENT * ALIGNMENT))
        assert backend.arena.peak_reserved <= limit
        assert model is not None
        backend.loader.close()
        streamed.add(len(plan.streamed))
    assert streamed == {0, 3, 4, 5, 6, 7, 8}
