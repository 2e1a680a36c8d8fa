"""One NVIDIA GPU: arrays, copies, captured work, caches and memory.

Work goes to one stream, and memory comes from one arena.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import cupy as cp
import numpy as np

from ...cuda.kernels.gemm.cublaslt_matmul import MatmulContext
from ...cuda.kernels.gemm.fgemm import FloatGemm
from ...cuda.kernels.gemm.igemm import Int8Gemm
from ...cuda.kernels.gemm.plans import kinds_for, row_major_first
from ...cuda.runtime.driver import Device
from ...memory.device import MARGIN, device_arena
from ..cache_values import AnyCache, LatentCache, LayerCache, StateArray, StateCache
from ..device import HostDevice
from ..values import Array
from .arrays import Arrays, ZeroedScratch
from .graph_capture import CapturedGraph, GraphMemory
from .kernels import Kernels
from .layer_caches import LayerCaches, copies_of_blocks
from .materialize import Materializer
from .mixtures import MixtureLoader
from .peers import PeerRank
from .weight_loader import Loader

T = TypeVar("T")
AHEAD_BYTES = 1 << 30
"""Bytes of memory for weights that are mapped at once, ahead of their copies. Beside copies on an H200, a GiB takes 18
ms in chunks of 64 MiB, and 2 ms in one."""
WRITE_KERNEL_MAX_BYTES = 64 << 10
"""A kernel reads transfers of at most ``WRITE_KERNEL_MAX_BYTES`` from host memory, as a copy would wait for the copy
engine."""


class CudaDevice(HostDevice):
    """GPU number ``device`` within ``memory_limit``: bytes, ``"6GiB"``, or None for what is free."""

    def __init__(self, device: int = 0, memory_limit: int | str | None = None):
        super().__init__(np.float16)
        self.name = f"cuda:{device}"
        self.device = Device(device)
        with cp.cuda.Device(device):
            self.stream = cp.cuda.Stream(non_blocking=True)
        self.arena = device_arena(self.device, memory_limit)
        self.arrays = Arrays(self.arena, self.stream, device)
        self.kernels = Kernels(self.device, self.stream)
        self.materializer = Materializer(self.arrays, self.kernels)
        with self.arrays.current():
            matmul_context = MatmulContext.open(self.device, self.arrays.memory)
            self.int8_gemm = Int8Gemm(
                self.device, matmul_context, row_major_first(kinds_for(self.device.compute_capability))
            )
            self.float_gemm = FloatGemm(matmul_context)
        self.loader = Loader(self.arena, self.arrays, self.kernels, self.int8_gemm)
        self.mixture_loader = MixtureLoader(self.loader, self.arrays)
        self.graph_memory = GraphMemory(self.arena)
        self.scratch = ZeroedScratch(self.arrays, self.arena)
        self.caches = LayerCaches(self.device, self.arena, self.arrays)
        self.copies = cp.cuda.Stream(non_blocking=True)
        """Copies to the sampler, and to kernels that wait, beside a model that computes."""
        self.sampled = cp.cuda.Event(disable_timing=True)
        """Behind the last sampler, which may read what is copied to it."""

    def array(self, values: np.ndarray) -> Array:
        return self.arrays.upload(np.asarray(values))

    def upload(self, values: np.ndarray) -> Array:
        target = self.arrays.empty(values.shape, values.dtype)
        self.write(target, values)
        return target

    def adopt(self, values: Any) -> Callable[[], Array]:
        with cp.cuda.Device(self.arrays.device):
            array = cp.from_dlpack(values) if hasattr(values, "__dlpack__") else cp.asarray(values)
            written = cp.cuda.get_current_stream().record()  # the conversion made this stream wait for the library's

        def wait() -> cp.ndarray:
            self.stream.wait_event(written)
            return array

        return wait

    def assign(self, target: Array, values: np.ndarray) -> None:
        with self.arrays.current():
            target[...] = cp.asarray(values, target.dtype)

    def write(self, target: Array, values: np.ndarray) -> None:
        by_kernel = values.itemsize == 4 and values.nbytes <= WRITE_KERNEL_MAX_BYTES
        self.arrays.write(target, values, copy=self._write_words if by_kernel else None)

    def _write_words(self, target: int, source: int, nbytes: int) -> None:
        self.kernels.pointwise.write_words(source, target, nbytes // 4)

    def write_for_sampler(self, target: Array, values: np.ndarray) -> None:
        self.copies.wait_event(self.sampled)
        self.stream.wait_event(self.arrays.write(target, values, self.copies))

    def host(self, x: Array) -> np.ndarray:
        values = self.materializer.materialize(x)
        with self.arrays.current():
            found: np.ndarray = cp.asnumpy(values, stream=self.stream)
        self.communicator.check()
        return found

    def complete(self, x: Array) -> cp.ndarray:
        values = self.materializer.materialize(x)
        self.stream.synchronize()
        self.communicator.check()
        return values

    def computed(self, x: Array) -> cp.ndarray:
        return self.materializer.materialize(x)

    def fetch(self, x: Array) -> Callable[[], np.ndarray]:
        values, check = self.materializer.materialize(x), self.communicator.check
        if not values.flags.c_contiguous:
            with self.arrays.current():
                values = cp.ascontiguousarray(values)
        download = self.arrays.download(values)

        def wait() -> np.ndarray:
            found = download()
            check()
            return found

        return wait

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        graph, rank = (self.graph_memory, self.arrays, work, lambda: self.loader.streamed_bytes), self.communicator
        if not isinstance(rank, PeerRank):
            return CapturedGraph(*graph)
        captured = CapturedGraph(*graph, rank.agree)

        def run() -> T:
            rank.meet()
            found: T = captured()
            rank.meet()
            return found

        return run

    def expect_weights(self, nbytes: int) -> None:
        name, sizes = "bminf-lite-map", (nbytes, AHEAD_BYTES)
        threading.Thread(target=self.arena.map_ahead, args=sizes, name=name, daemon=True).start()

    def make_current(self) -> None:
        self.device.make_current()

    def describe(self) -> str:
        major, minor = self.device.compute_capability
        return f"{self.device.name} (compute capability {major}.{minor})"

    def memory(self) -> dict[str, int]:
        names = ("used", "peak_used", "reserved", "peak_reserved", "limit")
        numbers = {name: getattr(self.arena, name) for name in names}
        numbers["available"] = min(self.arena.limit - self.arena.used, max(0, self.device.memory()[0] - MARGIN))
        return numbers

    def expert_cache(self) -> dict[str, int]:
        pools = self.mixture_loader.pools
        if not pools:
            return {}
        counts = {planned: store.counts() for planned, store in pools.items()}
        return {
            "slots": sum(planned.slots for planned in pools),
            "experts": sum(sum(planned.layers) for planned in pools),
            "hits": sum(hits for hits, _ in counts.values()),
            "misses": sum(misses for _, misses in counts.values()),
            "copied_bytes": sum(misses * sum(planned.expert_bytes) for planned, (_, misses) in counts.items()),
        }

    def close(self) -> None:
        self.communicator.close()
        self.stream.synchronize()
        self.arrays.close()
        self.loader.close()
        self.mixture_loader.close()
        self.scratch.clear()
        self.arena.close()

    def layer_cache(
        self, num_blocks: int, kv_heads: int, head_dim: int, *, int8: bool = False, max_blocks: int | None = None
    ) -> LayerCache:
        return self.caches.make(num_blocks, kv_heads, head_dim, int8, max_blocks)

    def state_cache(self, num_slots: int, arrays: Sequence[StateArray], *, max_slots: int | None = None) -> StateCache:
        return self.caches.make_states(num_slots, arrays, max_slots or num_slots)

    def latent_cache(
        self, num_blocks: int, row_dim: int, *, int8: bool = False, max_blocks: int | None = None
    ) -> LatentCache:
        return self.caches.make_latent(num_blocks, row_dim, int8, max_blocks or num_blocks)

    def grow(self, cache: AnyCache, num_blocks: int) -> None:
        self.caches.grow(cache, num_blocks)

    def copy_blocks(self, copies: Sequence[tuple[AnyCache, int, int]]) -> None:
        self.kernels.copy_blocks.launch(self.arrays.upload(copies_of_blocks(copies)))

    def free_layer_cache(self, cache: AnyCache) -> None:
        self.caches.free(cache)
        super().free_layer_cache(cache)
