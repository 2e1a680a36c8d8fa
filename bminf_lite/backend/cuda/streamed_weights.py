"""Weights in host memory: layers that are copied into slots on a separate stream, and tables that kernels read.

A streamed layer is made like any other, except that its matrices are allocated in its slot, from the slot's start. The
slot's contents are then copied to the host as the layer's image. One copy of the image brings the layer back, and its
arrays keep their addresses. Scales, biases and norms always stay on the device: they are small, and the kernel that
finishes a layer's last product reads them after the next layer has begun.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import cupy as cp
import numpy as np

from ...errors import OutOfMemory
from ...memory import staging
from ...memory.arena import Block, Scratch
from ...memory.machine import HOST_RESERVE, available_memory
from ...memory.sizes import format_size

runtime = cp.cuda.runtime
TOUCH_THREADS = 8
PAGE_BYTES = 4096


class HostMemory:
    """``nbytes`` of host memory at ``address``, pinned if the system allows it; otherwise there is a warning.

    If the host's memory is nearly full, it is a temporary file mapped into memory: the system caches a part of it and
    reads the rest from disk. Raises ``OutOfMemory`` if the disk is too small as well.
    """

    def __init__(self, nbytes: int):
        free = available_memory()
        full = free is not None and nbytes + HOST_RESERVE > free
        self.nbytes = nbytes
        self._memory = _file_memory(nbytes) if full else _anonymous_memory(nbytes)
        self.address = self.bytes().ctypes.data
        self.pinned = not full and self._pin()

    def bytes(self) -> np.ndarray:
        """The memory as uint8."""
        return np.frombuffer(self._memory, np.uint8, self.nbytes)

    def _pin(self) -> bool:
        try:
            runtime.hostRegister(self.address, self.nbytes, 0)
        except runtime.CUDARuntimeError as error:
            warnings.warn(
                f"the system does not pin {format_size(self.nbytes)} of host memory ({error}): weights come to the GPU "
                "more slowly; raise the limit on locked memory, or the memory limit of the GPU",
                RuntimeWarning,
                stacklevel=3,
            )
            return False
        # the finalizer refers to the memory, which must live until it is unpinned
        weakref.finalize(self, _unpin, self.address, self._memory).atexit = False
        return True


def _unpin(address: int, _memory: mmap.mmap) -> None:
    runtime.hostUnregister(address)


def _anonymous_memory(nbytes: int) -> mmap.mmap:
    """Memory whose pages several threads have touched, large pages if the system has them.

    Pinning touched pages takes an eighth of the time of an allocation by the driver.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    content, share = np.frombuffer(memory, np.uint8), -(-nbytes // (TOUCH_THREADS * PAGE_BYTES)) * PAGE_BYTES

    def touch(first: int) -> None:
        content[first : first + share : PAGE_BYTES] = 0

    with ThreadPoolExecutor(TOUCH_THREADS, "bminf-lite-touch") as threads:
        list(threads.map(touch, range(0, nbytes, share)))
    return memory


def _file_memory(nbytes: int) -> mmap.mmap:
    folder = tempfile.gettempdir()
    warnings.warn(
        f"the host's memory is nearly full: {format_size(nbytes)} of weights are streamed from a temporary file in "
        f"{folder}, no faster than its disk; raise the memory limit of the GPU, or set TMPDIR to a faster disk",
        RuntimeWarning,
        stacklevel=3,
    )
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        raise OutOfMemory(
            f"neither the host's memory nor {folder} has room for {format_size(nbytes)} of weights that are to be "
            f"streamed ({error.strerror}): raise the memory limit of the GPU, or set TMPDIR to a larger disk"
        ) from error


class SlotLink:
    """Slots of a GPU's memory, the images of the layers that pass through them, and a stream for the copies.

    A :class:`~bminf_lite.memory.streaming.Link`. ``compute`` is the stream of everything else; ``copied_bytes`` counts
    the bytes of all queued copies.
    """

    def __init__(self, device: int, compute: cp.cuda.Stream, slots: Sequence[Block]):
        self.compute = compute
        self.slots = tuple(slots)
        self.images: list[HostMemory] = []
        self.copied_bytes = 0
        with cp.cuda.Device(device):
            self.copies = cp.cuda.Stream(non_blocking=True)
            self._ready = [cp.cuda.Event(disable_timing=True) for _ in slots]
            self._free = [cp.cuda.Event(disable_timing=True) for _ in slots]

    @property
    def _next_slot(self) -> Block:
        return self.slots[len(self.images) % len(self.slots)]

    def scratch_in_next_slot(self) -> Scratch:
        """Memory for the matrices of the next layer."""
        return Scratch(self._next_slot)

    def keep(self, matrices: Scratch) -> None:
        """Copy the contents of :meth:`scratch_in_next_slot` to the host, as the next layer's image."""
        image, source = HostMemory(matrices.peak_reserved), self._next_slot.address
        runtime.memcpyAsync(image.address, source, image.nbytes, runtime.memcpyDeviceToHost, self.compute.ptr)
        self.images.append(image)

    def copy(self, layer: int, slot: int) -> None:
        image = self.images[layer]
        self.copies.wait_event(self._free[slot])
        runtime.memcpyAsync(
            self.slots[slot].address, image.address, image.nbytes, runtime.memcpyHostToDevice, self.copies.ptr
        )
        self._ready[slot].record(self.copies)
        self.copied_bytes += image.nbytes

    def await_copy(self, slot: int) -> None:
        self.compute.wait_event(self._ready[slot])

    def release(self, slot: int) -> None:
        self._free[slot].record(self.compute)

    def close(self) -> None:
        """Wait for the queued copies, then free the slots and the images."""
        self.copies.synchronize()
        self.images.clear()
        self.slots = ()


class PinnedBuffers:
    """Staging buffers in pinned memory, from which all GPUs can copy."""

    def __init__(self, count: int, nbytes: int):
        self.count = count
        self.nbytes = nbytes
        self._memory = HostMemory(count * nbytes)

    @property
    def buffers(self) -> list[memoryview]:
        return [part.data for part in self._memory.bytes().reshape(-1, self.nbytes)]

    def address(self, buffer: int) -> int:
        return self._memory.address + buffer * self.nbytes


class PinnedCopies:
    """Copies from pinned buffers on ``stream``, the :class:`~bminf_lite.memory.staging.Uploads` of a GPU."""

    def __init__(self, pinned: PinnedBuffers, device: int, stream: cp.cuda.Stream):
        self.pinned = pinned
        self.stream = stream
        self._device = device
        with cp.cuda.Device(device):
            self._copied = [cp.cuda.Event(disable_timing=True) for _ in range(pinned.count)]

    def copy(self, buffer: int, nbytes: int, address: int) -> None:
        with cp.cuda.Device(self._device):  # each thread has a current device of its own
            source, kind = self.pinned.address(buffer), runtime.memcpyHostToDevice
            runtime.memcpyAsync(address, source, nbytes, kind, self.stream.ptr)
            self._copied[buffer].record(self.stream)

    def copy_columns(self, buffer: int, columns: staging.Columns, rows: int, address: int) -> None:
        with cp.cuda.Device(self._device):
            source, kind = self.pinned.address(buffer) + columns.first, runtime.memcpyHostToDevice
            size = columns.width, rows
            runtime.memcpy2DAsync(address, columns.width, source, columns.pitch, *size, kind, self.stream.ptr)
            self._copied[buffer].record(self.stream)

    def wait(self, buffer: int) -> None:
        self._copied[buffer].synchronize()


class FileStaging:
    """The staging buffers of ``ranks`` GPUs, made when one of them first reads a file."""

    def __init__(self, ranks: int = 1):
        self.ranks = ranks
        self._lock = threading.Lock()
        self._pinned: PinnedBuffers | None = None
        self._staging: staging.StagingBuffers | None = None

    def uploader(self, device: int, stream: cp.cuda.Stream) -> staging.Uploader:
        """What reads files for a GPU."""
        with self._lock:
            if self._pinned is None or self._staging is None:
                self._pinned = PinnedBuffers(staging.THREADS * staging.BUFFERS_PER_THREAD, staging.BUFFER_BYTES)
                self._staging = staging.StagingBuffers(self._pinned.buffers, staging.THREADS, self.ranks)
            return staging.Uploader(self._staging, PinnedCopies(self._pinned, device, stream))

    def abort(self) -> None:
        """See :meth:`.StagingBuffers.abort`."""
        if self._staging is not None:
            self._staging.abort()

    def reset(self) -> None:
        """See :meth:`.StagingBuffers.reset`."""
        if self._staging is not None:
            self._staging.reset()

    def close(self) -> None:
        """Wait for the threads and the copies of all GPUs."""
        if self._staging is not None:
            self._staging.close()


def host_table(rows: int, pitch: int, device: int) -> cp.ndarray | None:
    """An uninitialized fp16 table ``[rows, pitch]`` in pinned memory, which kernels can read.

    None if the system refuses to pin that memory: kernels cannot read pageable memory.
    """
    memory = HostMemory(rows * pitch * 2)
    if not memory.pinned:
        return None
    pointer = cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(memory.address, memory.nbytes, memory, device), 0)
    return cp.ndarray((rows, pitch), np.float16, pointer)
