"""Staging over simulated devices: every byte arrives, and no buffer is filled while a device copies from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from bminf_lite.backend.stored_matrix import StoredMatrix
from bminf_lite.checkpoint.safetensors_file import SafetensorsFile
from bminf_lite.errors import CheckpointError, DeviceError
from bminf_lite.memory.staging import Columns, StagingBuffers, Uploader, UploadsStopped


class LateDevice:
    """Copies happen when they are waited for, and not before; so a buffer that is filled too early loses its bytes."""

    def __init__(self, nbytes: int, buffers: list[bytearray]) -> None:
        self.memory = bytearray(nbytes)
        self.buffers = buffers
        self.pending: dict[int, Callable[[], None]] = {}
        self.most_pending = 0
        self.copied = 0

    def copy(self, buffer: int, nbytes: int, address: int) -> None:
        def late() -> None:
            self.memory[address : address + nbytes] = self.buffers[buffer][:nbytes]

        self._later(buffer, nbytes, late)

    def copy_columns(self, buffer: int, columns: Columns, rows: int, address: int) -> None:
        def late() -> None:
            for row in range(rows):
                source, target = row * columns.pitch + columns.first, address + row * columns.width
                self.memory[target : target + columns.width] = self.buffers[buffer][source : source + columns.width]

        self._later(buffer, rows * columns.width, late)

    def _later(self, buffer: int, nbytes: int, late: Callable[[], None]) -> None:
        assert buffer not in self.pending
        self.pending[buffer] = late
        self.most_pending = max(self.most_pending, len(self.pending))
        self.copied += nbytes

    def wait(self, buffer: int) -> None:
        if buffer in self.pending:
            self.pending.pop(buffer)()


def ranks_of(ranks: int, device_bytes: int, size: int, count: int, threads: int = 3) -> list[Uploader]:
    """The uploaders of several devices."""
    buffers = [bytearray(size) for _ in range(count)]
    stage = StagingBuffers([memoryview(b) for b in buffers], threads, ranks)
    return [Uploader(stage, LateDevice(device_bytes, buffers)) for _ in range(ranks)]


def staging_of(device_bytes: int, size: int, count: int, threads: int = 3) -> tuple[Any, Uploader]:
    (uploader,) = ranks_of(1, device_bytes, size, count, threads)
    return uploader.device, uploader


class Content:
    """Bytes that are read as those of a file, and how many of them were."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.count = 0
        self.lock = threading.Lock()

    def read(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self.content[offset : offset + len(buffer)]
        with self.lock:
            self.count += len(buffer)


@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 64), st.integers(1, 6), st.integers(1, 5))
def test_every_byte_arrives(sizes: list[int], size: int, count: int, threads: int) -> None:
    files = [np.random.default_rng(i).integers(0, 256, n).astype(np.uint8).tobytes() for i, n in enumerate(sizes)]
    device, uploader = staging_of(sum(sizes), size, count, threads)
    address = 0
    for content in files:
        uploader.upload(Content(content).read, len(content), address)
        address += len(content)
    uploader.finish()
    uploader.staging.close()
    assert bytes(device.memory) == b"".join(files)


@given(
    st.integers(1, 4), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=4), st.integers(20, 64),
    st.integers(1, 5), st.integers(1, 4),
)  # fmt: skip
def test_ranks_share_what_is_read_of_divided_columns(
    ranks: int, shapes: list[tuple[int, int]], size: int, count: int, threads: int
) -> None:
    """Each byte is read once, and each rank copies its own columns, also behind and before bytes that it has alone."""
    uploaders, random = ranks_of(ranks, 2000, size, count, threads), np.random.default_rng(ranks)
    matrices = [random.integers(0, 256, (rows, ranks * width)).astype(np.uint8) for rows, width in shapes]
    alone = [random.integers(0, 256, 70).astype(np.uint8) for _ in range(ranks)]
    files = [Content(matrix.tobytes()) for matrix in matrices]

    def load(rank: int) -> None:
        address, uploader = 0, uploaders[rank]
        for file, (rows, width) in zip(files, shapes, strict=True):
            columns = Columns(rank * width, width, ranks * width)
            uploader.upload_columns(file.read, rows, columns, address)
            address += rows * width
            uploader.upload(Content(alone[rank].tobytes()).read, 70, address)
            address += 70
        uploader.finish()

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(load, range(ranks)))
    uploaders[0].staging.close()
    for rank, uploader in enumerate(uploaders):
        expected = b""
        for matrix, (_, width) in zip(matrices, shapes, strict=True):
            expected += matrix[:, rank * width : (rank + 1) * width].tobytes() + alone[rank].tobytes()
        device: Any = uploader.device
        assert bytes(device.memory[: len(expected)]) == expected and device.copied == len(expected)
    assert [file.count for file in files] == [matrix.size for matrix in matrices]


