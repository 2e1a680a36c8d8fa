"""How much of a GPU may be used, and its pages: on the fake GPU's driver, and on a GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_gpu import PROFILES, Machine
from fake_gpu.fake_driver import FakeDriver
from fake_gpu.memory import Memory

from bminf_lite.cuda.runtime import driver
from bminf_lite.cuda.runtime.bindings import LibraryError, bind
from bminf_lite.cuda.runtime.driver import Device
from bminf_lite.errors import OutOfMemory, UsageError
from bminf_lite.memory.arena import Arena
from bminf_lite.memory.cache_memory import layer_bytes
from bminf_lite.memory.device import (
    MARGIN,
    GrowingMemory,
    MappedPages,
    WholePages,
    device_arena,
    device_limit,
)

MIB = 1 << 20
GIB = 1 << 30


def test_without_a_limit_all_but_a_margin() -> None:
    assert device_limit(None, 10 * GIB, 12 * GIB) == 10 * GIB - MARGIN
    assert device_limit(None, MARGIN // 2, 12 * GIB) == 0


def test_a_limit_may_exceed_what_is_free_but_not_the_gpu() -> None:
    assert device_limit("6GiB", 100 * GIB, 141 * GIB) == device_limit(6 * GIB, GIB, 8 * GIB) == 6 * GIB
    with pytest.raises(UsageError, match="plenty"):
        device_limit("plenty", GIB, GIB)
    with pytest.raises(UsageError, match=r"memory limit is 4\.0 GiB, but the GPU has 1\.0 GiB"):
        device_limit("4GiB", GIB, GIB)


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The driver's functions for a fake GPU of 1 GiB."""
    memory = Memory(GIB)
    memory.poison = lambda address, nbytes: None  # type: ignore[method-assign]
    library = FakeDriver(Machine(PROFILES["h200"], memory)).library()

    def describe(status: int) -> str:
        library.raise_failure()
        return f"status {status}"

    functions = bind(library, driver._PROTOTYPES, describe)  # type: ignore[arg-type]
    monkeypatch.setattr(driver, "load", lambda: functions)
    return functions


def taken(device: Device) -> int:
    free, total = device.memory()
    return total - free


def test_an_arena_takes_what_it_needs_and_gives_back_what_is_free(functions: SimpleNamespace) -> None:
    device = Device(0)
    arena = device_arena(device, "512MiB")
    assert taken(device) == 0
    first, second = arena.allocate(200 * MIB), arena.allocate(100 * MIB + 1)
    place = first.address
    assert taken(device) == arena.reserved == 302 * MIB
    first.free()
    assert arena.trim() == 200 * MIB
    assert taken(device) == arena.reserved == 102 * MIB
    assert arena.allocate(200 * MIB).address == place
    assert second.address == place + 200 * MIB
    arena.close()
    assert taken(device) == 0


