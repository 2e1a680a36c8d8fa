"""The CUDA driver's functions on the fake GPU."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from bminf_lite.cuda.runtime import driver, tensor_maps
from bminf_lite.cuda.runtime.driver import (
    NATIVE_ATOMIC_SUPPORTED,
    DeviceAttribute,
    FunctionAttribute,
    LaunchAttributeID,
    LaunchConfig,
)

from . import launching
from .fake_library import FAILED, FakeLibrary, set_number
from .machine import MAX_CLUSTER, MAX_GRID_YZ, MAX_THREADS, TENSOR_MAP, FakeKernel, Launch, Machine
from .memory import FakeGpuError

GRANULARITY = 2 << 20
FIRST_CONTEXT = 0xC0
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
_SHARED_WITHOUT_ASKING = 48 << 10


class FakeDriver:
    """Methods named and typed as in ``bminf_lite.cuda.runtime.driver``."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._allocations: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, int] = {}

    def library(self) -> FakeLibrary:
        """The functions as ``libcuda`` has them."""
        library = FakeLibrary(driver._PROTOTYPES | tensor_maps._PROTOTYPES, self)

        class _Text:
            argtypes: Any = ()

            def __call__(self, status: int, text: Any) -> int:
                library.raise_failure()
                text.value = f"status {status}".encode()
                return 0

        library.cuGetErrorName, library.cuGetErrorString = _Text(), _Text()  # type: ignore[attr-defined]
        return library

    # -- the device ----------------------------------------------------------------------------------------------------

    def cuInit(self, flags: int) -> None: ...

    def cuDeviceGetCount(self, count: Any) -> None:
        set_number(count, self.machine.devices)

    def cuDeviceGet(self, handle: Any, index: int) -> None:
        set_number(handle, index)

    def cuDeviceGetName(self, buffer: int, nbytes: int, handle: int) -> None:
        name = self.machine.profile.name.encode()
        ctypes.memmove(buffer, name + b"\0", len(name) + 1)

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: int) -> None:
        profile = self.machine.profile
        values = {
            DeviceAttribute.MULTIPROCESSOR_COUNT: profile.multiprocessors,
            DeviceAttribute.COMPUTE_CAPABILITY_MAJOR: profile.capability[0],
            DeviceAttribute.COMPUTE_CAPABILITY_MINOR: profile.capability[1],
            DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: profile.shared,
            DeviceAttribute.VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: 1,
        }
        set_number(value, values[DeviceAttribute(attribute)])

    def cuDeviceTotalMem_v2(self, total: Any, handle: int) -> None:
        set_number(total, self.machine.memory.nbytes)

    def cuDeviceCanAccessPeer(self, found: Any, handle: int, peer: int) -> None:
        set_number(found, int(handle != peer))

    def cuDeviceGetP2PAttribute(self, found: Any, attribute: int, handle: int, peer: int) -> None:
        assert attribute == NATIVE_ATOMIC_SUPPORTED and handle != peer
        set_number(found, int(self.machine.has_peer_access))

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: int) -> None:
        set_number(context, FIRST_CONTEXT + handle)

    def cuCtxSetCurrent(self, context: int) -> int:
        if not FIRST_CONTEXT <= context < FIRST_CONTEXT + self.machine.devices:
            return INVALID_VALUE
        self.machine.device = context - FIRST_CONTEXT
        return 0

    def cuCtxGetCurrent(self, context: Any) -> None:
        set_number(context, FIRST_CONTEXT + self.machine.device)

    def cuCtxSynchronize(self) -> None:
        self.machine.refuse_in_recording("cuCtxSynchronize")

    # -- modules and launches ------------------------------------------------------------------------------------------

    def cuModuleLoadData(self, module: Any, image: int) -> None:
        self.machine.refuse_in_recording("cuModuleLoadData")
        source, *defines = ctypes.string_at(image).decode().split("|")
        handle = next(self.machine.numbers)
        self.machine.modules[handle] = source, tuple(defines)
        set_number(module, handle)

    def cuModuleUnload(self, module: int) -> None:
        del self.machine.modules[module]

    def cuModuleGetFunction(self, function: Any, module: int, name: int) -> None:
        source, defines = self.machine.modules[module]
        handle = next(self.machine.numbers)
        self.machine.kernels[handle] = FakeKernel(source, ctypes.string_at(name).decode(), defines)
        set_number(function, handle)

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: int) -> None:
        assert function in self.machine.kernels
        assert attribute == FunctionAttribute.SHARED_SIZE_BYTES
        set_number(value, 0)

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> int:
        kernel = self.machine.kernels[function]
        if attribute == FunctionAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES:
            if value > self.machine.profile.shared:
                return INVALID_VALUE
            kernel.dynamic_shared_allowed = value
        return 0

    def cuLaunchKernelEx(self, config: int, function: int, parameters: int | None, extra: int) -> None:
        told = LaunchConfig.from_address(config)
        words = (ctypes.c_void_p * 5).from_address(extra)
        assert (words[0], words[2], words[4]) == (1, 2, None) and parameters is None
        size = ctypes.c_size_t.from_address(words[3]).value
        attributes = {told.attributes[i].id: told.attributes[i].value[0] for i in range(told.attribute_count)}
        launch = Launch(
            self.machine.kernels[function],
            tuple(told.grid),
            told.block[0],
            told.shared,
            attributes.get(LaunchAttributeID.CLUSTER_DIMENSION, 1),
            ctypes.string_at(words[1], size),
            attributes.get(LaunchAttributeID.PROGRAMMATIC_STREAM_SERIALIZATION, 0) == 1,
        )
        self._check_limits(launch, tuple(told.block))
        launching.check(self.machine, launch)
        self.machine.put(told.stream or 0, lambda: launching.run(self.machine, launch), is_launch=True)

    def _check_limits(self, launch: Launch, block: tuple[int, ...]) -> None:
        profile, (x, y, z) = self.machine.profile, launch.grid
        allowed = min(profile.shared, max(launch.kernel.dynamic_shared_allowed, _SHARED_WITHOUT_ASKING))
        problems = [
            f"grid {launch.grid}" * (not (0 < x < 2**31 and 0 < y <= MAX_GRID_YZ and 0 < z <= MAX_GRID_YZ)),
            f"block {block}" * (not 0 < block[0] * block[1] * block[2] <= MAX_THREADS),
            f"{launch.shared} bytes of shared memory, {allowed} allowed" * (launch.shared > allowed),
            f"clusters of {launch.cluster}" * (launch.cluster > (MAX_CLUSTER if profile.capability >= (9, 0) else 1)),
            f"{x} blocks in clusters of {launch.cluster}" * (x % launch.cluster != 0),
        ]
        if any(problems):
            raise FakeGpuError(f"{launch.kernel.expression}: {'; '.join(filter(None, problems))}")

    # -- memory --------------------------------------------------------------------------------------------------------

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        memory = self.machine.memory
        set_number(free, memory.nbytes - memory.taken)
        set_number(total, memory.nbytes)

    def cuMemAlloc_v2(self, address: Any, nbytes: int) -> int:
        self.machine.refuse_in_recording("cuMemAlloc")
        if not self._take(nbytes):
            return OUT_OF_MEMORY
        start = self.machine.memory.reserve(nbytes)
        self._allocations[start] = nbytes
        self.machine.memory.poison(start, nbytes)
        set_number(address, start)
        return 0

    def cuMemFree_v2(self, address: int) -> None:
        self.machine.memory.taken -= self._allocations.pop(address)
        self.machine.memory.release(address)

    def cuMemGetAllocationGranularity(self, granularity: Any, properties: Any, option: int) -> None:
        set_number(granularity, GRANULARITY)

    def cuMemAddressReserve(self, address: Any, nbytes: int, alignment: int, hint: int, flags: int) -> int:
        if nbytes % GRANULARITY:
            return INVALID_VALUE
        start = self.machine.memory.reserve(nbytes)
        self._reserved[start] = nbytes
        set_number(address, start)
        return 0

    def cuMemAddressFree(self, address: int, nbytes: int) -> None:
        assert self._reserved.pop(address) == nbytes
        assert not any(address <= start < address + nbytes for start in self._mapped), "memory is mapped there"
        self.machine.memory.release(address)

    def cuMemCreate(self, handle: Any, nbytes: int, properties: Any, flags: int) -> int:
        self.machine.refuse_in_recording("cuMemCreate")
        assert nbytes % GRANULARITY == 0 and properties.contents.location.type == 1
        if not self._take(nbytes):
            return OUT_OF_MEMORY
        number = next(self.machine.numbers)
        self._allocations[number] = nbytes
        set_number(handle, number)
        return 0

    def cuMemRelease(self, handle: int) -> None:
        self.machine.memory.taken -= self._allocations.pop(handle)

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> None:
        assert any(start <= address and address + nbytes <= start + size for start, size in self._reserved.items())
        assert address not in self._mapped and self._allocations[handle] == nbytes
        self._mapped[address] = nbytes

    def cuMemUnmap(self, address: int, nbytes: int) -> None:
        assert self._mapped.pop(address) == nbytes

    def cuMemSetAccess(self, address: int, nbytes: int, description: Any, count: int) -> None:
        assert self._mapped[address] == nbytes and description.contents.flags == 3
        self.machine.memory.poison(address, nbytes)

    def _take(self, nbytes: int) -> bool:
        memory = self.machine.memory
        if memory.taken + nbytes > memory.nbytes:
            return False
        memory.taken += nbytes
        return True

    # -- the copy engine -----------------------------------------------------------------------------------------------

    def cuTensorMapEncodeTiled(
        self,
        target: int,
        element: int,
        rank: int,
        address: int,
        sizes: Any,
        strides: Any,
        box: Any,
        steps: Any,
        interleave: int,
        swizzle: int,
        promotion: int,
        fill: int,
    ) -> int:
        itemsize = tensor_maps.TensorMapDataType(element).itemsize
        pitches, boxes = list(strides[: rank - 1]), list(box[:rank])
        aligned = target % 64 == 0 and address % 16 == 0 and all(pitch % 16 == 0 for pitch in pitches)
        row = boxes[0] * itemsize
        swizzled = (swizzle, row) in ((1, 32), (2, 64), (3, 128)) or (swizzle == 0 and row % 16 == 0)
        if not aligned or not swizzled or not all(0 < size <= 256 for size in boxes) or set(steps[:rank]) != {1}:
            return INVALID_VALUE
        sizes = [*sizes[:rank], *[1] * (5 - rank)]
        described = struct.pack(
            TENSOR_MAP, address, element, rank, *sizes, *pitches, *[0] * (5 - rank), *boxes, *[1] * (5 - rank)
        )
        ctypes.memmove(target, described, len(described))
        return 0

    # -- graphs --------------------------------------------------------------------------------------------------------

    def cuStreamBeginCapture_v2(self, stream: int | None, mode: int) -> None:
        target = self.machine.stream(stream or 0)
        assert stream and target.recording is None
        target.record()

    def cuStreamEndCapture(self, stream: int | None, graph: Any) -> int:
        target = self.machine.stream(stream or 0)
        if target.recording is None:
            return FAILED
        number, recording = next(self.machine.numbers), target.recording
        for stream in self.machine.streams.values():
            if stream.recording is recording:
                if stream.is_ahead:
                    raise FakeGpuError("a recording ends, and nothing waits for one of its branches")
                stream.recording, stream.is_branch = None, False
        self.machine.graphs[number] = recording
        set_number(graph, number)
        return 0

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: int, flags: int) -> None:
        number = next(self.machine.numbers)
        self.machine.graphs[number] = self.machine.graphs[graph]
        set_number(executable, number)

    def cuGraphLaunch(self, executable: int, stream: int | None) -> None:
        self.machine.replay(self.machine.graphs[executable], stream or 0)

    def cuGraphDestroy(self, graph: int) -> None:
        del self.machine.graphs[graph]

    def cuGraphExecDestroy(self, executable: int) -> None:
        del self.machine.graphs[executable]
