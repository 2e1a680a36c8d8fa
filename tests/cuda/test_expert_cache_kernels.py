"""A GPU's cache of experts does what its definition does, from choice to choice, and holds what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bminf_lite.memory.expert_cache import ExpertPool, zipf_routing

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy is not installed")

from bminf_lite.cuda.kernels.experts.fetch import COPIES, CachedLayer, ExpertCache, FetchKernels  # noqa: E402
from bminf_lite.cuda.kernels.launcher import Launcher  # noqa: E402


class Device:
    """Layers of random experts, of ``words`` times 16 bytes in both matrices, and the cache of them."""

    def __init__(self, kernels: FetchKernels, num_slots: int, experts: list[int], words: tuple[int, int]) -> None:
        random, count = np.random.default_rng(0), sum(experts)
        self.kernels = kernels
        self.hosts = [[random.integers(0, 256, (own, 16 * n), np.uint8) for n in words] for own in experts]
        self.mapped = [[cp.asarray(values) for values in layer] for layer in self.hosts]

        def full(size: int, value: int) -> Any:
            return cp.asarray(np.full(size, value, np.int32))

        self.cache = ExpertCache(
            full(count, -1), full(num_slots, -1), full(count, 0), full(len(experts), 0), full(COPIES, 0),
            cp.asarray(np.zeros(2, np.uint64)), *(cp.asarray(np.zeros((num_slots, 16 * n), np.uint8)) for n in words),
        )  # fmt: skip
        starts = np.cumsum([0, *experts]).tolist()
        self.layers = [
            CachedLayer(self.cache, layer, starts[layer], own, *(x.data.ptr for x in self.mapped[layer]))
            for layer, own in enumerate(experts)
        ]

    def check(self, pool: ExpertPool) -> None:
        for name in ("slots", "owners", "counts", "clocks"):
            np.testing.assert_array_equal(cp.asnumpy(getattr(self.cache, name)), getattr(pool, name), name)
        assert cp.asnumpy(self.cache.found).tolist() == [pool.hits, pool.misses]
        held = cp.asnumpy(self.cache.hidden), cp.asnumpy(self.cache.down)
        for slot, owner in enumerate(pool.owners.tolist()):
            layer = int(np.searchsorted(pool.starts, owner, side="right")) - 1
            for values, of_experts in zip(held, self.hosts[layer], strict=True) if owner >= 0 else ():
                np.testing.assert_array_equal(values[slot], of_experts[owner - pool.starts[layer]])


@pytest.fixture(scope="module")
def kernels(device: Any) -> FetchKernels:
    return FetchKernels(Launcher(device, cp.cuda.get_current_stream().ptr))


@pytest.mark.parametrize(
    ("num_slots", "experts", "top_k", "words"),
    [(8, [8, 8, 8], 2, (5, 3)), (20, [12, 16], 4, (1030, 7)), (1100, [512, 512, 512], 6, (1, 2))],
    ids=str,
)
def test_the_cache_does_what_its_definition_does(
    kernels: FetchKernels, num_slots: int, experts: list[int], top_k: int, words: tuple[int, int]
) -> None:
    """Steps of one token, of several, and of more than halve the counts once; the slots suffice for one layer."""
    device, pool = Device(kernels, num_slots, experts, words), ExpertPool(num_slots, experts)
    random = np.random.default_rng(1)
    for tokens in (1, 1, 3, 600, 1, 1, 2, 1400, 1, 40, 1):
        for layer, own in enumerate(experts):
            ids = zipf_routing(random, tokens, 1, own, top_k)[:, 0]
            pool.fetch(layer, ids)
            kernels.launch(None, cp.asarray(np.ascontiguousarray(ids)), device.layers[layer])
            assert (pool.slots[pool.starts[layer] + ids] >= 0).all()
        device.check(pool)