def test_only_whole_chunks_can_be_given_back(functions: SimpleNamespace) -> None:
    device = Device(0)
    pages = MappedPages(device, 8 * GIB)
    chunk = pages.chunk_bytes
    first, second = 2 * MIB, 2 * MIB + chunk
    pages.map(first, 2 * chunk)
    assert pages.unmap(first + chunk // 2, chunk + chunk // 2) == [(second, chunk)]
    assert pages.unmap(first, 2 * MIB) == []
    pages.map(second, 2 * MIB)
    pages.close()
    pages.close()
    assert taken(device) == 0


def test_chunks_are_small_beside_the_memory(functions: SimpleNamespace) -> None:
    sizes = {gib: MappedPages(Device(0), gib * GIB).chunk_bytes // MIB for gib in (1, 3, 5, 11)}
    assert sizes == {1: 2, 3: 2, 5: 4, 11: 10}


@pytest.mark.parametrize("fail", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_gpu_that_refuses_leaves_nothing_mapped(
    fail: str, functions: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise LibraryError(fail, 2, "CUDA_ERROR_OUT_OF_MEMORY, out of memory")

    device = Device(0)
    arena = device_arena(device, GIB)
    arena.allocate(MIB)
    block = arena.allocate(MIB)
    before = taken(device)
    with monkeypatch.context() as patch:
        patch.setattr(functions, fail, refuse)
        with pytest.raises(OutOfMemory, match=r"GPU 0 refused .*another process.*raise the memory limit"):
            arena.allocate(8 * MIB)
    assert taken(device) == before == arena.reserved
    arena.allocate(8 * MIB)
    assert block.nbytes == MIB


def test_memory_that_another_process_takes(functions: SimpleNamespace) -> None:
    """Chunks that were mapped before one was refused are given back."""
    device, other = Device(0), ctypes.c_uint64()
    arena = device_arena(device, GIB)
    functions.cuMemAlloc_v2(other, 512 * MIB)
    with pytest.raises(OutOfMemory, match="GPU 0 refused"):
        arena.allocate(600 * MIB)
    assert taken(device) == 512 * MIB
    functions.cuMemFree_v2(other)
    arena.allocate(600 * MIB)


def test_freed_blocks_keep_at_most_a_thousandth_of_the_limit(functions: SimpleNamespace) -> None:
    arena = device_arena(Device(0), GIB)
    for size in range(1, 200):
        arena.allocate(size << 16).free()
    assert arena.reserved <= arena.peak_used + MIB + 4 * MIB, "a page is 2 MiB"


def test_other_failures_are_not_taken_for_running_out(
    functions: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise LibraryError("cuMemMap", 999, "unknown")

    device = Device(0)
    pages = MappedPages(device, 64 * MIB)
    monkeypatch.setattr(functions, "cuMemMap", fail)
    with pytest.raises(LibraryError) as caught:
        pages.map(0, 2 * MIB)
    assert caught.value.status == 999 and taken(device) == 0


def test_where_memory_cannot_be_mapped_the_whole_limit_is_taken(
    functions: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "attribute", lambda *_: 0)
    device = Device(0)
    arena = device_arena(device, 100 * MIB)
    assert taken(device) == 100 * MIB
    blocks = [arena.allocate(50 * MIB) for _ in range(2)]
    assert arena.reserved == arena.limit == 100 * MIB
    with pytest.raises(OutOfMemory):
        arena.allocate(1)
    for block in blocks:
        block.free()
    assert arena.trim() == 0
    arena.close()
    arena.close()
    assert taken(device) == 0
    with pytest.raises(OutOfMemory, match="GPU 0 refused"):
        WholePages(device, 2 * GIB)


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("pages_type", [MappedPages, WholePages])
def test_the_gpu_agrees_about_what_is_reserved(pages_type: type, cuda_device: Device) -> None:
    before = cuda_device.memory()[0]
    arena = Arena(pages_type(cuda_device, 1 << 30), 1 << 30)
    blocks = [arena.allocate(nbytes) for nbytes in (3 * MIB, 300 * MIB, 1, 200 * MIB + 7)]
    assert before - cuda_device.memory()[0] == arena.reserved
    blocks[1].free()
    arena.trim()
    assert before - cuda_device.memory()[0] == arena.reserved
    blocks.append(arena.allocate(400 * MIB))
    assert before - cuda_device.memory()[0] == arena.reserved
    arena.close()
    assert cuda_device.memory()[0] == before


@pytest.mark.gpu
def test_blocks_hold_what_is_written_to_them(cuda_device: Device) -> None:
    import cupy

    arena = device_arena(cuda_device, "1GiB")
    blocks = []
    for i, nbytes in enumerate((1, 1000, 70 * MIB, 12345678, 2 * MIB, 130 * MIB)):
        block = arena.allocate(nbytes)
        memory = cupy.cuda.UnownedMemory(block.address, nbytes, block, cuda_device.index)
        array = cupy.ndarray(nbytes, np.uint8, cupy.cuda.MemoryPointer(memory, 0))
        array.fill(i + 1)
        blocks.append(array)
        del block, memory, array
    for i, array in enumerate(blocks):
        assert (array == i + 1).all()
    del blocks, array
    assert arena.used == 0, "a CuPy array keeps its block and lets go of it"
    arena.trim()
    assert arena.reserved == 0


@pytest.mark.alone
@pytest.mark.gpu
def test_another_process_taking_the_memory(cuda_device: Device) -> None:
    free = cuda_device.memory()[0]
    hog = ctypes.c_uint64()
    arena = device_arena(cuda_device, free)
    block = arena.allocate(64 * MIB)
    driver.load().cuMemAlloc_v2(hog, free - 1024 * MIB)
    try:
        with pytest.raises(OutOfMemory, match=r"GPU 0 refused .* are free"):
            arena.allocate(2048 * MIB)
        arena.allocate(128 * MIB).free()
    finally:
        driver.load().cuMemFree_v2(hog)
    arena.allocate(2048 * MIB).free()
    block.free()
    arena.close()
    assert cuda_device.memory()[0] == free


def test_growing_memory_keeps_its_addresses_and_counts_towards_the_limit(functions: SimpleNamespace) -> None:
    device = Device(0)
    arena = device_arena(device, "64MiB")
    memory = GrowingMemory(device, arena, [MIB, MIB // 2], 40)
    addresses = [memory.address(lane) for lane in range(memory.lanes)]
    assert addresses[1] - addresses[0] == 40 * MIB and arena.reserved == taken(device) == 0
    memory.grow(3)
    assert arena.reserved == arena.used == taken(device) == 4 * MIB + 2 * MIB
    memory.grow(2)
    assert taken(device) == 6 * MIB
    block = arena.allocate(40 * MIB)
    with pytest.raises(OutOfMemory, match="the limit is reached"):
        memory.grow(20)
    with pytest.raises(OutOfMemory, match=r"64\.0 MiB allowed"):
        arena.allocate(20 * MIB)
    assert taken(device) == arena.reserved == 46 * MIB
    block.free()
    memory.grow(40)  # the arena's free pages make room
    assert [memory.address(lane) for lane in range(memory.lanes)] == addresses
    assert taken(device) == arena.reserved == 60 * MIB
    memory.free()
    memory.free()
    assert taken(device) == arena.reserved == arena.used == 0
    arena.close()


def test_lanes_that_a_page_would_hold_are_a_block_of_the_arena(functions: SimpleNamespace) -> None:
    device = Device(0)
    arena = device_arena(device, "64MiB")
    memory = GrowingMemory(device, arena, [1024, 100], 40)
    memory.grow(40)
    assert arena.used == 40 * 1024 + 4096 and arena.reserved == taken(device) == 2 * MIB
    address = memory.address(0)
    assert memory.address(1) - address == 40 * 1024
    memory.free()
    memory.free()
    assert arena.used == 0
    assert arena.allocate(40 * 1024 + 4096).address == address
    arena.close()


@pytest.mark.parametrize("seed", range(10))
def test_lanes_take_what_a_plan_counts(functions: SimpleNamespace, seed: int) -> None:
    """However they grow."""
    rng = np.random.default_rng(seed)
    device = Device(0)
    arena = device_arena(device, "512MiB")
    item_bytes = [int(n) for n in rng.integers(1, MIB, rng.integers(1, 5))]
    most = int(rng.integers(3, 40))
    memory = GrowingMemory(device, arena, item_bytes, most)
    for count in [*sorted(rng.integers(0, most, 5).tolist()), most]:
        memory.grow(count)
        assert sum(item_bytes) * count <= arena.used == arena.reserved == taken(device)
    assert arena.used == layer_bytes(item_bytes, most)
    memory.free()
    assert arena.used == taken(device) == 0
    arena.close()
