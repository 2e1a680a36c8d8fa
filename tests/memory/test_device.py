"""How much of a GPU may be used, and its pages: with a driver that only records, and on a GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from bminf_lite.cuda.runtime import driver
from bminf_lite.cuda.runtime.bindings import LibraryError
from bminf_lite.errors import OutOfMemory, UsageError
from bminf_lite.memory.arena import Arena
from bminf_lite.memory.device import (
    CHUNK_BYTES,
    MARGIN,
    MappedPages,
    WholePages,
    device_arena,
    device_limit,
    device_pages,
)

MIB = 1 << 20


def test_without_a_limit_all_but_a_margin() -> None:
    assert device_limit(None, 10 << 30) == (10 << 30) - MARGIN
    assert device_limit(None, MARGIN // 2) == 0


def test_a_limit_is_kept_whatever_is_free() -> None:
    assert device_limit("6GiB", 100 << 30) == device_limit(6 << 30, 1 << 30) == 6 << 30
    with pytest.raises(UsageError, match="plenty"):
        device_limit("plenty", 1 << 30)


class FakeDriver:
    """A GPU of ``total`` bytes that checks every call as the driver would."""

    base = 1 << 40

    def __init__(self, total: int) -> None:
        self.free = total
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.reserved = 0
        self.serial = 0
        self.fail = ""

    def _step(self, name: str, status: int = 2) -> None:
        if name == self.fail:
            raise LibraryError(name, status, "CUDA_ERROR_OUT_OF_MEMORY, out of memory")

    def cuMemGetAllocationGranularity(self, granularity, properties, option) -> None:
        assert (properties.type, properties.location.type, properties.location.id, option) == (1, 1, 0, 0)
        granularity.value = 2 * MIB

    def cuMemAddressReserve(self, base, nbytes, alignment, address, flags) -> None:
        assert nbytes % (2 * MIB) == 0 and not self.reserved
        base.value, self.reserved = self.base, nbytes

    def cuMemAddressFree(self, base, nbytes) -> None:
        assert (base, nbytes) == (self.base, self.reserved) and not self.mapped
        self.reserved = 0

    def cuMemCreate(self, handle, nbytes, properties, flags) -> None:
        if nbytes > self.free:
            raise LibraryError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY, out of memory")
        assert 0 < nbytes <= CHUNK_BYTES and nbytes % (2 * MIB) == 0
        self.serial += 1
        handle.value = self.serial
        self.handles[self.serial] = nbytes
        self.free -= nbytes

    def cuMemRelease(self, handle) -> None:
        key = handle if isinstance(handle, int) else handle.value
        assert key not in {h for _, h in self.mapped.values()}
        self.free += self.handles.pop(key)

    def cuMemMap(self, address, nbytes, offset, handle, flags) -> None:
        self._step("cuMemMap")
        assert offset == 0 and self.handles[handle.value] == nbytes
        assert self.base <= address and address + nbytes <= self.base + self.reserved
        assert all(address + nbytes <= a or a + n <= address for a, (n, _) in self.mapped.items())
        self.mapped[address] = (nbytes, handle.value)

    def cuMemSetAccess(self, address, nbytes, access, count) -> None:
        self._step("cuMemSetAccess")
        assert (access.location.type, access.location.id, access.flags, count) == (1, 0, 3, 1)
        assert self.mapped[address][0] == nbytes
        self.accessible.add(address)

    def cuMemUnmap(self, address, nbytes) -> None:
        assert self.mapped.pop(address)[0] == nbytes
        self.accessible.discard(address)

    def cuMemAlloc_v2(self, base, nbytes) -> None:
        if nbytes > self.free:
            raise LibraryError("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY, out of memory")
        base.value, self.reserved, self.free = self.base, nbytes, self.free - nbytes

    def cuMemFree_v2(self, base) -> None:
        assert base == self.base and self.reserved
        self.free, self.reserved = self.free + self.reserved, 0


class FakeDevice(SimpleNamespace):
    """What pages use of a device."""

    def __init__(self, fake: FakeDriver, mapping: bool = True) -> None:
        super().__init__(index=0, synchronized=0, make_current=lambda: None)
        self.memory = lambda: (fake.free, 1 << 30)
        self.attribute = lambda attribute: int(mapping)

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(1 << 30)
    monkeypatch.setattr(driver, "load", lambda: fake)
    return fake


def test_an_arena_takes_what_it_needs_and_gives_back_what_is_free(fake: FakeDriver) -> None:
    device = FakeDevice(fake)
    arena = device_arena(device, "512MiB")  # type: ignore[arg-type]
    assert fake.free == 1 << 30
    first, second = arena.allocate(200 * MIB), arena.allocate(100 * MIB + 1)
    assert (1 << 30) - fake.free == arena.reserved == 302 * MIB
    assert fake.accessible == set(fake.mapped)
    first.free()
    assert arena.trim() == 200 * MIB and device.synchronized == 1
    assert (1 << 30) - fake.free == arena.reserved == 102 * MIB
    again = arena.allocate(200 * MIB)
    assert again.address == fake.base
    second.free()
    again.free()
    arena.trim()
    arena.close()
    assert fake.free == 1 << 30 and not fake.handles and not fake.reserved


def test_only_whole_chunks_can_be_given_back(fake: FakeDriver) -> None:
    pages = MappedPages(FakeDevice(fake), 512 * MIB)  # type: ignore[arg-type]
    pages.map(2 * MIB, 2 * CHUNK_BYTES)
    assert pages.unmap(2 * MIB + CHUNK_BYTES // 2, CHUNK_BYTES + CHUNK_BYTES // 2) == [
        (2 * MIB + CHUNK_BYTES, CHUNK_BYTES)
    ]
    assert pages.unmap(2 * MIB, 2 * MIB) == []
    pages.map(2 * MIB + CHUNK_BYTES, 2 * MIB)
    pages.close()
    pages.close()
    assert fake.free == 1 << 30


@pytest.mark.parametrize("fail", ["", "cuMemMap", "cuMemSetAccess"])
def test_a_gpu_that_refuses_leaves_nothing_mapped(fail: str, fake: FakeDriver) -> None:
    arena = device_arena(FakeDevice(fake), 1 << 30)  # type: ignore[arg-type]
    block = arena.allocate(MIB)
    fake.free -= 512 * MIB  # which another process took
    before, fake.fail = fake.free, fail
    with pytest.raises(OutOfMemory, match=r"GPU 0 refused .*another process.*raise the memory limit"):
        arena.allocate(8 * MIB if fail else 600 * MIB)
    assert fake.free == before and len(fake.handles) == len(fake.mapped) == 1
    fake.fail = ""
    arena.allocate(8 * MIB)
    assert block.nbytes == MIB


def test_what_waits_between_blocks_is_at_most_a_thousandth_of_the_limit(fake: FakeDriver) -> None:
    arena = device_arena(FakeDevice(fake), 1 << 30)  # type: ignore[arg-type]
    for size in range(1, 200):
        arena.allocate(size << 16).free()
    assert arena.reserved <= arena.peak_used + MIB + 4 * MIB, "a page is 2 MiB"


def test_a_limit_larger_than_the_gpu_is_refused(fake: FakeDriver) -> None:
    with pytest.raises(UsageError, match=r"memory limit is 4\.0 GiB, but the GPU has 1\.0 GiB"):
        device_arena(FakeDevice(fake), "4GiB")  # type: ignore[arg-type]
    assert fake.free == 1 << 30 and not fake.reserved


def test_other_failures_are_not_taken_for_running_out(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = MappedPages(FakeDevice(fake), 64 * MIB)  # type: ignore[arg-type]
    monkeypatch.setattr(fake, "cuMemMap", lambda *_: fake._step(fake.fail, 999))
    fake.fail = "cuMemMap"
    with pytest.raises(LibraryError) as caught:
        pages.map(0, 2 * MIB)
    assert caught.value.status == 999 and not fake.handles


def test_where_memory_cannot_be_mapped_the_whole_limit_is_taken(fake: FakeDriver) -> None:
    device = FakeDevice(fake, mapping=False)
    pages = device_pages(device, 100 * MIB)  # type: ignore[arg-type]
    assert isinstance(pages, WholePages) and fake.free == (1 << 30) - 100 * MIB
    arena = Arena(pages, 100 * MIB)
    blocks = [arena.allocate(50 * MIB) for _ in range(2)]
    assert arena.reserved == arena.limit == 100 * MIB
    with pytest.raises(OutOfMemory):
        arena.allocate(1)
    for block in blocks:
        block.free()
    assert arena.trim() == 0
    arena.close()
    pages.close()
    assert fake.free == 1 << 30
    with pytest.raises(OutOfMemory, match="GPU 0 refused"):
        WholePages(device, 2 << 30)  # type: ignore[arg-type]


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("pages_type", [MappedPages, WholePages])
def test_the_gpu_agrees_about_what_is_reserved(pages_type: type, cuda_device: driver.Device) -> None:
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
def test_blocks_hold_what_is_written_to_them(cuda_device: driver.Device) -> None:
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
def test_another_process_taking_the_memory(cuda_device: driver.Device) -> None:
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
