"""Kernels loaded into a GPU and launched with as little Python as possible.

A prompt's step launches some ten kernels a layer from Python, so a launch is one ``struct`` packing into memory that
the kernel owns and one call of the driver; what does not change from launch to launch is kept. Launches may be captured
into a graph.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import DeviceError
from . import compiler, driver
from .bindings import LibraryError
from .declarations import kernel_name, struct_format
from .driver import Device, FunctionAttribute, LaunchAttribute, LaunchAttributeID, LaunchConfig

Dimensions = int | tuple[int, ...]

CONFIGURATIONS = 64
"""Grids and the like for which a kernel keeps what the driver is told; beyond, those not used for longest go."""
_PARAMETER_BUFFER_POINTER, _PARAMETER_BUFFER_SIZE = 1, 2
_SHARED_WITHOUT_ASKING = 48 * 1024
_ALL_SHARED, _AS_NEEDED = 100, -1  # percent of what L1 cache and shared memory divide between them


@dataclass(frozen=True)
class KernelAttributes:
    """What the driver says of a loaded kernel: registers and bytes of local memory a thread, static shared a block."""

    registers: int
    local: int
    shared: int
    max_threads: int


class Module:
    """Kernels of one file of ``sources`` for one GPU, compiled and loaded when the first of them is needed."""

    def __init__(
        self,
        device: Device,
        sources: compiler.Sources,
        source_name: str,
        name_expressions: Sequence[str],
        defines: Sequence[str] = (),
    ) -> None:
        self.device = device
        self.sources = sources
        self.source_name = source_name
        self.name_expressions = tuple(name_expressions)
        self.defines = tuple(defines)

    @functools.cached_property
    def cubin(self) -> compiler.Cubin:
        return compiler.compile(
            self.source_name, self.device.arch, self.name_expressions, self.defines, sources=self.sources
        )

    @functools.cached_property
    def _handle(self) -> driver.Module:
        self.device.make_current()
        handle = driver.Module()
        driver.load().cuModuleLoadData(handle, self.cubin.image)
        return handle

    def kernel(self, name_expression: str, cache: bool = False) -> Kernel:
        """The kernel of that name, one of the module's ``name_expressions``; its source declares its parameters.

        With ``cache`` it gets as much L1 cache as its shared memory leaves: each load that is under way takes a line of
        it, and a kernel that streams from memory has many. That goes for all kernels of the name from this module.
        """
        signature = self.sources.declarations(self.source_name)[kernel_name(name_expression)].signature
        function = driver.Function()
        driver.load().cuModuleGetFunction(function, self._handle, self.cubin.symbols[name_expression].encode())
        # A multiprocessor divides its memory one way at a time: kernels that disagree on it cannot run side by side.
        carveout = _AS_NEEDED if cache else _ALL_SHARED
        driver.load().cuFuncSetAttribute(function, FunctionAttribute.PREFERRED_SHARED_MEMORY_CARVEOUT, carveout)
        return Kernel(self, name_expression, function, signature)


class Kernel:
    """One kernel, launched by calling it, from any thread.

    ``signature`` has a letter for each parameter: ``p`` a pointer, and the :mod:`struct` letters for the rest, of which
    ``i`` int32, ``I`` uint32, ``q`` int64, ``Q`` uint64, ``f`` fp32, ``d`` fp64 and ``?`` bool are the useful ones.
    ``T`` is a matrix as :mod:`.tensor_maps` describes it. :mod:`.declarations` makes it of the kernel's declaration.
    """

    def __init__(self, module: Module, name: str, function: driver.Function, signature: str) -> None:
        self.name = name
        self._module = module  # which must outlive its kernels
        self._device = module.device
        self._function = function
        self._launch = driver.load().cuLaunchKernelEx
        self._lock = threading.Lock()
        self._shared_allowed = 0
        self._dependent_supported = module.device.compute_capability >= (9, 0)
        parameters = struct.Struct(struct_format(signature))
        self._pack_parameters = parameters.pack_into
        self._parameters = ctypes.create_string_buffer(max(1, parameters.size))
        self._size = ctypes.c_size_t(parameters.size)
        self._extra = (ctypes.c_void_p * 5)(
            _PARAMETER_BUFFER_POINTER, ctypes.addressof(self._parameters),
            _PARAMETER_BUFFER_SIZE, ctypes.addressof(self._size), None,
        )  # fmt: skip
        self._configured = functools.lru_cache(CONFIGURATIONS)(self._configure)

    @functools.cached_property
    def attributes(self) -> KernelAttributes:
        return KernelAttributes(
            registers=self._attribute(FunctionAttribute.NUM_REGS),
            local=self._attribute(FunctionAttribute.LOCAL_SIZE_BYTES),
            shared=self._attribute(FunctionAttribute.SHARED_SIZE_BYTES),
            max_threads=self._attribute(FunctionAttribute.MAX_THREADS_PER_BLOCK),
        )

    def __call__(
        self,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[object],
        shared: int = 0,
        stream: int = 0,
        dependent: bool = False,
        cluster: Dimensions | None = None,
        bytes_moved: int = 0,
    ) -> None:
        """Launch on ``stream`` (``cudaStream_t`` as an integer), in blocks of ``block`` threads, ``grid`` of them.

        ``args`` are integers and floats, one for each letter of the signature; a pointer is an address on the GPU,
        whose memory must stay until the kernel has run. ``shared`` is dynamic shared memory in bytes. ``cluster`` is in
        blocks. ``dependent`` lets the kernel start before the one ahead of it in the stream has ended; such a kernel
        must wait (``cudaGridDependencySynchronize``) before it touches what that one writes. GPUs below compute
        capability 9.0 ignore it. ``bytes_moved`` is how many bytes the kernel must read and write, for the device's
        observer. The calling thread must have the GPU's context current. Raises ``TypeError`` for arguments that do not
        fit the signature and ``DeviceError`` where the launch is refused.
        """
        configuration = self._configured(grid, block, shared, stream, dependent, cluster)
        observer = self._device.observer
        try:
            if observer is None:
                self._put(configuration, args)
            else:
                with observer(self.name, bytes_moved, stream):
                    self._put(configuration, args)
        except struct.error as error:
            raise TypeError(f"{self.name}: the arguments {args} do not fit the signature: {error}") from error
        except LibraryError as error:
            raise DeviceError(
                f"{self.name} with grid {grid}, block {block}, {shared} bytes of shared memory: {error}"
            ) from error

    def _put(self, configuration: Any, args: Sequence[object]) -> None:
        with self._lock:
            self._pack_parameters(self._parameters, 0, *args)
            self._launch(configuration, self._function, None, self._extra)

    def _configure(
        self, grid: Dimensions, block: Dimensions, shared: int, stream: int, dependent: bool,
        cluster: Dimensions | None,
    ) -> Any:  # fmt: skip
        """A pointer to the ``CUlaunchConfig`` of such launches, which it keeps."""
        with self._lock:
            if shared > self._shared_allowed:
                self._allow_shared(shared)
        attributes, count = (LaunchAttribute * 2)(), 0
        if cluster is not None:
            attributes[count].id = LaunchAttributeID.CLUSTER_DIMENSION
            attributes[count].value[:3] = _three(cluster)
            count += 1
        if dependent and self._dependent_supported:
            attributes[count].id = LaunchAttributeID.PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[count].value[0] = 1
            count += 1
        return ctypes.byref(LaunchConfig(_three(grid), _three(block), shared, stream, attributes, count))

    def _attribute(self, attribute: FunctionAttribute) -> int:
        value = ctypes.c_int()
        driver.load().cuFuncGetAttribute(value, attribute, self._function)
        return value.value

    def _allow_shared(self, shared: int) -> None:
        # Static and dynamic shared memory count together.
        without_asking = _SHARED_WITHOUT_ASKING - self._attribute(FunctionAttribute.SHARED_SIZE_BYTES)
        if shared <= without_asking:
            self._shared_allowed = without_asking
            return
        try:
            driver.load().cuFuncSetAttribute(self._function, FunctionAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        except LibraryError as error:
            raise DeviceError(f"{self.name}: {shared} bytes of dynamic shared memory a block: {error}") from error
        self._shared_allowed = shared


def _three(dimensions: Dimensions) -> tuple[int, ...]:
    if isinstance(dimensions, int):
        return dimensions, 1, 1
    return dimensions if len(dimensions) == 3 else (*dimensions, 1, 1)[:3]
