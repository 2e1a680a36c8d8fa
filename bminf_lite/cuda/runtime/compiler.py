"""Compiles CUDA C++ to machine code with NVRTC and keeps the result on disk.

One call compiles one file of :class:`Sources` for one architecture and a list of template instantiations. It needs
NVRTC and the CUDA headers but no GPU, so every kernel can be compiled for every architecture anywhere. The result holds
the machine code and what ptxas reports of each kernel: registers, spills, shared memory.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ...errors import DeviceError
from . import cubin_cache, libraries
from .bindings import LibraryError, bind
from .declarations import Declaration, parse_declarations

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

OPTIONS = ("--std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Sources:
    """CUDA C++ by name: the files of ``folder``, and ``generated`` ones, which exist as text only."""

    folder: Traversable | None = None
    generated: Mapping[str, str] = field(default_factory=dict)
    _declarations: dict[str, dict[str, Declaration]] = field(default_factory=dict, repr=False)

    def read(self, name: str) -> str | None:
        """The text of a file; None if no file has that name."""
        if name in self.generated:
            return self.generated[name]
        if self.folder is None or not (file := self.folder / name).is_file():
            return None
        return file.read_text(encoding="utf-8")

    def source(self, name: str) -> str:
        """The text of a file that must exist; raises ``FileNotFoundError``."""
        text = self.read(name)
        if text is None:
            raise FileNotFoundError(f"there is no CUDA source {name} in {self.folder}")
        return text

    def included(self, text: str) -> dict[str, str]:
        """The files that ``text`` includes by quoted name, directly or not, as name to text. NVRTC finds all others."""
        found: dict[str, str] = {}
        pending = [text]
        while pending:
            for name in _INCLUDE.findall(pending.pop()):
                if name not in found and (header := self.read(name)) is not None:
                    found[name] = header
                    pending.append(header)
        return found

    def declarations(self, name: str) -> dict[str, Declaration]:
        """The kernels that a file declares, by name; each file is parsed once."""
        found = self._declarations.get(name)
        if found is None:
            text = self.source(name)
            found = self._declarations[name] = parse_declarations(text, "\n".join(self.included(text).values()))
        return found


@dataclass(frozen=True)
class Usage:
    """The resources of one kernel, as ptxas reports them.

    ``registers`` are counted per thread. ``stack``, ``spill_stores`` and ``spill_loads`` are bytes of local memory per
    thread, ``shared`` is bytes of static shared memory per block.
    """

    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture: ``symbols`` maps each name expression to its symbol in ``image``.

    ``usage`` maps each name expression to the resources that ptxas reported, if it reported any.
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
    "nvrtcGetNumSupportedArchs": (_INT,),
    "nvrtcGetSupportedArchs": (_INT,),
    "nvrtcCreateProgram": (ctypes.POINTER(Program), ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, _STRINGS, _STRINGS),
    "nvrtcDestroyProgram": (ctypes.POINTER(Program),),
    "nvrtcAddNameExpression": (Program, ctypes.c_char_p),
    "nvrtcCompileProgram": (Program, ctypes.c_int, _STRINGS),
    "nvrtcGetProgramLogSize": (Program, _SIZE),
    "nvrtcGetProgramLog": (Program, ctypes.c_char_p),
    "nvrtcGetCUBINSize": (Program, _SIZE),
    "nvrtcGetCUBIN": (Program, ctypes.c_char_p),
    "nvrtcGetLoweredName": (Program, ctypes.c_char_p, _STRINGS),
}
_COMPILATION_FAILED = 6
_lock = threading.Lock()
_being_made: dict[tuple[Path, str], Future[Cubin]] = {}


@functools.cache
def nvrtc() -> SimpleNamespace:
    """NVRTC's functions, loaded at the first call; raises ``DeviceError`` if it is not installed."""
    library = libraries.load("nvrtc").dll
    library.nvrtcGetErrorString.argtypes = (ctypes.c_int,)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return bind(library, _PROTOTYPES, lambda status: library.nvrtcGetErrorString(status).decode())


def architectures() -> list[int]:
    """The compute capabilities that NVRTC compiles for, as in ``90``, in order."""
    count = ctypes.c_int()
    nvrtc().nvrtcGetNumSupportedArchs(count)
    found = (ctypes.c_int * count.value)()
    nvrtc().nvrtcGetSupportedArchs(found)
    return sorted(found)


