"""The part of CuPy that the package uses, over the fake GPU's memory.

As strict as CuPy where it matters: an array does not turn into a NumPy array by itself, operations between the two
kinds are errors, and work goes to the current stream, so that it is recorded where that is.
"""

from __future__ import annotations

import ctypes
import math
import operator
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np

from .machine import Machine
from .memory import FakeGpuError


class CUDARuntimeError(RuntimeError):
    """As in ``cupy.cuda.runtime``."""


class UnownedMemory:
    """Memory that ``owner`` keeps alive."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    """An address within memory, which it keeps alive."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        machine, ptr = Machine.current, self.ptr
        stream = current_stream() if stream is None else stream

        def work() -> None:
            machine.check(ptr, size, "memset")
            machine.memory.fill(ptr, size, value)

        if size:
            machine.put(stream.ptr, work)


class Memory:
    """An allocation that CuPy itself makes."""

    def __init__(self, nbytes: int) -> None:
        Machine.current.refuse_in_recording("cudaMalloc")
        self.machine = Machine.current
        self.ptr = self.machine.memory.reserve(max(nbytes, 512))
        self.size = nbytes
        self.machine.memory.poison(self.ptr, nbytes)
        self.machine.memory.add(self.ptr, max(nbytes, 1))

    def __del__(self) -> None:
        self.machine.memory.remove(self.ptr)
        self.machine.memory.release(self.ptr)


def alloc(nbytes: int) -> MemoryPointer:
    return _current.allocators[-1](nbytes)


def _alloc_owned(nbytes: int) -> MemoryPointer:
    return MemoryPointer(Memory(nbytes), 0)


class _Current(threading.local):
    """What a thread has entered: every thread has an allocator and a stream of its own."""

    def __init__(self) -> None:
        self.allocators: list[Callable[[int], MemoryPointer]] = [_alloc_owned]
        self.streams: list[Stream] = []


_current = _Current()


@contextmanager
def using_allocator(allocator: Callable[[int], MemoryPointer]) -> Iterator[None]:
    _current.allocators.append(allocator)
    try:
        yield
    finally:
        _current.allocators.pop()


class PinnedMemory:
    """Host memory that kernels may read."""

    def __init__(self, size: int, flags: int = 0) -> None:
        self.owned = Memory(size)
        self.ptr, self.size = self.owned.ptr, size


def PinnedMemoryPointer(mem: PinnedMemory, offset: int) -> Any:
    """A buffer: an array of ctypes, which offers one in every version of Python."""
    kind = type("PinnedMemoryPointer", (ctypes.c_char * (mem.size - offset),), {})
    pointer = kind.from_address(mem.ptr + offset)
    pointer.mem, pointer.ptr = mem, mem.ptr + offset
    return pointer


def alloc_pinned_memory(size: int) -> Any:
    return PinnedMemoryPointer(PinnedMemory(size), 0)


class Stream:
    """A stream; entered, it is the current one."""

    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False, ptb: bool = False) -> None:
        self.ptr = 0 if null else Machine.current.new_stream().ptr

    def __enter__(self) -> Stream:
        _current.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert _current.streams.pop() is self

    use = __enter__

    def synchronize(self) -> None:
        if Machine.current.stream(self.ptr).recording is not None:
            raise FakeGpuError("a stream that is being recorded cannot be waited for")

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)
        if event.source is not None:
            Machine.current.stream(self.ptr).wait(event.source, event.recording)


def current_stream() -> Stream:
    return _current.streams[-1] if _current.streams else Stream.null


