"""The common part of all launchers: the kernels of one GPU, each loaded at its first launch, on one stream."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from ..runtime.driver import Device, DeviceAttribute
from ..runtime.kernel import Dimensions, Kernel
from .sources import load


class StepContext:
    """The state that launches of one step depend on. It is made when a step begins and dropped when it ends.

    ``streams`` are the step's residual streams by the address of their values, of which deferred norms are known.

    ``one_block_per_sm`` says whether the last kernel has one block on each SM. The context also records the caches that
    the step has written. A dependent kernel may read a cache before its predecessor has ended if the step has not
    written that cache. The first kernel, ``embed``, waits for all earlier steps before it lets any other start. Outside
    a step, no cache counts as unwritten.
    """

    __slots__ = ("_complete", "_last_read", "_written_caches", "one_block_per_sm", "streams")

    def __init__(self, in_step: bool = True) -> None:
        self.one_block_per_sm = False
        self._written_caches: set[int] | None = set() if in_step else None
        self._last_read: weakref.ref[object] | None = None  # weak: a step may end later than what it computed with
        self._complete: weakref.ref[object] | None = None
        self.streams: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @property
    def is_under_way(self) -> bool:
        """Whether the kernels that are launched belong to a step."""
        return self._written_caches is not None

    def is_unwritten(self, cache: int, writes: bool) -> bool:
        """Whether the step has not written the cache at this address; ``writes``: the next kernel writes it."""
        if self._written_caches is None:
            return False
        untouched = cache not in self._written_caches
        if writes:
            self._written_caches.add(cache)
        return untouched

    def reads(self, stream: object) -> bool:
        """Note that the next kernel is a product that reads a residual stream, or None for anything else.

        Returns whether the stream is complete before that kernel can start, so that the kernel need not wait for its
        predecessor before it reads. This is so for a product behind attention that reads the same stream as the
        product before attention, as in a layer with a parallel residual, and behind a product that :meth:`starts_late`.
        """
        is_complete = stream is not None and self._complete is not None and stream is self._complete()
        self._last_read, self._complete = None if stream is None else weakref.ref(stream), None
        return is_complete

    def starts_late(self) -> None:
        """Note that the last product lets its successor start after it has waited itself: what it reads is complete."""
        self._complete = self._last_read

    def attends(self, starts_next: bool = False) -> None:
        """Note that the next kernel is attention, which lets its successor start after it has waited itself.

        What the product before it has read is complete then. With ``starts_next`` the successor may start at once, and
        nothing is known to be complete.
        """
        self._complete = None if starts_next else self._last_read


class Launcher:
    """Launches kernels of one GPU on ``stream`` (``cudaStream_t`` as an integer)."""

    def __init__(self, device: Device, stream: int) -> None:
        self.device = device
        self.stream = stream
        self.num_sms = device.attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
        self.has_clusters = device.compute_capability >= (9, 0)
        self.max_shared = device.attribute(DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.half_shared = self.max_shared // 2  # two such blocks, with their static shared memory, do not fit an SM
        self.kernel = functools.cache(self._load)

    def _load(self, source: str, expression: str, cache: bool = False, defines: tuple[str, ...] = ()) -> Kernel:
        return load(self.device, source, expression, defines, cache)

    def launch(
        self,
        step: StepContext | None,
        source: str,
        expression: str,
        grid: Dimensions,
        block: int,
        args: tuple[object, ...],
        shared: int = 0,
        cluster: int | None = None,
        bytes_moved: int = 0,
        cache: bool = False,
        dependent: bool = True,
        defines: tuple[str, ...] = (),
    ) -> None:
        """Launch a kernel, which may start before its predecessor has ended if it is ``dependent``.

        ``step`` is None for kernels outside a step. ``bytes_moved`` counts the bytes that the kernel reads and writes.
        ``cache``: see :meth:`Module.kernel`; for a kernel that fills the GPU, because other kernels cannot run beside
        it. ``defines`` are macros.
        """
        kernel = self.kernel(source, expression, cache, defines)
        kernel(grid, block, args, shared, self.stream, dependent, cluster, bytes_moved)
        if step is not None:
            step.one_block_per_sm = False
