"""A cache of experts in slots of GPU memory, filled from the host's: the launchers of ``fetch.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..constants import COPY_THREADS, FETCH_THREADS, MAX_EXPERTS
from ..instantiations import Capability, KernelFamily
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp

COPIES = 1 + 2 * MAX_EXPERTS
"""Integers of the list of a layer's copies: their number, and an expert and a slot of each."""
BLOCKS_PER_SM = 2


@dataclass(frozen=True)
class ExpertCache:
    """The slots of a pool on a GPU, see :class:`bminf_lite.memory.expert_cache.ExpertPool`; all are int32.

    ``slots`` and ``counts`` ``[experts]`` of all layers, ``owners`` ``[num_slots]``, ``clocks`` ``[layers]``,
    ``copies`` ``[COPIES]``, and ``found`` uint64 ``[2]``, the hits and misses so far. ``hidden`` and ``down`` are uint8
    ``[num_slots, bytes]``, both matrices of the expert in each slot.
    """

    slots: cp.ndarray
    owners: cp.ndarray
    counts: cp.ndarray
    clocks: cp.ndarray
    copies: cp.ndarray
    found: cp.ndarray
    hidden: cp.ndarray
    down: cp.ndarray


@dataclass(frozen=True)
class CachedLayer:
    """A layer of which the cache has experts: its number, and its ``experts`` from ``first`` on among those of all.

    ``hidden`` and ``down`` are addresses of host memory that the GPU reads, in which all of them lie in order.
    """

    cache: ExpertCache
    layer: int
    first: int
    experts: int
    hidden: int
    down: int


class FetchKernels:
    """What brings experts into slots."""

    source = "experts/fetch.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "find_missing")
        yield KernelFamily(cls.source, "copy_experts")

    def launch(self, step: StepContext | None, topk_ids: cp.ndarray, layer: CachedLayer) -> None:
        """Bring the experts int32 ``[T, top_k]`` of a layer's tokens into slots; kernels behind may read them."""
        cache, (tokens, top_k) = layer.cache, topk_ids.shape
        self._launcher.launch(
            step,
            self.source,
            "find_missing",
            1,
            FETCH_THREADS,
            (
                topk_ids.data.ptr,
                tokens,
                top_k,
                layer.first,
                layer.experts,
                cache.slots.data.ptr,
                cache.owners.data.ptr,
                cache.counts.data.ptr,
                cache.clocks[layer.layer :].data.ptr,
                cache.found.data.ptr,
                cache.copies.data.ptr,
                len(cache.owners),
            ),
        )
        self._launcher.launch(
            step,
            self.source,
            "copy_experts",
            BLOCKS_PER_SM * self._launcher.num_sms,
            COPY_THREADS,
            (
                cache.copies.data.ptr,
                layer.hidden,
                layer.down,
                cache.hidden.data.ptr,
                cache.down.data.ptr,
                cache.hidden.shape[1] // 16,
                cache.down.shape[1] // 16,
            ),
        )
