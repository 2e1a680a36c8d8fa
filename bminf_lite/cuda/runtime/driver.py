"""The CUDA driver's functions that this package calls, and :class:`Device`, one GPU.

Everything works in a GPU's primary context, which CuPy and the CUDA runtime use too, so memory, streams and modules are
shared with them. The context is kept until the process ends.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from enum import IntEnum
from types import SimpleNamespace

from ...errors import DeviceError
from . import libraries
from .bindings import LibraryError, bind

NATIVE_ATOMIC_SUPPORTED = 3
"""``CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED``."""
_KIB = 1 << 10
_SHARED_MEMORY_PER_BLOCK = {
    (7, 5): 64 * _KIB,
    (8, 0): 163 * _KIB,
    (8, 7): 163 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (10, 3): 227 * _KIB,
    (11, 0): 227 * _KIB,
}
_LEAST_SHARED_MEMORY_PER_BLOCK = 99 * _KIB


def shared_memory_per_block(compute_capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a block may have, opted in (CUDA C++ Programming Guide, compute capabilities).

    Capabilities that are not listed have the least, as 8.6, 8.9 and 12.0 do.
    """
    return _SHARED_MEMORY_PER_BLOCK.get(compute_capability, _LEAST_SHARED_MEMORY_PER_BLOCK)


class Context(c_void_p):
    """``CUcontext``."""


class Module(c_void_p):
    """``CUmodule``."""


class Function(c_void_p):
    """``CUfunction``."""


class Stream(c_void_p):
    """``CUstream``; CuPy's ``stream.ptr`` fits."""


class Graph(c_void_p):
    """``CUgraph``."""


class GraphExec(c_void_p):
    """``CUgraphExec``."""


class Status(IntEnum):
    """``CUresult``: the values that this package distinguishes."""

    OUT_OF_MEMORY = 2


class DeviceAttribute(IntEnum):
    """``CUdevice_attribute``."""

    MULTIPROCESSOR_COUNT = 16
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
    VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102


class FunctionAttribute(IntEnum):
    """``CUfunction_attribute``."""

    SHARED_SIZE_BYTES = 1
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    PREFERRED_SHARED_MEMORY_CARVEOUT = 9


class CaptureMode(IntEnum):
    """``CUstreamCaptureMode``."""

    THREAD_LOCAL = 1


class LaunchAttributeID(IntEnum):
    """``CUlaunchAttributeID``."""

    CLUSTER_DIMENSION = 4
    PROGRAMMATIC_STREAM_SERIALIZATION = 6


class LaunchAttribute(Structure):
    """``CUlaunchAttribute``: ``value`` is a union of 64 bytes; the attributes used here are integers at its start."""

    _fields_ = (("id", c_int), ("padding", c_int), ("value", c_int * 16))


class LaunchConfig(Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("attribute_count", c_uint),
    )


class Location(Structure):
    """``CUmemLocation``: type 1 is a GPU."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProperties(Structure):
    """``CUmemAllocationProp``: type 1 is pinned to one GPU."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32_metadata", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AccessDescription(Structure):
    """``CUmemAccessDesc``: flags 3 is reading and writing."""

    _fields_ = (("location", Location), ("flags", c_int))


_DevicePointer = c_uint64
_Allocation = c_uint64
_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetP2PAttribute": (POINTER(c_int), c_int, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(Context), c_int),
    "cuCtxSetCurrent": (Context,),
    "cuCtxGetCurrent": (POINTER(Context),),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (POINTER(Module), c_char_p),
    "cuModuleUnload": (Module,),
    "cuModuleGetFunction": (POINTER(Function), Module, c_char_p),
    "cuFuncGetAttribute": (POINTER(c_int), c_int, Function),
    "cuFuncSetAttribute": (Function, c_int, c_int),
    "cuLaunchKernelEx": (c_void_p, Function, c_void_p, c_void_p),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(_DevicePointer), c_size_t),
    "cuMemFree_v2": (_DevicePointer,),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemAddressReserve": (POINTER(_DevicePointer), c_size_t, c_size_t, _DevicePointer, c_uint64),
    "cuMemAddressFree": (_DevicePointer, c_size_t),
    "cuMemCreate": (POINTER(_Allocation), c_size_t, POINTER(AllocationProperties), c_uint64),
    "cuMemRelease": (_Allocation,),
    "cuMemMap": (_DevicePointer, c_size_t, c_size_t, _Allocation, c_uint64),
    "cuMemUnmap": (_DevicePointer, c_size_t),
    "cuMemSetAccess": (_DevicePointer, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuStreamBeginCapture_v2": (Stream, c_int),
    "cuStreamEndCapture": (Stream, POINTER(Graph)),
    "cuGraphInstantiateWithFlags": (POINTER(GraphExec), Graph, c_uint64),
    "cuGraphLaunch": (GraphExec, Stream),
    "cuGraphDestroy": (Graph,),
    "cuGraphExecDestroy": (GraphExec,),
}


