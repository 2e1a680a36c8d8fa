"""Weights that live in host memory: layers copied into slots by a stream of their own, and tables that kernels read.

A streamed layer is made like any other, but for its matrices: they are put into its slot, one behind the other from the
slot's start, and what then is there is the layer's image, which goes to the host. To bring the layer back is one copy,
and its arrays are where they were. Scales, biases and gains always stay on the device: they are small, and the kernel
that finishes a layer's last product reads them when the next layer has begun.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np

from ...errors import OutOfMemory
from ...memory.arena import Arena, Block, Scratch
from ...memory.machine import available_memory
from ...memory.sizes import format_size

runtime = cp.cuda.runtime
HOST_RESERVE = 1 << 30
"""What is left of the host's memory for everything else."""


class HostMemory:
    """``nbytes`` of the host at ``address``: pinned where the system allows it, else with a warning that says why not.

    Where the host's own memory is about to run out, a temporary file takes its place, mapped into memory: the system
    keeps what it can of it, and reads the rest from disk each time. Raises ``OutOfMemory`` where the disk has no room
    either.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.pinned = False
        self._memory: Any = None
        free = available_memory()
        if free is not None and nbytes + HOST_RESERVE > free:
            self._memory = _file_memory(nbytes)
        else:
            self._pin()
        self.address = self.bytes().ctypes.data

    def bytes(self) -> np.ndarray:
        """The memory as uint8."""
        return np.frombuffer(self._memory, np.uint8, self.nbytes)

    def _pin(self) -> None:
        try:
            self._memory = cp.cuda.PinnedMemoryPointer(cp.cuda.PinnedMemory(self.nbytes), 0)
            self.pinned = True
        except runtime.CUDARuntimeError as error:
            warnings.warn(
                f"the system does not pin {format_size(self.nbytes)} of host memory ({error}): weights come to the GPU "
                "more slowly; raise the limit on locked memory, or the memory limit of the GPU",
                RuntimeWarning,
                stacklevel=3,
            )
            self._memory = np.empty(self.nbytes, np.uint8)


def _file_memory(nbytes: int) -> mmap.mmap:
    folder = tempfile.gettempdir()
    warnings.warn(
        f"the host's memory is nearly full: {format_size(nbytes)} of weights are streamed from a temporary file in "
        f"{folder}, no faster than its disk; raise the memory limit of the GPU, or set TMPDIR to a faster disk",
        RuntimeWarning,
        stacklevel=4,
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

    A :class:`~bminf_lite.memory.streaming.Link`. ``compute`` is the stream of everything else.
    """

    def __init__(self, device: int, compute: cp.cuda.Stream, slots: Sequence[Block]):
        self.compute = compute
        self.slots = tuple(slots)
        self.images: list[HostMemory] = []
        with cp.cuda.Device(device):
            self.copies = cp.cuda.Stream(non_blocking=True)
            self._ready = [cp.cuda.Event(disable_timing=True) for _ in slots]
            self._free = [cp.cuda.Event(disable_timing=True) for _ in slots]

    def next_slot(self) -> Scratch:
        """The memory for the matrices of the next layer to be made."""
        return Scratch(self.slots[len(self.images) % len(self.slots)])

    def keep(self, matrices: Scratch) -> None:
        """Copy what was made in :meth:`next_slot` to the host, as the next layer's image."""
        image = HostMemory(matrices.peak_reserved)
        slot = self.slots[len(self.images) % len(self.slots)]
        runtime.memcpyAsync(
            image.address, slot.address, image.nbytes, runtime.memcpyDeviceToHost, self.compute.ptr
        )
        self.images.append(image)

    def copy(self, layer: int, slot: int) -> None:
        image = self.images[layer]
        self.copies.wait_event(self._free[slot])
        runtime.memcpyAsync(
            self.slots[slot].address, image.address, image.nbytes, runtime.memcpyHostToDevice, self.copies.ptr
        )
        self._ready[slot].record(self.copies)

    def await_copy(self, slot: int) -> None:
        self.compute.wait_event(self._ready[slot])

    def release(self, slot: int) -> None:
        self._free[slot].record(self.compute)

    def close(self) -> None:
        """Wait for the copies under way, and give the slots and the images back."""
        self.copies.synchronize()
        self.images.clear()
        self.slots = ()


class PinnedBuffers:
    """Staging buffers in pinned memory, and copies from them on ``stream``.

    The :class:`~bminf_lite.memory.staging.Uploads` of a GPU.
    """

    def __init__(self, device: int, stream: cp.cuda.Stream, count: int = 3, nbytes: int = 16 << 20):
        self.stream = stream
        self._memory = [HostMemory(nbytes) for _ in range(count)]
        with cp.cuda.Device(device):
            self._copied = [cp.cuda.Event(disable_timing=True) for _ in range(count)]

    @property
    def buffers(self) -> list[memoryview]:
        return [memory.bytes().data for memory in self._memory]

    def copy(self, buffer: int, nbytes: int, address: int) -> None:
        source = self._memory[buffer].address
        runtime.memcpyAsync(address, source, nbytes, runtime.memcpyHostToDevice, self.stream.ptr)
        self._copied[buffer].record(self.stream)

    def wait(self, buffer: int) -> None:
        self._copied[buffer].synchronize()


def host_table(values: np.ndarray, pitch: int, device: int) -> cp.ndarray | None:
    """An embedding table ``[rows, columns]`` in fp16 with rows of ``pitch``, in pinned memory that kernels read.

    None where the system does not pin so much: pageable memory is out of the device's reach.
    """
    rows, columns = values.shape
    memory = HostMemory(rows * pitch * 2)
    if not memory.pinned:
        return None
    table = memory.bytes().view(np.float16).reshape(rows, pitch)
    table[:, columns:] = 0
    with np.errstate(over="ignore"):
        table[:, :columns] = values
    pointer = cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(memory.address, memory.nbytes, memory, device), 0)
    return cp.ndarray((rows, pitch), np.float16, pointer)[:, :columns]


def open_slots(device: int, compute: cp.cuda.Stream, arena: Arena, slots: int, slot_bytes: int) -> SlotLink:
    """A link with ``slots`` slots in ``arena``'s memory."""
    return SlotLink(device, compute, [arena.allocate(slot_bytes) for _ in range(slots)])
