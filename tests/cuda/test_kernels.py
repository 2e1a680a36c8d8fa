"""Launching: what the driver is given, seen through a driver that only records; and real launches on a GPU."""

from __future__ import annotations

import ctypes
import struct
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bminf_lite.cuda.runtime import compiler, driver
from bminf_lite.cuda.runtime import kernel as kernel_module
from bminf_lite.cuda.runtime.bindings import LibraryError
from bminf_lite.cuda.runtime.driver import FunctionAttribute, LaunchAttribute, LaunchAttributeID, LaunchConfig
from bminf_lite.cuda.runtime.kernel import Kernel, Module
from bminf_lite.errors import DeviceError

SOURCE = """
__global__ void add(float* out, const float* a, float b, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b;
}

__global__ void mixed(long long* out, bool a, int b, long long c, unsigned d, double e, float f) {
    out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = (long long)e; out[5] = (long long)f;
}

__global__ void follow(float* x, int n) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = x[i] * 0.5f + 1.0f;
}

__global__ void reverse(float* x, int n) {
    extern __shared__ float row[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = row[n - 1 - i];
}

__global__ void cluster_sizes(int* out) {
    unsigned n = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(n));
#endif
    if (threadIdx.x == 0) out[blockIdx.x] = n;
}
"""
NAMES = ("add", "mixed", "follow", "reverse", "cluster_sizes")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("src")
    (folder / "launch.cu").write_text(SOURCE)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BMINF_LITE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


class RecordingDriver(SimpleNamespace):
    """The driver's functions that kernels use; a launch reads what a real driver would, at the moment of the call."""

    def __init__(self) -> None:
        super().__init__(launches=[], shared_allowed=[])
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
        )(self._launch)

    def cuModuleLoadData(self, handle, image) -> None:
        handle.value = 7

    def cuModuleGetFunction(self, function, module, symbol: bytes) -> None:
        function.value = 1234

    def cuFuncGetAttribute(self, value, attribute, function):
        value.value = 0

    def cuFuncSetAttribute(self, function, attribute, value: int) -> None:
        if attribute == FunctionAttribute.PREFERRED_SHARED_MEMORY_CARVEOUT:
            return
        assert attribute == FunctionAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        if value > 227 * 1024:
            raise LibraryError("cuFuncSetAttribute", 1, "CUDA_ERROR_INVALID_VALUE, invalid argument")
        self.shared_allowed.append(value)

    def _launch(self, config: int, function: int, parameters: int | None, extra: int) -> int:
        c = LaunchConfig.from_address(config)
        attributes = [(a.id, tuple(a.value[:3])) for a in (c.attributes[i] for i in range(c.attribute_count))]
        words = (ctypes.c_void_p * 5).from_address(extra)
        assert (words[0], words[2], words[4], parameters, function) == (1, 2, None, None, 1234)
        size = ctypes.c_size_t.from_address(words[3]).value
        self.launches.append(
            SimpleNamespace(
                grid=tuple(c.grid),
                block=tuple(c.block),
                shared=c.shared,
                stream=c.stream,
                attributes=attributes,
                parameters=ctypes.string_at(words[1], size),
            )
        )
        return 0


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    recorder = RecordingDriver()
    monkeypatch.setattr(driver, "load", lambda: recorder)
    monkeypatch.setattr(compiler, "compile", lambda *_, **__: compiler.Cubin(b"", {"k": "k"}, {}))
    return recorder


def fake_kernel(parameters: str = "", capability: tuple[int, int] = (9, 0)) -> Kernel:
    """A kernel ``k`` with these parameters, on a device whose driver records."""
    device = SimpleNamespace(compute_capability=capability, arch="sm_90a", make_current=lambda: None, observer=None)
    sources = compiler.Sources(generated={"any.cu": f"__global__ void k({parameters}) {{}}"})
    return Module(device, sources, "any.cu", ["k"]).kernel("k")  # type: ignore[arg-type]


def test_the_driver_gets_what_was_asked_for(recording: RecordingDriver) -> None:
    kernel = fake_kernel("int* a, int b, float c")
    kernel((5, 6), 128, (0x7F0000000200, -3, 1.5), shared=1024, stream=99)
    kernel(1, (2, 3, 4), (0, np.int32(7), np.float32(0.25)))
    first, second = recording.launches
    assert (first.grid, first.block, first.shared, first.stream) == ((5, 6, 1), (128, 1, 1), 1024, 99)
    assert first.parameters == struct.pack("@Pif", 0x7F0000000200, -3, 1.5)
    assert (second.grid, second.block, second.shared, second.stream) == ((1, 1, 1), (2, 3, 4), 0, None)
    assert second.parameters == struct.pack("@Pif", 0, 7, 0.25)
    assert first.attributes == second.attributes == []