def test_reading_goes_on_while_the_device_copies() -> None:
    device, uploader = staging_of(100, 10, 2, threads=1)
    uploader.upload(lambda buffer, offset: None, 100, 0)
    uploader.finish()
    assert device.most_pending == 2
    uploader.staging.close()


@pytest.mark.parametrize("sizes", [[8], [1, 1, 1, 1]], ids=["of one matrix", "of several"])
def test_threads_read_pieces_side_by_side(sizes: list[int]) -> None:
    _, uploader = staging_of(8, 1, 5, threads=4)
    together = threading.Barrier(4, timeout=300)
    for size in sizes:
        uploader.upload(lambda buffer, offset: together.wait() and None, size, 0)
    uploader.finish()
    uploader.staging.close()


def test_what_reading_raises_is_raised_and_all_threads_have_ended() -> None:
    _, uploader = staging_of(64, 2, 5)
    begun, under_way = [], []

    def read(buffer: memoryview, offset: int) -> None:
        begun.append(offset)
        under_way.append(offset)
        if offset == 18:
            raise CheckpointError("became shorter")
        time.sleep(0.01)
        under_way.remove(offset)

    with pytest.raises(CheckpointError, match="became shorter"):
        uploader.upload(read, 64, 0)
        uploader.finish()
    assert under_way == [18] and 62 not in begun  # the rest is not read
    uploader.finish()  # an error is raised once
    uploader.upload(lambda buffer, offset: None, 64, 0)
    uploader.finish()
    uploader.staging.close()


def failing(buffer: memoryview, offset: int) -> None:
    raise CheckpointError("became shorter")


@pytest.mark.parametrize("where", ["in its own part", "in a divided matrix", "before it comes", "when it is closed"])
def test_a_rank_that_fails_stops_the_others(where: str) -> None:
    """The other one waits for a matrix that the failed one never loads, and ends; then both can begin anew."""
    first, second = ranks_of(2, 200, 20, 4)
    columns = Columns(0, 5, 10)
    stopped = threading.Event()

    def other() -> None:
        try:
            for _ in range(2):
                first.upload_columns(failing if "divided" in where else Content(bytes(100)).read, 10, columns, 0)
            first.finish()
        finally:
            stopped.set()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(other)
        if where == "before it comes":
            second.cancel()
        elif where == "when it is closed":
            second.staging.abort()
        else:
            second.upload_columns(failing if "divided" in where else Content(bytes(100)).read, 10, columns, 0)
            second.upload(failing, 50, 0)
            with pytest.raises(CheckpointError, match="became shorter"):
                second.finish()
        assert stopped.wait(60)
    expected = (CheckpointError, UploadsStopped) if "divided" in where else UploadsStopped
    with pytest.raises(expected):
        ended.result()
    first.staging.reset()
    for uploader in (first, second):
        uploader.reset()
        uploader.upload_columns(Content(bytes(range(100))).read, 10, columns, 0)
    for uploader in (first, second):
        uploader.finish()
    first.staging.close()
    first.staging.close()
    for uploader in (first, second):
        device: Any = uploader.device
        assert bytes(device.memory[:10]) == bytes((*range(5), *range(10, 15)))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_copy_that_a_device_refuses_is_an_error_of_those_that_wait_for_it(failing: int) -> None:
    uploaders, content = ranks_of(2, 2000, 20, 3), Content(bytes(range(100)))

    def refuse(buffer: int, columns: Columns, rows: int, address: int) -> None:
        raise DeviceError("refused")

    device: Any = uploaders[failing].device
    device.copy_columns = refuse
    for rank, uploader in enumerate(uploaders):
        uploader.upload_columns(content.read, 10, Columns(5 * rank, 5, 10), 0)
    for uploader in uploaders:
        with pytest.raises(DeviceError, match="refused"):
            uploader.finish()
    uploaders[0].staging.close()
    assert not [t for t in threading.enumerate() if t in uploaders[0].staging._copiers + uploaders[0].staging._readers]