class Event:
    """Work is done when it is put on a stream, so an event only has to have been recorded."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.timing, self.recorded = not disable_timing, False
        self.source: Any = None
        self.recording: Any = None

    def record(self, stream: Stream | None = None) -> None:
        self.source = Machine.current.stream((stream or current_stream()).ptr)
        self.recorded, self.recording = True, self.source.recording

    @property
    def done(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        Machine.current.refuse_in_recording("waiting for an event")


class Device:
    """Entered, it is the current one."""

    def __init__(self, device: int = 0) -> None:
        assert 0 <= device < Machine.current.devices, f"there is no fake GPU {device}"
        self.id = device
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(Machine.current.device)
        Machine.current.device = self.id
        return self

    def __exit__(self, *_: object) -> None:
        Machine.current.device = self._before.pop()

    def synchronize(self) -> None:
        Machine.current.refuse_in_recording("cudaDeviceSynchronize")


# -- arrays ------------------------------------------------------------------------------------------------------------


class ndarray:
    """An array in the fake GPU's memory."""

    __array_priority__ = 100

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None, strides: Any = None, order: str = "C"
    ) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)
        if memptr is None:
            memptr = alloc(math.prod(self.shape) * self.dtype.itemsize)
        self.data = memptr
        dense = (self.dtype.itemsize * math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        self.strides = tuple(dense if strides is None else strides)
        self.base: ndarray | None = None

    itemsize = property(lambda self: self.dtype.itemsize)
    size = property(lambda self: math.prod(self.shape))
    nbytes = property(lambda self: self.size * self.itemsize)
    ndim = property(lambda self: len(self.shape))
    T = property(lambda self: self.transpose())

    @property
    def flags(self) -> Any:
        dense = ndarray(self.shape, self.dtype, self.data).strides
        same = all(n <= 1 or a == b for n, a, b in zip(self.shape, self.strides, dense, strict=True))
        return types.SimpleNamespace(c_contiguous=same or self.size == 0)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = None if self.flags.c_contiguous else self.strides
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "strides": strides,
            "version": 3,
        }

    def __dlpack__(self, **_: Any) -> Any:
        raise FakeGpuError("only this module's from_dlpack takes this array")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def __array_function__(self, function: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        if function is np.zeros_like:
            return zeros(kwargs.get("shape") or args[0].shape, args[0].dtype)
        return NotImplemented

    # Views.

    def _like(self, view: np.ndarray, base: np.ndarray) -> ndarray:
        offset = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        found = ndarray(view.shape, view.dtype, self.data + (offset if view.size else 0), view.strides)
        found.base = self if self.base is None else self.base
        return found

    def _shadow(self) -> np.ndarray:
        """The same memory as NumPy sees it, unchecked: also to let NumPy work out shapes and strides."""
        return _view_at(self.data.ptr, self.shape, self.dtype, self.strides)

    def _extent(self) -> int:
        """Bytes from the first element to the end of the last; strides are not negative."""
        if self.size == 0:
            return 0
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.itemsize

    def __getitem__(self, index: Any) -> ndarray:
        base = self._shadow()
        view = base[index if isinstance(index, tuple) else (index,)]
        if not isinstance(view, np.ndarray) or view.base is None:
            if isinstance(index, int | np.integer):
                return ndarray((), self.dtype, self.data + int(index) * self.strides[0])
            raise FakeGpuError(f"only views are made of arrays here, not {index!r}")
        return self._like(view, base)

    def reshape(self, *shape: Any) -> ndarray:
        """A view where strides allow one, else of a copy."""
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if not self.flags.c_contiguous:
            base = self._shadow()
            view = base.reshape(shape)
            if np.may_share_memory(view, base):
                return self._like(view, base)
        source = self if self.flags.c_contiguous else self.copy()
        known = -math.prod(shape)
        shape = tuple(source.size // max(known, 1) if n == -1 else n for n in shape)
        if math.prod(shape) != source.size:
            raise ValueError(f"cannot reshape {self.shape} into {shape}")
        return ndarray(shape, self.dtype, source.data)

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> ndarray:
        axes = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        axes = axes or tuple(range(self.ndim))[::-1]
        return ndarray([self.shape[a] for a in axes], self.dtype, self.data, [self.strides[a] for a in axes])

    def swapaxes(self, a: int, b: int) -> ndarray:
        base = self._shadow()
        return self._like(base.swapaxes(a, b), base)

    def view(self, dtype: Any) -> ndarray:
        base = self._shadow()
        return self._like(base.view(dtype), base)

    # Work on the current stream.

    def values(self) -> np.ndarray:
        """The memory itself, checked."""
        return _Values(self)()

    def set(self, values: np.ndarray, stream: Any = None) -> None:
        Machine.current.refuse_in_recording("a copy from pageable memory")
        if not isinstance(values, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if values.dtype != self.dtype:
            raise TypeError(f"{values.dtype} array cannot be set to {self.dtype} array")
        if values.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {values.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        Machine.current.order.complete()
        self.values()[...] = values

    def get(self, stream: Any = None) -> np.ndarray:
        Machine.current.refuse_in_recording("a copy to the host")
        Machine.current.order.complete()
        return self.values().copy()

    def fill(self, value: Any) -> None:
        _put(self, lambda x: value, self, by_kernel=value != 0 or not self.flags.c_contiguous)

    def copy(self) -> ndarray:
        out = empty(self.shape, self.dtype)
        _put(out, lambda x: x, self, by_kernel=not _are_bytes(out, self))
        return out

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        if not copy and self.dtype == dtype:
            return self
        out = empty(self.shape, dtype)
        _put(out, lambda x: x, self, by_kernel=not _are_bytes(out, self))
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, np.ndarray):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        target = self[index] if index is not Ellipsis else self
        np.broadcast_shapes(target.shape, value.shape if isinstance(value, ndarray) else ())
        _put(target, lambda x: x, value, by_kernel=not _are_bytes(target, value))

    def all(self) -> ndarray:
        out = empty((), bool)
        _put(out, np.all, self)
        return out

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())


def _view_at(address: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...]) -> np.ndarray:
    extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize if math.prod(shape) else 0
    buffer = (ctypes.c_ubyte * max(extent, 1)).from_address(address) if extent else np.empty(1, np.uint8)
    return np.ndarray(shape, dtype, buffer, 0, strides if extent else None)


class _Values:
    """An array's place, without a hold on its memory: what work refers to that is recorded and done later."""

    def __init__(self, x: ndarray) -> None:
        self.place, self.extent = (x.data.ptr, x.shape, x.dtype, x.strides), x._extent()
        self()

    def __call__(self) -> np.ndarray:
        if self.extent:
            Machine.current.check(self.place[0], self.extent, "CuPy's operation")
        return _view_at(*self.place)


def _are_bytes(out: ndarray, value: Any) -> bool:
    """Whether CuPy copies ``value`` without a kernel."""
    same = isinstance(value, ndarray) and (value.shape, value.dtype) == (out.shape, out.dtype)
    return bool(same and value.flags.c_contiguous and out.flags.c_contiguous)


def compute(function: Callable[..., Any], out: np.ndarray, operands: Sequence[Any]) -> None:
    """``out[...] = function(*operands)``, and nothing is checked any more."""
    out[...] = function(*operands)


def _put(out: ndarray, function: Callable[..., Any], *operands: Any, by_kernel: bool = True) -> None:
    """``out[...] = function(*operands)`` on the current stream, which CuPy does ``by_kernel``, or by bytes."""
    if by_kernel and out.size:
        Machine.current.note_kernel_of_cupy()
    if any(isinstance(x, np.ndarray) for x in operands):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    target = _Values(out)
    sources = [_Values(x) if isinstance(x, ndarray) else x for x in operands]

    def work() -> None:
        values = target(), [x() if isinstance(x, _Values) else x for x in sources]
        with np.errstate(all="ignore"):
            compute(function, *values)

    Machine.current.put(current_stream().ptr, work)


def _binary(name: str) -> None:
    function = getattr(operator, f"__{name}__")

    def out_of_place(self: ndarray, other: Any) -> ndarray:
        like = [np.empty([1] * v.ndim, v.dtype) if isinstance(v, ndarray) else v for v in (self, other)]
        out = empty(np.broadcast_shapes(self.shape, getattr(other, "shape", ())), function(*like).dtype)
        _put(out, function, self, other)
        return out

    def in_place(self: ndarray, other: Any) -> ndarray:
        _put(self, function, self, other)
        return self

    setattr(ndarray, f"__{name}__", out_of_place)
    setattr(ndarray, f"__i{name}__", in_place)


for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge"):
    _binary(_name)


# -- functions ---------------------------------------------------------------------------------------------------------


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def full(shape: Any, value: Any, dtype: Any = None) -> ndarray:
    out = empty(shape, np.asarray(value).dtype if dtype is None else dtype)
    out.fill(value)
    return out


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 1, dtype)


