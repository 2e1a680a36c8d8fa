"""The fake GPU sees what it is there to see. Its parts are tried without being put in place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_gpu import ptx
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


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("profile", ["h200", "sm_86"])
def test_kernels_compute_by_their_own_code(profile: str) -> None:
    """Products of one row and kernels over rows, interpreted: what the tests on a GPU ask of these operations."""
    folder = Path(__file__).parents[1] / "backend"
    files = [folder / "test_operations.py", folder / "test_early_products.py", folder / "test_rotation.py"]
    options = ["-q", "-m", "gpu", f"--fake-gpu={profile}", "--fake-gpu-ptx"]
    subprocess.run([sys.executable, "-m", "pytest", *options, *map(str, files)], check=True)


@pytest.fixture
def addition() -> ptx.Program:
    """Each thread of a block adds its number to a value of its neighbour, which it gets through shared memory."""
    text = """
.visible .entry add(.param .u64 add_param_0)
{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<4>;
    .shared .align 4 .b8 values[256];
    ld.param.u64 %rd1, [add_param_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r2, [%rd3];
    mov.u32 %r3, values;
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r3, %r4;
    st.shared.u32 [%r5], %r2;
    bar.sync 0;
    setp.eq.s32 %p1, %r1, 63;
    @%p1 bra LAST;
    {.reg .b32 other;
    ld.shared.u32 other, [%r5+4];
    add.s32 %r6, other, %r1;}
    bra.uni WRITE;
LAST:
    neg.s32 %r6, %r1;
WRITE:
    st.global.u32 [%rd3], %r6;
    ret;
}
"""
    return ptx.Program(text, "add")


def test_threads_part_meet_and_wait(addition: ptx.Program) -> None:
    values = np.arange(100, 164, dtype=np.int32)
    expected = np.append(values[1:] + np.arange(63), -63)
    touched: list[int] = []
    parameters = np.array([values.ctypes.data], np.uint64).tobytes()
    ptx.Grid(addition, (1, 1, 1), 64, parameters, 0, lambda addresses, nbytes: touched.append(nbytes)).run()
    assert np.array_equal(values, expected)
    assert touched == [4, 4]


def test_an_access_that_is_not_aligned_and_one_beyond_shared_memory_are_errors(addition: ptx.Program) -> None:
    values = np.zeros(80, np.int32)

    def run(address: int, threads: int) -> None:
        parameters = np.array([address], np.uint64).tobytes()
        ptx.Grid(addition, (1, 1, 1), threads, parameters, 0, lambda addresses, nbytes: None).run()

    with pytest.raises(AssertionError, match="not aligned"):
        run(values.ctypes.data + 2, 64)
    addition.static_shared = 252  # less than it declares
    with pytest.raises(AssertionError, match="beyond shared memory"):
        run(values.ctypes.data, 80)