def test_ranks_share_the_threads_that_read() -> None:
    uploaders = ranks_of(2, 2000, 20, 8, threads=3)
    running, most, lock = 0, 0, threading.Lock()

    def read(buffer: memoryview, offset: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.001)
        with lock:
            running -= 1

    for uploader in uploaders:
        uploader.upload(read, 500, 0)
    for uploader in uploaders:
        uploader.finish()
    uploaders[0].staging.close()
    assert most == 3


def test_columns_of_a_stored_matrix() -> None:
    """Also of some of its rows, and read in pieces of any size."""
    values = np.random.default_rng(0).integers(0, 1 << 15, (50, 70)).astype(np.int16)
    flat = values.view(np.uint8).reshape(-1)

    def read(buffer: memoryview, offset: int) -> None:
        np.frombuffer(buffer, np.uint8)[...] = flat[offset : offset + len(buffer)]

    matrix = StoredMatrix(values.shape, values.dtype, read)
    for index in ((slice(None), slice(8, 40)), (slice(3, 20), slice(35, None)), (slice(None), slice(5, 5))):
        part = matrix[index]
        assert isinstance(part, StoredMatrix)
        np.testing.assert_array_equal(np.asarray(part), values[index])
        for again in ((slice(1, 9), slice(None)), (slice(None), slice(2, 7)), slice(4, 30)):
            some = part[again]
            assert isinstance(some, StoredMatrix) and some.whole is not None
            np.testing.assert_array_equal(np.asarray(some), values[index][again])
            own = np.asarray(some.whole)[:, some.first : some.first + some.shape[1]]
            np.testing.assert_array_equal(own, values[index][again])
    part, expected = matrix[:, 8:40], np.ascontiguousarray(values[:, 8:40]).view(np.uint8).reshape(-1)
    assert isinstance(part, StoredMatrix)
    for offset, count in ((0, 64), (7, 300), (64 * 49, 64), (100, 1)):
        piece = bytearray(count)
        part.read(memoryview(piece), offset)
        assert bytes(piece) == expected[offset : offset + count].tobytes()
    np.testing.assert_array_equal(matrix[:, [3, 9]], values[:, [3, 9]])


def test_rows_of_a_stored_matrix(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(-127, 128, (300, 70)).astype(np.int8)
    save_file({"x": values}, str(tmp_path / "a.safetensors"))
    file = SafetensorsFile(tmp_path / "a.safetensors")
    matrix = StoredMatrix((300, 70), values.dtype, lambda buffer, offset: file.read_tensor("x", buffer, offset))
    np.testing.assert_array_equal(np.asarray(matrix), values)
    np.testing.assert_array_equal(matrix[[5, 2]], values[[5, 2]])
    np.testing.assert_array_equal(np.concatenate([matrix, matrix]), np.concatenate([values, values]))
    assert np.asarray(matrix, np.float32).dtype == np.float32 and matrix.nbytes == values.nbytes
    for index in (slice(10, 200), slice(299, None), slice(5, 5), slice(8, 2), slice(-3, None)):
        part = matrix[index]
        assert isinstance(part, StoredMatrix) and part.nbytes == values[index].nbytes
        np.testing.assert_array_equal(np.asarray(part), values[index])