def asarray(values: Any, dtype: Any = None) -> ndarray:
    if isinstance(values, ndarray):
        return values if dtype is None else values.astype(dtype, copy=False)
    if hasattr(values, "__cuda_array_interface__"):
        given = values.__cuda_array_interface__
        shape, number = given["shape"], np.dtype(given["typestr"])
        memory = UnownedMemory(given["data"][0], math.prod(shape) * number.itemsize, values, 0)
        return asarray(ndarray(shape, number, MemoryPointer(memory, 0), given["strides"]), dtype)
    values = np.ascontiguousarray(values, dtype)
    out = empty(values.shape, values.dtype)
    if out.size:
        out.set(values)
    return out


def ascontiguousarray(values: ndarray, dtype: Any = None) -> ndarray:
    out = asarray(values, dtype)
    return out if out.flags.c_contiguous else out.copy()


def asnumpy(values: ndarray, stream: Any = None) -> np.ndarray:
    return values.get(stream)


def from_dlpack(values: ndarray) -> ndarray:
    return ndarray(values.shape, values.dtype, values.data, values.strides)


def arange(*arguments: Any, dtype: Any = None) -> ndarray:
    return asarray(np.arange(*arguments, dtype=dtype))


def broadcast_to(values: ndarray, shape: Any) -> ndarray:
    base = values._shadow()
    view = np.broadcast_to(base, shape)
    return ndarray(view.shape, view.dtype, values.data, view.strides)