def test_matrices_lie_where_the_tensor_cores_copies_find_them(recording: RecordingDriver) -> None:
    matrix, other = bytes(range(128)), bytes(range(128, 256))
    fake_kernel("int* a, int* b, int* c, int* d, int* e, int* f, const TensorMap g, const TensorMap h, int i")(
        1, 32, (1, 2, 3, 4, 5, 6, matrix, other, 7)
    )
    fake_kernel("int* a, float b, const TensorMap c, int d, const TensorMap e")(1, 32, (1, 0.5, matrix, 7, other))
    close, apart = (launch.parameters for launch in recording.launches)
    assert close == struct.pack("@6P128s128si", 1, 2, 3, 4, 5, 6, matrix, other, 7)
    assert apart == struct.pack("@Pf36x128si60x128s", 1, 0.5, matrix, 7, other)


def test_parameters_are_aligned_as_in_c(recording: RecordingDriver) -> None:
    class Parameters(ctypes.Structure):
        _fields_ = (("a", ctypes.c_bool), ("b", ctypes.c_double), ("c", ctypes.c_int), ("d", ctypes.c_void_p))

    fake_kernel("bool a, double b, int c, int* d")(1, 1, (True, 2.5, -1, 1 << 40))
    assert recording.launches[0].parameters == bytes(Parameters(True, 2.5, -1, 1 << 40))


def test_a_kernel_without_parameters(recording: RecordingDriver) -> None:
    fake_kernel()(1, 1, ())
    assert recording.launches[0].parameters == b""


def test_dependent_launches_and_clusters(recording: RecordingDriver) -> None:
    kernel = fake_kernel()
    dependent = (LaunchAttributeID.PROGRAMMATIC_STREAM_SERIALIZATION, (1, 0, 0))
    cluster = (LaunchAttributeID.CLUSTER_DIMENSION, (2, 1, 1))
    for options, expected in (
        ({"dependent": True}, [dependent]),
        ({"cluster": 2}, [cluster]),
        ({"cluster": (2, 1), "dependent": True}, [cluster, dependent]),
        ({}, []),
    ):
        kernel(4, 32, (), **options)  # type: ignore[arg-type]
        assert recording.launches[-1].attributes == expected


def test_a_configured_launch_is_that_call_also_when_the_kernel_has_dropped_it(recording: RecordingDriver) -> None:
    kernel = fake_kernel("int* a, int b")
    launch = kernel.configured((5, 6), 64, 512, 99, True, 2)
    for grid in range(1, kernel_module.CONFIGURATIONS + 2):
        kernel(grid, 32, (0, 0))
    launch((0x7F0000000200, -3))
    kernel((5, 6), 64, (0x7F0000000200, -3), 512, 99, True, 2)
    assert recording.launches[-1] == recording.launches[-2] != recording.launches[-3]
    with pytest.raises(TypeError, match="k: the arguments"):
        launch(())


def test_dependent_launch_is_ignored_where_the_gpu_lacks_it(recording: RecordingDriver) -> None:
    fake_kernel(capability=(8, 9))(1, 1, (), dependent=True)
    assert recording.launches[0].attributes == []


def test_an_observer_is_told_of_each_launch(recording: RecordingDriver) -> None:
    kernel, seen = fake_kernel(), []

    @contextmanager
    def observer(name: str, bytes_moved: int, stream: int):
        seen.append((name, bytes_moved, stream, len(recording.launches)))
        yield
        seen.append(len(recording.launches))

    kernel(1, 1, ())
    kernel._device.observer = observer
    kernel(1, 1, (), stream=7, bytes_moved=4096)
    kernel._device.observer = None
    kernel(1, 1, ())
    assert seen == [("k", 4096, 7, 1), 2] and len(recording.launches) == 3


def test_much_shared_memory_is_asked_for_once(recording: RecordingDriver) -> None:
    kernel = fake_kernel()
    for shared in (48 << 10, 100 << 10, 64 << 10, 100 << 10, 200 << 10):
        kernel(1, 1, (), shared=shared)
    assert recording.shared_allowed == [100 << 10, 200 << 10]
    with pytest.raises(DeviceError, match="k: 262144 bytes of dynamic shared memory"):
        kernel(1, 1, (), shared=256 << 10)
    assert len(recording.launches) == 5


