"""NVRTC needs no GPU, so all of this runs wherever NVRTC and the CUDA headers are installed."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from bminf_lite.cuda.runtime import compiler
from bminf_lite.cuda.runtime.compiler import Sources, Usage
from bminf_lite.errors import DeviceError

pytestmark = pytest.mark.usefixtures("nvrtc")

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")

SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "outer.cuh"
#ifndef FACTOR
#define FACTOR 2
#endif
template <int N, bool square>
__global__ void scale(__half* out, const __half* in) {
    __shared__ float row[N];
    row[threadIdx.x] = __half2float(in[threadIdx.x]) * FACTOR + offset();
    __syncthreads();
    const float x = row[N - 1 - threadIdx.x];
    out[threadIdx.x] = __float2half(square ? x * x : x);
}
"""
SPILLS = """
__global__ void __launch_bounds__(1024, 2) crowded(float* x) {
    float a[128];
#pragma unroll
    for (int i = 0; i < 128; i++) a[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 128; i++) x[i * 1024 + threadIdx.x] = a[127 - i] * a[i];
}
"""
NAMES = ("scale<32, true>", "scale<64, false>")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "scale.cu").write_text(SOURCE)
    (folder / "outer.cuh").write_text('#pragma once\n  #  include "inner.cuh"\n')
    (folder / "inner.cuh").write_text('#pragma once\n#include "outer.cuh"\nfloat offset() { return 1.0f; }\n')
    (folder / "crowded.cu").write_text(SPILLS)
    return folder


@pytest.fixture
def sources(folder: Path) -> Sources:
    return Sources(folder)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_instantiation_for_every_architecture(arch: str, sources: Sources, cache: Path) -> None:
    if int(re.sub(r"\D", "", arch)) not in compiler.architectures():
        pytest.skip(f"this NVRTC is too old for {arch}")
    cubin = compiler.compile("scale.cu", arch, NAMES, sources=sources, cache=cache)
    assert cubin.image.startswith(b"\x7fELF")
    assert set(cubin.symbols) == set(cubin.usage) == set(NAMES)
    for name, shared in zip(NAMES, (128, 256), strict=True):
        assert cubin.symbols[name].encode() in cubin.image
        usage = cubin.usage[name]
        # From 9.0 on, the hardware keeps 1024 bytes of each block's shared memory, which ptxas may count.
        assert usage.shared in (shared, shared + 1024) and 0 < usage.registers <= 64
        assert usage.spill_stores == usage.spill_loads == usage.stack == 0


def test_spills_are_seen(sources: Sources, cache: Path) -> None:
    usage = compiler.compile("crowded.cu", "sm_80", ["crowded"], sources=sources, cache=cache).usage["crowded"]
    assert usage.registers <= 32
    assert min(usage.spill_stores, usage.spill_loads, usage.stack) > 0


def test_the_log_of_ptxas_is_understood() -> None:
    log = """ptxas info    : 0 bytes gmem, 16 bytes cmem[4]
ptxas info    : Compiling entry function '_Z1av' for 'sm_80'
ptxas info    : Function properties for helper
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for _Z1av
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 40 registers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1bv' for 'sm_80'
ptxas info    : Function properties for _Z1bv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, 352 bytes cmem[0]
"""
    assert compiler.parse_usage(log) == {"_Z1av": Usage(40, 1024, 16, 24, 32), "_Z1bv": Usage(8, 0, 0, 0, 0)}
    assert compiler.parse_usage("") == {}


def test_what_does_not_compile_shows_the_compilers_words(sources: Sources, cache: Path) -> None:
    (sources.folder / "broken.cu").write_text("__global__ void k(float* x) { *x = undeclared; }")
    with pytest.raises(DeviceError, match=r"broken\.cu.*sm_80[\s\S]*\"undeclared\" is undefined"):
        compiler.compile("broken.cu", "sm_80", ["k"], sources=sources, cache=cache)
    with pytest.raises(DeviceError, match="no_such_kernel"):
        compiler.compile("scale.cu", "sm_80", ["no_such_kernel<1>"], sources=sources, cache=cache)
    assert not cache.exists()


@pytest.mark.parametrize("arch", ["sm_30", "sm_999", "compute_80", "90", ""])
def test_an_architecture_that_nvrtc_does_not_know(arch: str, sources: Sources, cache: Path) -> None:
    with pytest.raises(DeviceError, match=r"cannot compile for .*sm_90"):
        compiler.compile("scale.cu", arch, NAMES, sources=sources, cache=cache)


class Count:
    """How often NVRTC was really asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compilations = 0
        real = compiler._compile

        def count(*args):
            self.compilations += 1
            return real(*args)

        monkeypatch.setattr(compiler, "_compile", count)


def test_the_second_time_comes_from_the_disk(sources: Sources, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = Count(monkeypatch)
    first = compiler.compile("scale.cu", "sm_80", NAMES, sources=sources, cache=cache)
    assert compiler.compile("scale.cu", "sm_80", NAMES, sources=sources, cache=cache) == first
    assert count.compilations == 1


def test_whatever_the_result_depends_on_is_in_the_key(
    sources: Sources, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Count(monkeypatch)
    images = []

    def build(arch: str = "sm_80", names: tuple[str, ...] = NAMES, defines: tuple[str, ...] = ()) -> None:
        images.append(compiler.compile("scale.cu", arch, names, defines, sources=sources, cache=cache).image)
        assert count.compilations == len(images)

    build()
    build(arch="sm_86")
    build(names=NAMES[:1])
    build(defines=("FACTOR=3",))
    (sources.folder / "inner.cuh").write_text("#pragma once\nfloat offset() { return 2.0f; }\n")
    build()
    (sources.folder / "scale.cu").write_text(SOURCE.replace("x * x", "x * x * x"))
    build()
    assert len(set(images)) == len(images)
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--fmad=false"))
    build()


def test_threads_and_processes_at_once(sources: Sources, cache: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from bminf_lite.cuda.runtime import compiler\n"
        "sources, cache = compiler.Sources(Path(sys.argv[1])), Path(sys.argv[2])\n"
        f"c = compiler.compile('scale.cu', 'sm_80', {NAMES!r}, sources=sources, cache=cache)\n"
        "assert c.image.startswith(b'\\x7fELF')"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(sources.folder), str(cache)]
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    results = []

    def work() -> None:
        results.append(compiler.compile("scale.cu", "sm_80", NAMES, sources=sources, cache=cache).symbols)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait() for process in processes] == [0, 0]
    assert len(results) == 4 and all(symbols == results[0] for symbols in results)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("source", ["scale.cu", "wrong.cu"])
def test_threads_that_want_the_same_share_one_compilation(
    source: str, sources: Sources, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ranks of a model do; also an error, after which the next one compiles again."""
    (sources.folder / "wrong.cu").write_text("__global__ void scale( {")
    count, others = Count(monkeypatch), threading.Event()
    compile_really = compiler._compile

    def slowly(*args):
        assert others.wait(60)
        return compile_really(*args)

    monkeypatch.setattr(compiler, "_compile", slowly)
    found = []

    def work() -> None:
        try:
            found.append(compiler.compile(source, "sm_80", NAMES, sources=sources, cache=cache))
        except DeviceError as error:
            found.append(error)

    real_result = Future.result

    def result(self):
        others.set()  # the second thread waits for the first one's
        return real_result(self)

    monkeypatch.setattr(Future, "result", result)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.compilations == 1 and len(found) == 2 and found[0] is found[1]
    assert not compiler._being_made
    work()
    assert count.compilations == (2 if source == "wrong.cu" else 1)