def compile(
    source_name: str,
    arch: str,
    name_expressions: Sequence[str],
    defines: Sequence[str] = (),
    *,
    sources: Sources,
    cache: Path | None = None,
) -> Cubin:
    """Compile ``source_name`` of ``sources`` for ``arch`` (``"sm_80"``, ``"sm_90a"``), or read the result from disk.

    ``name_expressions`` names each kernel as CUDA C++ would: ``"attend<128, true>"``, ``"bminf::copy"``. ``defines``
    are macros, ``"NAME"`` or ``"NAME=value"``. ``cache`` is the folder to keep results in, by default
    :func:`cubin_cache.default_folder`. Raises ``DeviceError`` with the compiler's log if the source does not
    compile, and if NVRTC or the headers are missing or too old for ``arch``.
    """
    _check_architecture(arch)
    text = sources.source(source_name)
    headers = sources.included(text)
    version, include = libraries.load("nvrtc").version, _header_folder()
    options = (*OPTIONS, f"--gpu-architecture={arch}", f"-I{include}", *(f"-D{define}" for define in defines))
    folder = cubin_cache.default_folder() if cache is None else cache
    # Upgrading the CUDA headers replaces files in their folder, which changes the folder's modification time.
    installed = include.stat().st_mtime_ns
    identity = [source_name, text, headers, options, list(name_expressions), version, installed]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    key = f"{Path(source_name).stem}-{arch}-{digest[:32]}.cubin"

    def make() -> Cubin:
        if (stored := cubin_cache.read(folder, key)) is not None:
            return _unpack(stored)
        cubin = _compile(source_name, text, headers, options, name_expressions)
        cubin_cache.write(folder, key, _pack(cubin))
        return cubin

    return _made_once((folder, key), make)


def _made_once(key: tuple[Path, str], make: Callable[[], Cubin]) -> Cubin:
    """What ``make`` returns or raises; threads that want the same at the same time, as ranks do, share one call."""
    with _lock:
        other = _being_made.get(key)
        if other is None:
            own = _being_made[key] = Future()
    if other is not None:
        return other.result()
    try:
        own.set_result(make())
    except BaseException as error:
        own.set_exception(error)
    finally:
        del _being_made[key]
    return own.result()


@functools.cache
def _header_folder() -> Path:
    return libraries.find_headers(major=libraries.load("nvrtc").version[0]).path


def _check_architecture(arch: str) -> None:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None or int(match[1]) not in architectures():
        known = ", ".join(f"sm_{number}" for number in architectures())
        raise DeviceError(
            f"NVRTC {libraries.text(libraries.load('nvrtc').version)} cannot compile for {arch}, only for {known}; "
            f"a newer GPU needs a newer NVRTC, an older GPU an older one (see bminf-lite doctor for the installed one)"
        )


@contextmanager
def _program(name: str, text: str, headers: Mapping[str, str]) -> Iterator[Program]:
    program = Program()
    contents, names = _strings(headers.values()), _strings(headers)
    nvrtc().nvrtcCreateProgram(program, text.encode(), name.encode(), len(headers), contents, names)
    try:
        yield program
    finally:
        nvrtc().nvrtcDestroyProgram(program)


def _compile(
    name: str, text: str, headers: Mapping[str, str], options: Sequence[str], name_expressions: Sequence[str]
) -> Cubin:
    with _program(name, text, headers) as program:
        for expression in name_expressions:
            nvrtc().nvrtcAddNameExpression(program, expression.encode())
        try:
            nvrtc().nvrtcCompileProgram(program, len(options), _strings(options))
        except LibraryError as error:
            if error.status != _COMPILATION_FAILED:
                raise
            raise DeviceError(f"{name} does not compile with {' '.join(options)}:\n{_log(program)}") from None
        symbols = {expression: _symbol(program, expression) for expression in name_expressions}
        size = ctypes.c_size_t()
        nvrtc().nvrtcGetCUBINSize(program, size)
        image = ctypes.create_string_buffer(size.value)
        nvrtc().nvrtcGetCUBIN(program, image)
        reported = parse_usage(_log(program))
    return Cubin(image.raw, symbols, {e: reported[s] for e, s in symbols.items() if s in reported})


def _symbol(program: Program, expression: str) -> str:
    symbol = ctypes.c_char_p()
    nvrtc().nvrtcGetLoweredName(program, expression.encode(), symbol)
    assert symbol.value is not None
    return symbol.value.decode()


def _log(program: Program) -> str:
    size = ctypes.c_size_t()
    nvrtc().nvrtcGetProgramLogSize(program, size)
    log = ctypes.create_string_buffer(size.value)
    nvrtc().nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def _strings(values: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [value.encode() for value in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def parse_usage(log: str) -> dict[str, Usage]:
    """The resources of each entry function in ptxas's verbose log, by symbol."""
    found = {}
    for entry in log.split("Compiling entry function '")[1:]:
        symbol = entry.partition("'")[0]
        # The log may list device functions that were not inlined between an entry's properties and its registers.
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
