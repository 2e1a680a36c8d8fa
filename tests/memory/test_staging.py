"""Staging over a simulated device: every byte arrives, and no buffer is filled while the device copies from it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from bminf_lite.backend.stored_matrix import StoredMatrix
from bminf_lite.checkpoint.safetensors_file import SafetensorsFile
from bminf_lite.errors import CheckpointError
from bminf_lite.memory.staging import StagingBuffers


class LateDevice:
    """Copies happen when they are waited for, and not before; so a buffer that is filled too early loses its bytes."""

    def __init__(self, nbytes: int, buffers: list[bytearray]) -> None:
        self.memory = bytearray(nbytes)
        self.buffers = buffers
        self.pending: dict[int, tuple[int, int]] = {}
        self.most_pending = 0

    def copy(self, buffer: int, nbytes: int, address: int) -> None:
        assert buffer not in self.pending
        self.pending[buffer] = nbytes, address
        self.most_pending = max(self.most_pending, len(self.pending))

    def wait(self, buffer: int) -> None:
        if buffer in self.pending:
            nbytes, address = self.pending.pop(buffer)
            self.memory[address : address + nbytes] = self.buffers[buffer][:nbytes]


def staging_of(device_bytes: int, size: int, count: int, threads: int = 3) -> tuple[LateDevice, StagingBuffers]:
    buffers = [bytearray(size) for _ in range(count)]
    device = LateDevice(device_bytes, buffers)
    return device, StagingBuffers(device, [memoryview(b) for b in buffers], threads)


@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 64), st.integers(1, 6), st.integers(1, 5))
def test_every_byte_arrives(sizes: list[int], size: int, count: int, threads: int) -> None:
    files = [np.random.default_rng(i).integers(0, 256, n).astype(np.uint8).tobytes() for i, n in enumerate(sizes)]
    device, stage = staging_of(sum(sizes), size, count, threads)
    address = 0
    for content in files:

        def read(buffer: memoryview, offset: int, content: bytes = content) -> None:
            buffer[:] = content[offset : offset + len(buffer)]

        stage.upload(read, len(content), address)
        address += len(content)
    stage.finish()
    stage.close()
    assert bytes(device.memory) == b"".join(files)


def test_reading_goes_on_while_the_device_copies() -> None:
    device, stage = staging_of(100, 10, 2, threads=1)
    stage.upload(lambda buffer, offset: None, 100, 0)
    stage.finish()
    assert device.most_pending == 2
    stage.close()


@pytest.mark.parametrize("sizes", [[8], [1, 1, 1, 1]], ids=["of one matrix", "of several"])
def test_threads_read_pieces_side_by_side(sizes: list[int]) -> None:
    _, stage = staging_of(8, 1, 5, threads=4)
    together = threading.Barrier(4, timeout=300)
    for size in sizes:
        stage.upload(lambda buffer, offset: together.wait() and None, size, 0)
    stage.finish()
    stage.close()


def test_what_reading_raises_is_raised_and_all_threads_have_ended() -> None:
    _, stage = staging_of(64, 2, 5)
    under_way = []

    def read(buffer: memoryview, offset: int) -> None:
        under_way.append(offset)
        if offset == 18:
            raise CheckpointError("became shorter")
        time.sleep(0.01)
        under_way.remove(offset)

    with pytest.raises(CheckpointError, match="became shorter"):
        stage.upload(read, 64, 0)
        stage.finish()
    assert under_way == [18]
    stage.finish()  # an error is raised once
    stage.close()


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
