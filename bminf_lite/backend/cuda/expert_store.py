"""Experts in pinned host memory, and the slots of GPU memory into which kernels copy those that tokens choose."""

from __future__ import annotations

import cupy as cp
import numpy as np

from ...cuda.kernels.experts.fetch import COPIES, CachedLayer, ExpertCache
from ...errors import OutOfMemory
from ...memory.sizes import format_size
from ..values import ExpertSlots
from .arrays import Arrays
from .streamed_weights import HostMemory

runtime = cp.cuda.runtime


class ExpertStore:
    """The experts of several layers on the host, and the ``cache`` of them on a GPU, which is empty at first.

    A layer's experts are made in the first slots, and :meth:`keep` copies them to the host.
    """

    def __init__(self, arrays: Arrays, planned: ExpertSlots) -> None:
        self.arrays = arrays
        self.planned = planned
        self.images: list[HostMemory] = []
        count, layers = sum(planned.layers), len(planned.layers)

        def full(size: int, value: int) -> cp.ndarray:
            return arrays.upload(np.full(size, value, np.int32))

        hidden, down = (arrays.empty((planned.slots, nbytes), np.uint8) for nbytes in planned.expert_bytes)
        self.cache = ExpertCache(
            full(count, -1),
            full(planned.slots, -1),
            full(count, 0),
            full(layers, 0),
            full(COPIES, 0),
            arrays.upload(np.zeros(2, np.uint64)),
            hidden,
            down,
        )

    def keep(self, experts: int) -> CachedLayer:
        """Copy the next layer's ``experts`` from the first slots to the host.

        Raises ``OutOfMemory`` if the host cannot give memory that the GPU reads.
        """
        layer = len(self.images)
        assert experts == self.planned.layers[layer], "the layers are those that were planned"
        sizes = [experts * nbytes for nbytes in self.planned.expert_bytes]
        image = HostMemory(sum(sizes))
        if not image.pinned:
            raise OutOfMemory(
                f"the host gives no pinned memory for {format_size(sum(sizes))} of experts, which the GPU would read "
                "there: free memory of the host, raise the limit on locked memory, or raise the memory limit of the "
                "GPU so that all experts fit"
            )
        addresses = image.address, image.address + sizes[0]
        stream = self.arrays.stream.ptr
        for address, slots, nbytes in zip(addresses, (self.cache.hidden, self.cache.down), sizes, strict=True):
            runtime.memcpyAsync(address, slots.data.ptr, nbytes, runtime.memcpyDeviceToHost, stream)
        self.images.append(image)
        return CachedLayer(self.cache, layer, sum(self.planned.layers[:layer]), experts, *addresses)

    def counts(self) -> tuple[int, int]:
        """Hits and misses so far; waits for the steps that were launched."""
        with self.arrays.current():
            hits, misses = cp.asnumpy(self.cache.found, stream=self.arrays.stream).tolist()
        return hits, misses
