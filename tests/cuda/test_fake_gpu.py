"""The fake GPU sees what it is there to see. Its parts are tried without being put in place."""

from __future__ import annotations

import functools
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_gpu import ptx
from fake_gpu.launching import check, run, starts_next_early
from fake_gpu.machine import PROFILES, FakeKernel, Launch, Machine, Requested
from fake_gpu.memory import POISON, FakeGpuError, Piece
from fake_gpu.races import Kind, LaunchOrder, SharedMemory

from bminf_lite.cuda.kernels.constants import ScoreKind


@pytest.fixture
def machine() -> Machine:
    return Machine(PROFILES["h200"])


def place(machine: Machine, values: np.ndarray) -> int:
    """The address of a copy in the fake memory."""
    address = machine.memory.reserve(max(values.nbytes, 4096))
    machine.memory.add(address, values.nbytes)
    machine.memory.raw(address, values.nbytes)[:] = np.frombuffer(values.tobytes(), np.uint8)
    return address


def write_words(machine: Machine, source: int, target: int, count: int, blocks: int = 1) -> None:
    """A launch of the kernel ``write_words``."""
    kernel = FakeKernel("rowwise/pointwise.cu", "write_words", ())
    machine.requested["rowwise/pointwise.cu", "write_words", ()] = Requested("sm_90a")
    parameters = struct.pack("PPi", source, target, count)
    launch = Launch(kernel, (blocks, 1, 1), 256, 0, 1, parameters)
    check(machine, launch)
    run(machine, launch)


def test_a_launch_computes(machine: Machine):
    source, target = place(machine, np.arange(32, dtype=np.int32)), place(machine, np.zeros(32, np.int32))
    write_words(machine, source, target, 32)
    assert np.array_equal(machine.memory.raw(target, 128).view(np.int32), np.arange(32))


def test_a_freed_pointer_is_an_error_at_the_launch(machine: Machine):
    source, target = place(machine, np.zeros(32, np.int32)), place(machine, np.zeros(32, np.int32))
    machine.memory.remove(source)
    assert (machine.memory.raw(source, 128) == POISON).all()
    with pytest.raises(FakeGpuError, match=r"from: .* not in memory that is in use"):
        write_words(machine, source, target, 32)


def test_reading_past_a_block_too_few_blocks_and_odd_addresses_are_errors(machine: Machine):
    source, target = place(machine, np.zeros(8192, np.int32)), place(machine, np.zeros(16, np.int32))
    with pytest.raises(FakeGpuError, match=r"to: 96 bytes .* end 32 bytes past"):
        write_words(machine, source, target, 24)
    with pytest.raises(FakeGpuError, match="blocks are missing"):
        write_words(machine, source, target, 8192)
    with pytest.raises(FakeGpuError, match="not aligned to 4 bytes"):
        write_words(machine, source + 2, target, 16)


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
@pytest.mark.parametrize("profile", ["h200", "sm_86", "h200:2"])
def test_kernels_compute_by_their_own_code(profile: str) -> None:
    """Products of one row and kernels over rows, interpreted: what the tests on a GPU ask of these operations.

    With two SMs the warps of ``gemv`` have more units than stages, so they refill their pipelines. The others take few
    random examples, and one case of the three with thousands of rows.
    """
    folder = Path(__file__).parents[1] / "backend"
    files = [folder / "test_operations.py", folder / "test_early_products.py", folder / "test_rotation.py"]
    few = ("--hypothesis-profile=under a checker", "-k", "not (more_rows and (600 or 2400))")
    run_ptx(profile, *map(str, files), *(() if profile == "h200:2" else few))


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("profile", "tests"),
    [
        ("h200", "segments_are_merged"),
        ("sm_86", "blocks_share and True"),
        ("h200", "clusters_for_few and 256 and False"),
        ("h200", "records_of_few and False"),
        ("h200", "wgmma_gives and 256-3"),
        ("h200", "products_of_heads"),
    ],
)
def test_latent_attention_computes_by_its_own_code(profile: str, tests: str) -> None:
    """Tensor cores, segments and their merges, and int8 rows; the two differ in how many rows a block has."""
    run_ptx(profile, str(Path(__file__).parents[1] / "backend" / "test_latent_attention.py"), "-k", tests)


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_attention_computes_by_its_own_code(kernel: str) -> None:
    """Each kind of work, segments and their merges, with sinks."""
    file = Path(__file__).parent / f"test_attention_{kernel}.py"
    run_ptx("sm_86", str(file), "-k", f"little_work and {int(ScoreKind.SINKS)}-")


def run_ptx(profile: str, *arguments: str) -> None:
    options = ["-q", "-m", "gpu", f"--fake-gpu={profile}", "--fake-gpu-ptx"]
    subprocess.run([sys.executable, "-m", "pytest", *options, *arguments], check=True)


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


