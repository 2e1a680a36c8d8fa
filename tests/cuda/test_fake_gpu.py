"""The fake GPU sees what it is there to see. Its parts are tried without being put in place."""

from __future__ import annotations

import numpy as np
import pytest
from fake_gpu.launching import check, run
from fake_gpu.machine import PROFILES, FakeKernel, Launch, Machine, Requested
from fake_gpu.memory import POISON, FakeGpuError, Piece


@pytest.fixture
def machine() -> Machine:
    return Machine(PROFILES["h200"])


def place(machine: Machine, values: np.ndarray) -> int:
    """The address of a copy in the fake memory."""
    address = machine.memory.reserve(max(values.nbytes, 4096))
    machine.memory.add(address, values.nbytes)
    machine.memory.raw(address, values.nbytes)[:] = np.frombuffer(values.tobytes(), np.uint8)
    return address


def int8_to_half(machine: Machine, codes: int, out: int, count: int, blocks: int = 1) -> None:
    """A launch of the kernel ``int8_to_half``."""
    kernel = FakeKernel("rowwise/rows.cu", "int8_to_half", ())
    machine.requested["rowwise/rows.cu", "int8_to_half", ()] = Requested("sm_90a")
    parameters = np.array([codes, out, count], np.uint64).tobytes()
    launch = Launch(kernel, (blocks, 1, 1), 256, 0, 1, parameters)
    check(machine, launch)
    run(machine, launch)


def test_a_launch_computes(machine: Machine):
    codes, out = place(machine, np.arange(32, dtype=np.int8)), place(machine, np.zeros(32, np.float16))
    int8_to_half(machine, codes, out, 32)
    assert np.array_equal(machine.memory.raw(out, 64).view(np.float16), np.arange(32))


def test_a_freed_pointer_is_an_error_at_the_launch(machine: Machine):
    codes, out = place(machine, np.zeros(32, np.int8)), place(machine, np.zeros(32, np.float16))
    machine.memory.remove(codes)
    assert (machine.memory.raw(codes, 32) == POISON).all()
    with pytest.raises(FakeGpuError, match=r"codes: .* not in memory that is in use"):
        int8_to_half(machine, codes, out, 32)


def test_reading_past_a_block_too_few_blocks_and_odd_addresses_are_errors(machine: Machine):
    codes, out = place(machine, np.zeros(8192, np.int8)), place(machine, np.zeros(32, np.float16))
    with pytest.raises(FakeGpuError, match=r"out: 96 bytes .* end 32 bytes past"):
        int8_to_half(machine, codes, out, 48)
    with pytest.raises(FakeGpuError, match="blocks are missing"):
        int8_to_half(machine, codes, out, 8192)
    with pytest.raises(FakeGpuError, match="not aligned to 16 bytes"):
        int8_to_half(machine, codes + 8, out, 16)


def test_what_is_free_in_a_scratch_is_not_in_use(machine: Machine):
    address = place(machine, np.zeros(1024, np.uint8))
    piece = machine.memory.piece(address)
    assert piece is not None
    piece.divided = True
    piece.inner.append(Piece(address + 512, 100))
    machine.memory.check(address + 512, 100, "a block")
    machine.memory.check(address, 1024, "a graph's memory", inside=False)
    for start, nbytes in ((address, 4), (address + 512, 101), (address + 700, 4)):
        with pytest.raises(FakeGpuError):
            machine.memory.check(start, nbytes, "not in use")


def test_recorded_work_runs_when_it_is_replayed(machine: Machine):
    done: list[int] = []
    stream = machine.new_stream()
    stream.record()
    machine.put(stream.ptr, lambda: done.append(1))
    with pytest.raises(FakeGpuError, match="being recorded"):
        machine.refuse_in_recording("waiting")
    work, stream.recording = stream.recording, None
    assert not done
    machine.replay(work, stream.ptr)
    machine.replay(work, stream.ptr)
    assert done == [1, 1]
