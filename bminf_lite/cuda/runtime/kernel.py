"""Kernels loaded into a GPU and launched with as little Python as possible.

A prompt's step launches about ten kernels per layer from Python. A launch packs its arguments into a buffer of the
kernel and calls the driver once; launch configurations are cached. Launches may be captured into a graph.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence

from ...errors import DeviceError
from . import compiler, driver
from .bindings import LibraryError
from .declarations import kernel_name, struct_format
from .driver import Device, FunctionAttribute, LaunchAttribute, LaunchAttributeID, LaunchConfig

Dimensions = int | tuple[int, ...]
Launch = Callable[[Sequence[object]], None]
"""Launches a kernel in one configuration, given its arguments."""

CONFIGURATIONS = 64
"""Launch configurations that a kernel keeps; beyond that, the least recently used is dropped."""
_PARAMETER_BUFFER_POINTER, _PARAMETER_BUFFER_SIZE = 1, 2
_DEFAULT_MAX_SHARED = 48 * 1024  # static and dynamic together
_ALL_SHARED, _AS_NEEDED = 100, -1  # percent of the memory that L1 cache and shared memory share


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

        With ``cache`` the carveout leaves the L1 cache all memory that shared memory does not need: each load in flight
        takes a cache line, and a kernel that streams from memory has many. This holds for all kernels of that name from
        this module.
        """
        signature = self.sources.declarations(self.source_name)[kernel_name(name_expression)].signature
        function = driver.Function()
        driver.load().cuModuleGetFunction(function, self._handle, self.cubin.symbols[name_expression].encode())
        # An SM has one carveout at a time, so kernels with different carveouts cannot run on it together.
        carveout = _AS_NEEDED if cache else _ALL_SHARED
        driver.load().cuFuncSetAttribute(function, FunctionAttribute.PREFERRED_SHARED_MEMORY_CARVEOUT, carveout)
        return Kernel(self, name_expression, function, signature)


class Kernel:
    """One kernel, launched by calling it, from any thread.

    ``signature`` has a letter for each parameter: one of :data:`.declarations.LETTERS`, or ``p`` for a pointer.
    """

    def __init__(self, module: Module, name: str, function: driver.Function, signature: str) -> None:
        self.name = name
        self._module = module  # the loaded module must outlive its kernels
        self._device = module.device
        self._function = function
        self._launch = driver.load().cuLaunchKernelEx
        self._lock = threading.Lock()
        self._shared_allowed = 0
        self._dependent_supported = module.device.compute_capability >= (9, 0)
        parameters = struct.Struct(struct_format(signature))
        self._parameters = ctypes.create_string_buffer(max(1, parameters.size))
        self._pack = functools.partial(parameters.pack_into, self._parameters, 0)
        self._size = ctypes.c_size_t(parameters.size)
        self._extra = (ctypes.c_void_p * 5)(
            _PARAMETER_BUFFER_POINTER,
            ctypes.addressof(self._parameters),
            _PARAMETER_BUFFER_SIZE,
            ctypes.addressof(self._size),
            None,
        )
        self._extra_address = ctypes.c_void_p(ctypes.addressof(self._extra))
        self._recent = functools.lru_cache(CONFIGURATIONS)(self.configured)

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
        """Launch ``grid`` blocks of ``block`` threads on ``stream`` (``cudaStream_t`` as an integer).

        ``args`` are integers and floats, one for each letter of the signature; a pointer is an address on the GPU,
        whose memory must stay until the kernel has run. ``shared`` is dynamic shared memory in bytes. ``cluster`` is in
        blocks. ``dependent`` is programmatic dependent launch: the kernel may start before its predecessor has ended,
        and must wait (``cudaGridDependencySynchronize``) before it accesses memory that the predecessor writes. It has
        no effect below compute capability 9.0. ``bytes_moved`` counts the bytes that the kernel reads and writes, for
        the device's observer. The GPU's context must be current in the calling thread. Raises ``TypeError`` for
        arguments that do not fit the signature and ``DeviceError`` if the launch fails.
        """
        launch = self._recent(grid, block, shared, stream, dependent, cluster)
        observer = self._device.observer
        if observer is None:
            launch(args)
        else:
            with observer(self.name, bytes_moved, stream):
                launch(args)

    def configured(
        self,
        grid: Dimensions,
        block: Dimensions,
        shared: int = 0,
        stream: int = 0,
        dependent: bool = False,
        cluster: Dimensions | None = None,
    ) -> Launch:
        """A function of ``args`` that launches as a call with these does, in less time and not told to the observer."""
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
        config = LaunchConfig(_three(grid), _three(block), shared, stream, attributes, count)
        config_address = ctypes.c_void_p(ctypes.addressof(config))  # is passed faster than byref; launch() keeps config
        pack, put, function, extra = self._pack, self._launch, self._function, self._extra_address
        acquire, release = self._lock.acquire, self._lock.release

        def launch(args: Sequence[object]) -> None:
            acquire()  # `with` takes the host twice as long
            try:
                pack(*args)
                status = put(config_address, function, None, extra)
            except struct.error as error:
                raise TypeError(f"{self.name}: the arguments {args} do not fit the signature: {error}") from error
            finally:
                release()
            if status:
                failure = LibraryError("cuLaunchKernelEx", status, driver.describe(status))
                raise DeviceError(
                    f"{self.name} with grid {grid}, block {block}, {config.shared} bytes of shared memory: {failure}"
                ) from failure

        return launch

    def _allow_shared(self, shared: int) -> None:
        static = ctypes.c_int()
        driver.load().cuFuncGetAttribute(static, FunctionAttribute.SHARED_SIZE_BYTES, self._function)
        default = _DEFAULT_MAX_SHARED - static.value
        if shared <= default:
            self._shared_allowed = default
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