RACES = r"""
#include "common/async.cuh"
#include "common/common.cuh"
using namespace bminf;

enum Missing { NOTHING, SYNC, SECOND_SYNC, WAIT };

// Threads exchange values, twice, through the same memory.
template <Missing MISSING>
__global__ void exchange(int* x) {
    __shared__ int values[64];
    const int thread = threadIdx.x;
    values[thread] = x[thread];
    if (MISSING != SYNC) __syncthreads();
    const int y = values[63 - thread];
    if (MISSING != SECOND_SYNC) __syncthreads();
    values[thread] = y + 1;
    __syncthreads();
    x[thread] = values[63 - thread];
}

// The same in each warp. Without WARPS, lanes exchange values with another warp.
template <Missing MISSING, bool WARPS>
__global__ void exchange_in_warp(int* x) {
    __shared__ int values[64];
    const int thread = threadIdx.x, other = WARPS ? thread ^ 31 : thread ^ 63;
    values[thread] = x[thread];
    if (MISSING != SYNC) __syncwarp();
    const int y = values[other];
    if (MISSING != SECOND_SYNC) __syncwarp();
    values[thread] = y + 1;
    __syncwarp();
    x[thread] = values[other];
}

// The first 64 of 128 threads exchange values. With MISSING, the first 32 join another barrier than the second 32.
template <Missing MISSING>
__global__ void exchange_of_some(int* x) {
    __shared__ int values[64];
    const int thread = threadIdx.x;
    if (thread < 64) {
        values[thread] = x[thread];
        if (MISSING == NOTHING)
            sync_threads<64>();
        else if (thread < 32)
            asm volatile("bar.sync 2, 32;" ::: "memory");
        else
            asm volatile("bar.sync 3, 32;" ::: "memory");
        x[thread] = values[63 - thread] + 1;
    }
}

// x = the sum of all.
template <Missing MISSING>
__global__ void add(int* x) {
    __shared__ int sum;
    if (threadIdx.x == 0) sum = 0;
    if (MISSING != SYNC) __syncthreads();
    asm volatile("red.shared.add.s32 [%0], %1;" ::"r"(cast_smem_ptr_to_uint(&sum)), "r"(x[threadIdx.x]) : "memory");
    if (MISSING != SECOND_SYNC) __syncthreads();
    x[threadIdx.x] = sum;
}

// x + 1, 128 bytes after 128 bytes, copied to the same memory.
template <Missing MISSING>
__global__ void copy(int* x) {
    __shared__ __align__(128) int values[32];
    __shared__ __align__(8) unsigned long long barrier;
    const int lane = threadIdx.x;
    const unsigned mbarrier = cast_smem_ptr_to_uint(&barrier), from = cast_smem_ptr_to_uint(values);
    if (lane == 0) mbarrier_init(mbarrier, 1);
    if (MISSING != SYNC) __syncwarp();
    for (int i = 0; i < 2; ++i) {
        if (lane == 0) {
            mbarrier_arrive_expect_tx(mbarrier, 128);
            cp_async_bulk(from, x + i * 32, 128, mbarrier);
        }
        if (MISSING != WAIT || lane == 0) mbarrier_wait(mbarrier, i);
        x[i * 32 + lane] = ld_shared(from + lane * 4) + 1;
        if (MISSING != SECOND_SYNC) __syncwarp();
    }
}

// to = from + 1. EARLY: lets the next kernel start before it waits. ONE: one thread waits for its block.
template <bool EARLY, Missing MISSING, bool ONE>
__global__ void increment(const int* from, int* to) {
    int value = 0;
    if (EARLY) launch_dependent_grids();
    if (MISSING == WAIT) value = from[threadIdx.x];
    if (!ONE || threadIdx.x == 0) wait_on_dependent_grids();
    if (ONE && MISSING != SYNC) __syncthreads();
    if (MISSING != WAIT) value = from[threadIdx.x];
    if (!EARLY) launch_dependent_grids();
    to[threadIdx.x] = value + 1;
}
"""


@functools.cache
def kernel(expression: str) -> ptx.Program:
    """One of ``RACES``."""
    return ptx.compiled("races.cu", RACES, "sm_90a", expression)


def run_alone(expression: str, threads: int = 64) -> np.ndarray:
    """What a kernel makes of the numbers from 0 to 63."""
    values = np.arange(64, dtype=np.int32)
    parameters = np.array([values.ctypes.data], np.uint64).tobytes()
    ptx.Grid(kernel(expression), (1, 1, 1), threads, parameters, 0, lambda addresses, nbytes: None).run()
    return values


