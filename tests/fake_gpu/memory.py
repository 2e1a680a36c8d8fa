"""The fake GPU's memory: host memory of which is known what is in use, so that a stray address is seen at its use.

Everything starts out as bytes 0xFF, which are NaNs, and becomes that again when it is freed. An access must lie in one
live piece: a block of an arena as large as it was asked for, an allocation of the driver's, or pinned host memory.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from bminf_lite.memory.arena import Arena, Block, Meter, Scratch
from bminf_lite.memory.device import GrowingMemory

POISON = 0xFF


class FakeGpuError(AssertionError):
    """The code under test did something that a GPU would not forgive."""


@dataclass(eq=False)
class Piece:
    """A range in use. ``inner`` are the blocks in use of a :class:`Scratch` within it; ``recorded``: a graph's."""

    address: int
    nbytes: int
    divided: bool = False
    recorded: bool = False
    inner: list[Piece] = field(default_factory=list)

    def holds(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes


Method = TypeVar("Method", bound=Callable[..., Any])


def locked(method: Method) -> Method:
    """A method of :class:`Memory` that one thread runs at a time."""

    @functools.wraps(method)
    def run(self: Memory, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(Method, run)


class Memory:
    """All memory that kernels may touch."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.taken = 0
        self.is_recording: Callable[[], bool] = lambda: False
        self._lock = threading.RLock()
        self._thread = threading.local()
        self.ranges: dict[int, mmap.mmap] = {}
        self._kept: list[mmap.mmap] = []
        self._starts: list[int] = []
        self._pieces: dict[int, Piece] = {}
        self._of_block: dict[int, tuple[Piece, Piece | None]] = {}

    @property
    def replaying(self) -> bool:
        """Whether this thread replays a graph."""
        return getattr(self._thread, "replaying", False)

    @replaying.setter
    def replaying(self, value: bool) -> None:
        self._thread.replaying = value

    # -- host memory behind it -----------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int:
        """Addresses for ``nbytes``, page-aligned; the host lends the memory when it is touched."""
        room = mmap.mmap(-1, nbytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(room))
        self.ranges[start] = room
        return start

    @locked
    def release(self, start: int) -> None:
        """Take addresses back. They stay mapped here, so that a late access is an error of the checks and no crash."""
        room = self.ranges.pop(start)
        for address in [a for a in self._starts if start <= a < start + len(room)]:
            self._starts.remove(address)
            del self._pieces[address]
        room.madvise(mmap.MADV_REMOVE)  # the mapping is shared: MADV_DONTNEED would keep its pages
        self._kept.append(room)

    @staticmethod
    def raw(address: int, nbytes: int) -> np.ndarray:
        """Bytes at an address, unchecked."""
        return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), np.uint8)

    def fill(self, address: int, nbytes: int, value: int) -> None:
        """Set bytes, unchecked."""
        self.raw(address, nbytes)[:] = value

    def poison(self, address: int, nbytes: int) -> None:
        self.fill(address, nbytes, POISON)

    # -- what is in use ------------------------------------------------------------------------------------------------

    @locked
    def add(self, address: int, nbytes: int) -> Piece:
        """A range that is in use from now on."""
        assert address not in self._pieces, f"{address:#x} is in use already"
        insort(self._starts, address)
        piece = self._pieces[address] = Piece(address, nbytes)
        return piece

    @locked
    def remove(self, address: int) -> None:
        """The range at ``address`` is out of use, and forgets its contents."""
        piece = self._pieces.pop(address, None)
        if piece is not None:
            self._starts.remove(address)
            self.poison(address, piece.nbytes)

    @locked
    def piece(self, address: int) -> Piece | None:
        """The outermost piece in use that holds ``address``."""
        index = bisect_right(self._starts, address)
        piece = self._pieces[self._starts[index - 1]] if index else None
        return piece if piece is not None and piece.holds(address, 1) else None

    @locked
    def check(self, address: int, nbytes: int, what: str, inside: bool = True) -> None:
        """Raises unless the range is in use; ``inside`` a scratch, unless one of its blocks is."""
        piece = self.piece(address)
        if piece is None:
            raise FakeGpuError(f"{what}: {address:#x} is not in memory that is in use")
        if not piece.holds(address, nbytes):
            over = address + nbytes - piece.address - piece.nbytes
            raise FakeGpuError(f"{what}: {nbytes} bytes at {address:#x} end {over} bytes past their block")
        if not inside or not piece.divided:
            return
        holders = [p for p in piece.inner if p.holds(address, 1)]
        if not holders:
            raise FakeGpuError(f"{what}: {address:#x} is in a scratch's memory that is not in use")
        if not any(p.holds(address, nbytes) for p in holders):
            raise FakeGpuError(f"{what}: {nbytes} bytes at {address:#x} end past their block of a scratch")

    # -- blocks of arenas ----------------------------------------------------------------------------------------------

    def watch_arenas(self) -> list[tuple[type, str, object]]:
        """Learn of every block that an arena makes or frees; returns what to put back."""
        before: list[tuple[type, str, object]] = [
            (Arena, "allocate", Arena.allocate),
            (Block, "free", Block.free),
            (Block, "__del__", Block.__del__),
            (GrowingMemory, "grow", GrowingMemory.grow),
            (GrowingMemory, "free", GrowingMemory.free),
        ]
        allocate, free, memory = Arena.allocate, Block.free, weakref.ref(self)

        def watched_allocate(arena: Arena, nbytes: int) -> Block:
            block = allocate(arena, nbytes)
            if not isinstance(arena, Meter) and (known := memory()) is not None:
                known._block_made(arena, block)
            return block

        def watched_free(block: Block) -> None:
            if (known := memory()) is not None:
                known._block_freed(block)
            free(block)

        grow, free_lanes = GrowingMemory.grow, GrowingMemory.free

        def watched_grow(lanes: GrowingMemory, count: int) -> None:
            grow(lanes, count)
            if (known := memory()) is not None:
                known._lanes_grown(lanes)

        def watched_free_lanes(lanes: GrowingMemory) -> None:
            if (known := memory()) is not None:
                for lane in range(len(lanes.mapped)):
                    known.remove(lanes.address(lane))
            free_lanes(lanes)

        GrowingMemory.grow, GrowingMemory.free = watched_grow, watched_free_lanes  # type: ignore[method-assign]
        Arena.allocate = watched_allocate  # type: ignore[method-assign]
        Block.free = Block.__del__ = watched_free  # type: ignore[method-assign, assignment]
        return before

    @locked
    def _lanes_grown(self, lanes: GrowingMemory) -> None:
        """What is mapped to each lane is in use."""
        for lane, nbytes in enumerate(lanes.mapped):
            address = lanes.address(lane)
            if address in self._pieces:
                self._pieces[address].nbytes = nbytes
            elif nbytes:
                self.add(address, nbytes)

    @locked
    def _block_made(self, arena: Arena, block: Block) -> None:
        key = id(block)
        size = max(block.nbytes, 1)
        if isinstance(arena, Scratch):
            outer = self.piece(block.address)
            assert outer is not None, "a scratch outlives the block that it divides"
            outer.divided = True
            inner = Piece(block.address, size, recorded=self.is_recording())
            outer.inner.append(inner)
            self._of_block[key] = outer, inner
        elif self.piece(block.address) is None and not self._is_simulated(block.address):
            self._of_block[key] = self.add(block.address, size), None

    def _is_simulated(self, address: int) -> bool:
        return not any(start <= address < start + len(room) for start, room in self.ranges.items())

    @locked
    def _block_freed(self, block: Block) -> None:
        outer, inner = self._of_block.pop(id(block), (None, None))
        if outer is None:
            return
        if inner is None:
            self.remove(outer.address)
        else:
            outer.inner.remove(inner)
            shared = outer.address not in self._pieces or any(p.holds(inner.address, 1) for p in outer.inner)
            # Graphs go on using the memory that Python's objects had when they were recorded.
            if not shared and not inner.recorded:
                self.poison(inner.address, inner.nbytes)
