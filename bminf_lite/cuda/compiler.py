"""CUDA C++ to machine code, by NVRTC, with the result kept on disk.

The sources are package data (``src/*.cu``, and ``src/*.cuh`` that they include by quoted name). One call compiles one
source for one architecture and a list of template instantiations. It needs NVRTC and the CUDA headers, and no GPU, so
that every kernel can be compiled for every architecture anywhere. What ptxas says about each kernel (registers, spills,
shared memory) comes with the machine code.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DeviceError
from . import cubin_cache

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

SOURCES: Traversable = resources.files(__package__) / "src"
OPTIONS = ("--std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v")


@dataclass(frozen=True)
class Usage:
    """What one kernel needs, as ptxas reports it: registers a thread, and bytes of everything else.

    ``stack``, ``spill_stores`` and ``spill_loads`` are local memory a thread, ``shared`` static shared memory a block.
    """

    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture: ``symbols`` maps each name expression to its symbol in ``image``.

    ``usage`` holds what ptxas reported of each name expression; it lacks those of which it reported nothing.
    """

    image: bytes
    symbols: Mapping[str, str]
    usage: Mapping[str, Usage]


class Program(ctypes.c_void_p):
    """``nvrtcProgram``."""


_SIZE = ctypes.POINTER(ctypes.c_size_t)
_STRINGS = ctypes.POINTER(ctypes.c_char_p)
_INT = ctypes.POINTER(ctypes.c_int)
_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "nvrtcVersion": (_INT, _INT),
    "nvrtcGetNumSupportedArchs": (_INT,),
    "nvrtcGetSupportedArchs": (_INT,),
    "nvrtcCreateProgram": (
        ctypes.POINTER(Program), ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, _STRINGS, _STRINGS,
    ),
    "nvrtcDestroyProgram": (ctypes.POINTER(Program),),
    "nvrtcAddNameExpression": (Program, ctypes.c_char_p),
    "nvrtcCompileProgram": (Program, ctypes.c_int, _STRINGS),
    "nvrtcGetProgramLogSize": (Program, _SIZE),
    "nvrtcGetProgramLog": (Program, ctypes.c_char_p),
    "nvrtcGetCUBINSize": (Program, _SIZE),
    "nvrtcGetCUBIN": (Program, ctypes.c_char_p),
    "nvrtcGetLoweredName": (Program, ctypes.c_char_p, _STRINGS),
}  # fmt: skip
COMPILATION_FAILED = 6


class Nvrtc:
    """NVRTC's functions, called by name with their status checked."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, argtypes in _PROTOTYPES.items():
            function = getattr(library, name)
            function.argtypes = argtypes
            function.restype = ctypes.c_int
        library.nvrtcGetErrorString.argtypes = (ctypes.c_int,)
        library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *args: object, accept: int = 0) -> int:
        """Call a function and return its status; raises ``DeviceError`` unless that is 0 or ``accept``."""
        status = getattr(self._library, name)(*args)
        if status not in (0, accept):
            raise DeviceError(f"{name}: {self._library.nvrtcGetErrorString(status).decode()}")
        return status

    @functools.cached_property
    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", major, minor)
        return major.value, minor.value

    @functools.cached_property
    def architectures(self) -> frozenset[int]:
        """The compute capabilities that it compiles for, as in ``90``."""
        count = ctypes.c_int()
        self.call("nvrtcGetNumSupportedArchs", count)
        found = (ctypes.c_int * count.value)()
        self.call("nvrtcGetSupportedArchs", found)
        return frozenset(found)


@functools.cache
def nvrtc() -> Nvrtc:
    """NVRTC, loaded at the first call; raises ``DeviceError`` where it is not installed."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return Nvrtc(ctypes.CDLL(load_nvidia_dynamic_lib("nvrtc").abs_path))


def header_folder() -> str:
    """The folder that holds ``cuda_fp16.h``; raises ``DeviceError`` where it is not installed."""
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        raise DeviceError("the CUDA headers (cuda_fp16.h) were not found")
    return folder


def compile(
    source_name: str,
    arch: str,
    name_expressions: Sequence[str],
    defines: Sequence[str] = (),
    sources: Traversable = SOURCES,
    cache: Path | None = None,
) -> Cubin:
    """Compile ``sources / source_name`` for ``arch`` (``"sm_80"``, ``"sm_90a"``), or take the result from the disk.

    ``name_expressions`` names each kernel as CUDA C++ would: ``"attend<128, true>"``, ``"bminf::copy"``. ``defines``
    are macros, ``"NAME"`` or ``"NAME=value"``. ``cache`` is the folder to keep results in, by default
    :func:`cubin_cache.default_folder`. Raises ``DeviceError`` with the compiler's log where the source does not
    compile, and where NVRTC or the headers are missing or too old for ``arch``.
    """
    compiler = nvrtc()
    _check_architecture(compiler, arch)
    text = (sources / source_name).read_text(encoding="utf-8")
    headers = _included(text, sources)
    include = header_folder()
    options = (*OPTIONS, f"--gpu-architecture={arch}", f"-I{include}", *(f"-D{define}" for define in defines))
    folder = cubin_cache.default_folder() if cache is None else cache
    # Upgrading the CUDA headers replaces files in their folder, which changes the folder's time.
    installed = Path(include).stat().st_mtime_ns
    identity = [source_name, text, headers, options, list(name_expressions), compiler.version, installed]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    key = f"{Path(source_name).stem}-{arch}-{digest[:32]}.cubin"
    if (stored := cubin_cache.read(folder, key)) is not None:
        return _unpack(stored)
    cubin = _compile(compiler, source_name, text, headers, options, name_expressions)
    cubin_cache.write(folder, key, _pack(cubin))
    return cubin