@pytest.mark.parametrize("args", [(), (1,), (1, 2, 3), ("one", 2), (1, 2.5), (-1 << 70, 2), (1, 1 << 31)])
def test_arguments_that_do_not_fit(args: tuple, recording: RecordingDriver) -> None:
    with pytest.raises(TypeError, match="k: the arguments"):
        fake_kernel("int* a, int b")(1, 1, args)
    assert recording.launches == []


def test_a_refused_launch_says_which_and_how(recording: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    recording.cuLaunchKernelEx = lambda *_: 1
    monkeypatch.setattr(driver, "describe", lambda status: f"CUDA_ERROR_INVALID_VALUE, invalid argument {status}")
    with pytest.raises(DeviceError, match=r"k with grid 0, block \(2048,\), 16 bytes.*CUDA_ERROR_INVALID_VALUE"):
        fake_kernel()(0, (2048,), (), shared=16)


def test_the_structures_have_the_drivers_sizes() -> None:
    assert ctypes.sizeof(LaunchConfig) == 56
    assert ctypes.sizeof(LaunchAttribute) == 72
    assert ctypes.sizeof(driver.AllocationProperties) == 32
    assert ctypes.sizeof(driver.AccessDescription) == 12


@pytest.fixture
def module(cuda_device: driver.Device, sources: Path) -> Module:
    return Module(cuda_device, compiler.Sources(sources), "launch.cu", NAMES)


@pytest.mark.gpu
def test_a_kernel_runs(module: Module) -> None:
    import cupy

    add = module.kernel("add")
    for n in (1, 31, 32, 33, 1021, 128256):
        a = cupy.random.random(n, dtype=np.float32)
        out = cupy.zeros(n + 1, np.float32)
        add(-(-n // 128), 128, (out.data.ptr, a.data.ptr, 2.5, n), stream=cupy.cuda.get_current_stream().ptr)
        assert (out[:n] == a + np.float32(2.5)).all() and out[n] == 0


@pytest.mark.gpu
def test_every_kind_of_parameter_arrives(module: Module) -> None:
    import cupy

    out = cupy.zeros(6, np.int64)
    module.kernel("mixed")(1, 1, (out.data.ptr, True, -5, -(1 << 40), 4_000_000_000, 1e12, -8.0))
    assert out.tolist() == [1, -5, -(1 << 40), 4_000_000_000, 10**12, -8]


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True])
def test_launches_keep_their_order(dependent: bool, module: Module) -> None:
    import cupy

    follow = module.kernel("follow")
    x = cupy.zeros(100_000, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    for _ in range(20):
        follow(1, 256, (x.data.ptr, x.size), stream=stream.ptr, dependent=dependent)
    stream.synchronize()
    assert (x == np.float32(2 - 2.0**-19)).all()


@pytest.mark.gpu
def test_large_shared_memory(cuda_device: driver.Device, module: Module) -> None:
    import cupy

    limit = cuda_device.attribute(driver.DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    n = limit // 4
    x = cupy.arange(n, dtype=np.float32)
    reverse = module.kernel("reverse")
    reverse(1, 512, (x.data.ptr, n), shared=limit)
    assert (x == cupy.arange(n, dtype=np.float32)[::-1]).all()
    with pytest.raises(DeviceError, match="reverse"):
        reverse(1, 512, (x.data.ptr, n), shared=limit + 4)
    reverse(1, 512, (x.data.ptr, 16), shared=64)


@pytest.mark.gpu
def test_clusters(cuda_device: driver.Device, module: Module) -> None:
    import cupy

    if cuda_device.compute_capability < (9, 0):
        pytest.skip("clusters came with compute capability 9.0")
    out = cupy.zeros(8, np.int32)
    module.kernel("cluster_sizes")(8, 32, (out.data.ptr,), cluster=4)
    assert out.tolist() == [4] * 8


@pytest.mark.gpu
def test_an_impossible_launch_is_an_error_and_the_gpu_stays_usable(module: Module) -> None:
    import cupy

    out = cupy.ones(4, np.float32)
    add = module.kernel("add")
    with pytest.raises(DeviceError, match=r"add with grid 1, block 2048"):
        add(1, 2048, (out.data.ptr, out.data.ptr, 1.0, 4))
    add(1, 32, (out.data.ptr, out.data.ptr, 1.0, 4))
    assert out.tolist() == [2, 2, 2, 2]