@pytest.mark.usefixtures("nvrtc")
def test_ordered_accesses_are_no_race() -> None:
    numbers = np.arange(64)
    np.testing.assert_array_equal(run_alone("exchange<NOTHING>"), numbers + 1)
    np.testing.assert_array_equal(run_alone("exchange_in_warp<NOTHING, true>"), numbers + 1)
    np.testing.assert_array_equal(run_alone("exchange_of_some<NOTHING>", 128), 64 - numbers)
    np.testing.assert_array_equal(run_alone("add<NOTHING>"), np.full(64, numbers.sum()))
    np.testing.assert_array_equal(run_alone("copy<NOTHING>", 32), numbers + 1)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("expression", "threads", "earlier"),
    [
        ("exchange<SYNC>", 64, "wrote"),
        ("exchange<SECOND_SYNC>", 64, "read"),
        ("exchange_in_warp<SYNC, true>", 64, "wrote"),
        ("exchange_in_warp<SECOND_SYNC, true>", 64, "read"),
        ("exchange_in_warp<NOTHING, false>", 64, "wrote"),  # __syncwarp orders nothing of two warps
        ("exchange_of_some<SYNC>", 128, "wrote"),
        ("add<SYNC>", 64, "wrote"),
        ("add<SECOND_SYNC>", 64, "added"),
        ("copy<SYNC>", 32, "wrote"),  # the mbarrier
        ("copy<WAIT>", 32, "wrote"),
        ("copy<SECOND_SYNC>", 32, "read"),
    ],
)
def test_a_missing_barrier_is_found(expression: str, threads: int, earlier: str) -> None:
    with pytest.raises(AssertionError, match=f"behind what another thread {earlier}: instruction"):
        run_alone(expression, threads)


def test_threads_at_one_word_of_shared_memory() -> None:
    threads, word = np.arange(64), np.zeros(64, np.int64)
    memory = SharedMemory(16, 64, 64)
    memory.access(Kind.ADD, word, 4, threads)
    memory.access(Kind.ADD, word, 4, threads)
    memory.join(threads, 0)
    memory.access(Kind.READ, word, 4, threads)
    with pytest.raises(AssertionError, match="thread read"):
        memory.access(Kind.WRITE, word[:1], 4, threads[-1:])
    memory.join(threads, 0)
    memory.access(Kind.WRITE, word[:1], 4, threads[-1:])
    memory.access(Kind.READ, word[:1], 4, threads[-1:])
    with pytest.raises(AssertionError, match="at once"):
        memory.access(Kind.WRITE, word + 8, 4, threads)


class Launches:
    """Kernels ``increment`` one behind the other, each on what the one before has written, or one before that."""

    def __init__(self) -> None:
        self.order, self.values = LaunchOrder(), [np.zeros(64, np.int32)]

    def run(self, template: str, before: int = 1, dependent: bool = True) -> None:
        self.values.append(np.zeros(64, np.int32))
        addresses = [self.values[i].ctypes.data for i in (-1 - before, -1)]
        code, parameters = kernel(f"increment<{template}>"), np.array(addresses, np.uint64).tobytes()
        pending = self.order.start(dependent)
        grid = ptx.Grid(code, (1, 1, 1), 64, parameters, 0, lambda addresses, nbytes: None, pending)
        grid.run()
        self.order.end(grid.written, grid.early)


@pytest.mark.usefixtures("nvrtc")
def test_what_earlier_kernels_write_is_read_behind_the_wait() -> None:
    launches = Launches()
    for early in ("true", "false"):
        launches.run(f"{early}, NOTHING, false")
        launches.run(f"{early}, NOTHING, true")  # one thread waits for its block
        for template in (f"{early}, WAIT, false", f"{early}, SYNC, true"):
            with pytest.raises(AssertionError, match="what the kernels before may still write"):
                launches.run(template)
            launches.values.pop()
    np.testing.assert_array_equal(launches.values[-1], np.full(64, 4))
    launches.run("true, WAIT, false", dependent=False)


@pytest.mark.usefixtures("nvrtc")
def test_kernels_before_the_last_may_still_write() -> None:
    """Unless the last one lets its successor start behind its own wait."""
    launches = Launches()
    launches.run("true, NOTHING, false")
    launches.run("true, NOTHING, false")
    with pytest.raises(AssertionError, match="what the kernels before may still write"):
        launches.run("false, WAIT, false", before=2)
    launches.values.pop()
    launches.run("false, NOTHING, false")
    launches.run("true, WAIT, false", before=2)
    launches.order.complete()
    launches.run("true, WAIT, false")


def test_whether_a_kernel_starts_its_successor_early_is_read_from_its_source() -> None:
    assert starts_next_early("gemv/gemv.cu", "gemv", {})
    assert starts_next_early("attention/decode.cu", "attention_decode", {"starts_next": 1})
    assert not starts_next_early("attention/decode.cu", "attention_decode", {"starts_next": 0})
    assert not starts_next_early("rowwise/rows.cu", "embed", {})