def _check_architecture(compiler: Nvrtc, arch: str) -> None:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None or int(match[1]) not in compiler.architectures:
        version = "{}.{}".format(*compiler.version)
        known = ", ".join(f"sm_{number}" for number in sorted(compiler.architectures))
        raise DeviceError(
            f"NVRTC {version} cannot compile for {arch}: it knows {known}. A newer GPU needs a newer NVRTC "
            f"(pip install --upgrade nvidia-cuda-nvrtc), an older one an older major version"
        )


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)


def _included(text: str, sources: Traversable) -> dict[str, str]:
    """The files of ``sources`` that ``text`` includes by quoted name, directly or not, by name."""
    found: dict[str, str] = {}
    pending = [text]
    while pending:
        for name in _INCLUDE.findall(pending.pop()):
            if name not in found and (sources / name).is_file():
                found[name] = (sources / name).read_text(encoding="utf-8")
                pending.append(found[name])
    return found


@contextmanager
def _program(compiler: Nvrtc, name: str, text: str, headers: Mapping[str, str]) -> Iterator[Program]:
    program = Program()
    contents, names = _strings(headers.values()), _strings(headers)
    compiler.call("nvrtcCreateProgram", program, text.encode(), name.encode(), len(headers), contents, names)
    try:
        yield program
    finally:
        compiler.call("nvrtcDestroyProgram", program)


def _compile(
    compiler: Nvrtc,
    name: str,
    text: str,
    headers: Mapping[str, str],
    options: Sequence[str],
    name_expressions: Sequence[str],
) -> Cubin:
    with _program(compiler, name, text, headers) as program:
        for expression in name_expressions:
            compiler.call("nvrtcAddNameExpression", program, expression.encode())
        arguments = (program, len(options), _strings(options))
        status = compiler.call("nvrtcCompileProgram", *arguments, accept=COMPILATION_FAILED)
        log = _read(compiler, "nvrtcGetProgramLog", program).rstrip(b"\0\n").decode(errors="replace")
        if status == COMPILATION_FAILED:
            raise DeviceError(f"{name} does not compile with {' '.join(options)}:\n{log}")
        symbols = {expression: _symbol(compiler, program, expression) for expression in name_expressions}
        image = _read(compiler, "nvrtcGetCUBIN", program)
    reported = parse_usage(log)
    return Cubin(image, symbols, {e: reported[s] for e, s in symbols.items() if s in reported})


def _symbol(compiler: Nvrtc, program: Program, expression: str) -> str:
    symbol = ctypes.c_char_p()
    compiler.call("nvrtcGetLoweredName", program, expression.encode(), symbol)
    assert symbol.value is not None
    return symbol.value.decode()


def _read(compiler: Nvrtc, getter: str, program: Program) -> bytes:
    size = ctypes.c_size_t()
    compiler.call(f"{getter}Size", program, size)
    buffer = ctypes.create_string_buffer(size.value)
    compiler.call(getter, program, buffer)
    return buffer.raw


def _strings(values: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [value.encode() for value in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def parse_usage(log: str) -> dict[str, Usage]:
    """What ptxas's verbose log says of each entry function, by symbol."""
    found = {}
    for entry in log.split("Compiling entry function '")[1:]:
        symbol = entry.partition("'")[0]
        # The properties of device functions that were not inlined may stand between an entry's own and its registers.
        own = entry.partition(f"Function properties for {symbol}\n")[2]

        def number(pattern: str, text: str) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        found[symbol] = Usage(
            registers=number(r"Used (\d+) registers", entry),
            shared=number(r"(\d+) bytes smem", entry),
            stack=number(r"(\d+) bytes stack frame", own),
            spill_stores=number(r"(\d+) bytes spill stores", own),
            spill_loads=number(r"(\d+) bytes spill loads", own),
        )
    return found


def _pack(cubin: Cubin) -> bytes:
    usage = {expression: asdict(value) for expression, value in cubin.usage.items()}
    return json.dumps([dict(cubin.symbols), usage]).encode() + b"\n" + cubin.image


def _unpack(stored: bytes) -> Cubin:
    head, _, image = stored.partition(b"\n")
    symbols, usage = json.loads(head)
    return Cubin(image, symbols, {expression: Usage(**value) for expression, value in usage.items()})