def get_elapsed_time(start: Event, end: Event) -> float:
    assert start.recorded and end.recorded and start.timing and end.timing
    return 1.0


def memcpy_async(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    machine = Machine.current
    if kind == 2 and machine.memory.piece(target) is None:
        machine.refuse_in_recording("a copy to pageable memory")

    def work() -> None:
        for address, on_device in ((target, kind in (1, 3)), (source, kind in (2, 3))):
            if on_device:
                machine.memory.check(address, nbytes, "memcpyAsync", inside=False)  # it may take a slot as a whole
        ctypes.memmove(target, source, nbytes)

    machine.put(stream, work)


def memcpy_2d_async(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    assert width <= min(target_pitch, source_pitch)
    for row in range(height):
        memcpy_async(target + row * target_pitch, source + row * source_pitch, width, kind, stream)


def memset_async(target: int, value: int, nbytes: int, stream: int) -> None:
    machine = Machine.current

    def work() -> None:
        machine.check(target, nbytes, "memsetAsync")
        machine.memory.fill(target, nbytes, value)

    machine.put(stream, work)


def _runtime(machine: Machine) -> types.ModuleType:
    module = _module("cupy.cuda.runtime")
    module.__dict__.update(
        CUDARuntimeError=CUDARuntimeError,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3,
        memcpyAsync=memcpy_async,
        memcpy2DAsync=memcpy_2d_async,
        memsetAsync=memset_async,
        streamIsCapturing=lambda stream: int(machine.stream(stream).recording is not None),
        eventCreate=lambda: next(machine.numbers),
        eventDestroy=lambda event: None,
        eventRecord=lambda event, stream: machine.stream(stream) and None,
        eventSynchronize=lambda event: machine.refuse_in_recording("waiting for an event"),
        eventElapsedTime=lambda start, end: 1.0,
        getDeviceCount=lambda: machine.devices,
        deviceCanAccessPeer=lambda device, peer: int(device != peer and machine.has_peer_access),
        deviceEnablePeerAccess=lambda peer: machine.peers.add((machine.device, peer)),
        hostRegister=lambda address, nbytes, flags: machine.memory.add(address, nbytes) and None,
        hostUnregister=machine.memory.remove,
    )
    return module


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


def modules(machine: Machine) -> dict[str, types.ModuleType]:
    """``cupy`` and its parts by name, for ``sys.modules``."""
    Stream.null = Stream(null=True)
    runtime, cuda, cupy = _runtime(machine), _module("cupy.cuda"), _module("cupy")
    cuda.__dict__.update(
        runtime=runtime,
        Device=Device,
        Stream=Stream,
        Event=Event,
        Memory=Memory,
        MemoryPointer=MemoryPointer,
        UnownedMemory=UnownedMemory,
        PinnedMemory=PinnedMemory,
        PinnedMemoryPointer=PinnedMemoryPointer,
        alloc=alloc,
        alloc_pinned_memory=alloc_pinned_memory,
        using_allocator=using_allocator,
        get_current_stream=current_stream,
        get_elapsed_time=get_elapsed_time,
    )
    types_ = {name: getattr(np, name) for name in ("float16", "float32", "int8", "int32", "uint8", "uint64", "nan")}
    cupy.__dict__.update(
        types_,
        cuda=cuda,
        ndarray=ndarray,
        empty=empty,
        full=full,
        zeros=zeros,
        ones=ones,
        asarray=asarray,
        ascontiguousarray=ascontiguousarray,
        asnumpy=asnumpy,
        from_dlpack=from_dlpack,
        arange=arange,
        broadcast_to=broadcast_to,
        __version__="fake",
        __path__=[],
    )
    cuda.__path__ = []
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime}
