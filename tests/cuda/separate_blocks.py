"""For memory checkers: an arena whose blocks are allocations of their own, so that a step out of one is seen.

In an arena, what lies behind a block is another block or mapped memory, and a checker that knows of the driver's
allocations alone takes both for fine.
"""

from __future__ import annotations

import weakref

import cupy as cp

from bminf_lite.cuda.runtime.driver import Device
from bminf_lite.memory.arena import ALIGNMENT, Arena, Block
from bminf_lite.memory.device import device_limit


class NoPages:
    """Addresses with no memory, to keep account with."""

    base = 1 << 60
    granularity = ALIGNMENT

    def map(self, offset: int, nbytes: int, at_once: int = 0) -> None: ...

    def unmap(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        return [(offset, nbytes)]

    def close(self) -> None: ...


class SeparateBlocks(Arena):
    """Keeps account as an arena does, and gives each block memory of exactly its size."""

    def allocate(self, nbytes: int) -> Block:
        block = super().allocate(nbytes)
        memory = cp.cuda.Memory(max(nbytes, 1))
        block.address = memory.ptr
        weakref.finalize(block, list, [memory]).atexit = False  # which refers to the memory until then
        return block


def separate_arena(device: Device, memory_limit: int | str | None = None) -> Arena:
    """In place of ``memory.device.device_arena``."""
    device.make_current()
    return SeparateBlocks(NoPages(), device_limit(memory_limit, *device.memory()))
