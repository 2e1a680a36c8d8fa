"""The GPU's half of streaming with CuPy's calls replaced: bytes move in host memory, in the order that events allow."""

from __future__ import annotations

import ctypes
import errno
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cupy import FakeStream, HostPages, replace_cupy

pytest.importorskip("cupy", reason="CuPy is not installed")

from bminf_lite.backend.cuda import streamed_weights as streaming
from bminf_lite.backend.cuda.weight_loader import Loader
from bminf_lite.backend.values import Placement
from bminf_lite.errors import OutOfMemory
from bminf_lite.memory.arena import ALIGNMENT, Arena
from bminf_lite.memory.staging import Staging

SLOT = 4 * ALIGNMENT


@pytest.fixture(params=[False, True], ids=["late copies", "early copies"])
def pinned_room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CuPy's calls replaced; the list holds the bytes that may still be pinned."""
    return replace_cupy(streaming, request.param, monkeypatch)


class FakeLoader(Loader):
    """A loader over host memory."""

    def __init__(self, streamed: tuple[int, ...], slot_bytes: int = SLOT, limit: int = 1 << 16) -> None:
        self.stream = FakeStream()
        arrays: Any = SimpleNamespace(device=0, stream=self.stream)
        super().__init__(Arena(HostPages(limit), limit), arrays, None, None)  # type: ignore[arg-type]
        self.placement = Placement(streamed, 2, slot_bytes)

    def layer(self, index: int) -> Any:
        """A layer of two matrices, the first of ``index + 1`` bytes, both full of its number."""
        made = []
        for nbytes in (index + 1, 700):
            block = self._matrices.allocate(nbytes)
            values = np.full(nbytes, index, np.uint8)
            self.stream.give(lambda a=block.address, v=values: ctypes.memmove(a, v.ctypes.data, v.nbytes))
            made.append((block, nbytes))
        return index, made


def contents(made: Any) -> list[set[int]]:
    return [set((ctypes.c_uint8 * nbytes).from_address(block.address)) for block, nbytes in made]


def run_steps(loader: FakeLoader, blocks: Any, steps: int) -> None:
    """Layers that compute something with their matrices, on the compute stream."""
    seen: list[tuple[int, list[set[int]]]] = []
    for _ in range(steps):
        for index, made in blocks:
            loader.stream.give(lambda i=index, m=made: seen.append((i, contents(m))))
    loader.stream.synchronize()
    assert [i for i, _ in seen] == list(range(7)) * steps
    assert all(found == [{i}, {i}] for i, found in seen)


def test_every_layer_computes_with_its_own_weights(pinned_room: list[int]) -> None:
    loader = FakeLoader((1, 2, 4, 5, 6))
    blocks = loader.blocks(loader.layer, 7, loader.placement)
    run_steps(loader, blocks, 3)
    run_steps(loader, blocks, 2)
    loader.close()


def test_slots_are_all_that_streamed_layers_take(pinned_room: list[int]) -> None:
    loader = FakeLoader((0, 1, 2, 3, 4, 5, 6))
    blocks = loader.blocks(loader.layer, 7, loader.placement)
    assert loader.arena.used == 2 * SLOT
    assert (1 << 30) - pinned_room[0] == 7 * 3 * ALIGNMENT
    assert len(list(blocks)) == 7
    loader.close()


def test_where_memory_is_not_pinned_it_goes_on_with_a_warning(pinned_room: list[int]) -> None:
    loader = FakeLoader((1, 2, 4, 5, 6))
    pinned_room[0] = 4 * ALIGNMENT
    with pytest.warns(RuntimeWarning, match=r"does not pin 1\.5 KiB .*raise the limit on locked memory"):
        blocks = loader.blocks(loader.layer, 7, loader.placement)
    assert [image.pinned for image in loader._links[0].images] == [True, False, False, False, False]
    run_steps(loader, blocks, 3)
    loader.close()


def test_a_host_that_is_nearly_full_keeps_the_rest_on_disk(
    pinned_room: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loader = FakeLoader((1, 2, 4, 5, 6))
    free = iter([streaming.HOST_RESERVE + 3 * ALIGNMENT, *[streaming.HOST_RESERVE] * 4])
    monkeypatch.setattr(streaming, "available_memory", lambda: next(free))
    with pytest.warns(RuntimeWarning, match=r"nearly full: 1\.5 KiB .* set TMPDIR"):
        blocks = loader.blocks(loader.layer, 7, loader.placement)
    assert [image.pinned for image in loader._links[0].images] == [True, False, False, False, False]
    assert list(tmp_path.iterdir()) == []  # a file without a name goes with the process
    run_steps(loader, blocks, 3)
    loader.close()


@pytest.mark.filterwarnings("ignore:the host's memory")
def test_a_disk_that_is_full_too_is_an_error(pinned_room: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(streaming, "available_memory", lambda: 0)
    monkeypatch.setattr(streaming.os, "posix_fallocate", full)
    loader = FakeLoader((0,))
    with pytest.raises(OutOfMemory, match=r"neither the host's memory nor .*No space left"):
        loader.blocks(loader.layer, 1, loader.placement)


def test_a_layer_that_fails_leaves_later_weights_in_the_arena(pinned_room: list[int]) -> None:
    loader = FakeLoader((0,))

    def fail(index: int) -> Any:
        raise ValueError("a damaged weight")

    with pytest.raises(ValueError, match="damaged"):
        loader.blocks(fail, 2, loader.placement)
    assert loader._matrices is loader.arena


def test_slots_that_are_too_small_are_an_error(pinned_room: list[int]) -> None:
    loader = FakeLoader((0,), slot_bytes=ALIGNMENT)
    with pytest.raises(OutOfMemory, match="too small"):
        loader.blocks(loader.layer, 1, loader.placement)


def test_no_room_for_slots_is_an_error(pinned_room: list[int]) -> None:
    loader = FakeLoader((0,), slot_bytes=1 << 20)
    with pytest.raises(OutOfMemory, match="out of device memory"):
        loader.blocks(loader.layer, 1, loader.placement)


def test_staged_bytes_arrive_in_order_with_other_work(pinned_room: list[int]) -> None:
    """A buffer is filled again only when the copy from it is over, however late copies are."""
    stream = FakeStream()
    uploads = streaming.PinnedBuffers(0, stream, 2, 64)  # type: ignore[arg-type]
    stage = Staging(uploads, uploads.buffers, 2)
    source = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    target = np.zeros(1000, np.uint8)
    stream.give(lambda: target.fill(7))  # as padding is zeroed before

    def read(buffer: memoryview, offset: int) -> None:
        buffer[:] = source[offset : offset + len(buffer)].data

    stage.upload(read, 1000, target.ctypes.data)
    stage.finish()
    stage.close()
    np.testing.assert_array_equal(target, source)