def describe(status: int) -> str:
    """The driver's name and description of a ``CUresult``."""
    library = libraries.load("cuda").dll
    for function in (library.cuGetErrorName, library.cuGetErrorString):
        function.argtypes = (c_int, POINTER(c_char_p))
    name, text = c_char_p(), c_char_p()
    library.cuGetErrorName(status, name)
    library.cuGetErrorString(status, text)
    return f"{(name.value or b'unknown error').decode()}, {(text.value or b'').decode()}"


@functools.cache
def load() -> SimpleNamespace:
    """The driver's functions, initialized. Raises ``DeviceError`` without a driver or a usable GPU."""
    functions = bind(libraries.load("cuda").dll, _PROTOTYPES, describe, {"cuLaunchKernelEx"})
    try:
        functions.cuInit(0)
    except LibraryError as error:
        raise DeviceError(f"the NVIDIA driver is installed, but no GPU can be used: {error}") from error
    return functions


def has_native_atomics(index: int, peer: int) -> bool:
    """Whether two GPUs are linked so that atomics of one reach the other's memory: by NVLink, not by PCIe."""
    handles, found = (c_int(), c_int()), c_int()
    for handle, number in zip(handles, (index, peer), strict=True):
        load().cuDeviceGet(handle, number)
    load().cuDeviceGetP2PAttribute(found, NATIVE_ATOMIC_SUPPORTED, handles[0].value, handles[1].value)
    return bool(found.value)


def device_count() -> int:
    """The number of GPUs that the driver offers."""
    count = c_int()
    load().cuDeviceGetCount(count)
    return count.value


Observer = Callable[[str, int, int], AbstractContextManager[None]]
"""Called for each launch with its name, the bytes that it moves (0 if unknown) and its stream. The context manager that
it returns is entered before the launch and left after it, so that a profiler can record events around the launch."""


class Device:
    """One GPU, with its primary context retained and current in the thread that made this object.

    ``observer``, if set, is called for every launch through this object.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.observer: Observer | None = None
        self._driver = load()
        if not 0 <= index < device_count():
            raise DeviceError(f"there is no GPU {index}: the driver offers {device_count()}, numbered from 0")
        handle, context = c_int(), Context()
        self._driver.cuDeviceGet(handle, index)
        self._driver.cuDevicePrimaryCtxRetain(context, handle)
        self._handle, self._context = handle.value, context
        self.make_current()

    def make_current(self) -> None:
        """Make this GPU's context the calling thread's, which each thread needs once before it uses the GPU."""
        self._driver.cuCtxSetCurrent(self._context)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within it, this GPU's context is the calling thread's; then the one that was before, if there was one."""
        before = Context()
        self._driver.cuCtxGetCurrent(before)
        self.make_current()
        try:
            yield
        finally:
            if before.value is not None and before.value != self._context.value:
                self._driver.cuCtxSetCurrent(before)

    def attribute(self, attribute: DeviceAttribute) -> int:
        value = c_int()
        self._driver.cuDeviceGetAttribute(value, attribute, self._handle)
        return value.value

    @functools.cached_property
    def name(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        self._driver.cuDeviceGetName(buffer, len(buffer), self._handle)
        return buffer.value.decode()

    @functools.cached_property
    def compute_capability(self) -> tuple[int, int]:
        return (
            self.attribute(DeviceAttribute.COMPUTE_CAPABILITY_MAJOR),
            self.attribute(DeviceAttribute.COMPUTE_CAPABILITY_MINOR),
        )

    @property
    def arch(self) -> str:
        """The compilation target: ``"sm_80"``; from 9.0 on with architecture-specific features, ``"sm_90a"``."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    def memory(self) -> tuple[int, int]:
        """The GPU's free and total memory in bytes; memory of other processes is not free."""
        free, total = c_size_t(), c_size_t()
        with self.current():
            self._driver.cuMemGetInfo_v2(free, total)
        return free.value, total.value

    def synchronize(self) -> None:
        """Wait for all work in this context."""
        with self.current():
            self._driver.cuCtxSynchronize()
