"""Finds and loads the CUDA libraries, reads their versions, and names the command that installs a missing one.

Four libraries are used: the driver (``libcuda``), the runtime (``libcudart``), the compiler (``libnvrtc``) and the
matrix products (``libcublasLt``). The driver comes with the operating system. The others are searched for through
cuda-pathfinder (wheels, conda, ``CUDA_PATH``), then in NVIDIA's wheels folder by folder, then by the dynamic linker. A
library whose CUDA version is newer than the driver supports is skipped, because it would load and then fail at its
first call, and so is one of another major version than the installed CuPy's. This module imports no CuPy and loads each
library at its first use.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from ...errors import DeviceError

Version = tuple[int, ...]
CUDA_MAJORS = (13, 12)
"""The CUDA major versions that this package runs on, the preferred one first."""


@dataclass(frozen=True)
class Library:
    """A loaded library: its file (None if unknown), its version and its functions."""

    name: str
    path: str | None
    version: Version
    dll: ctypes.CDLL = field(repr=False, compare=False)


@dataclass(frozen=True)
class Headers:
    """The folder that holds ``cuda_fp16.h``, and the CUDA version of that folder as ``(major, minor)``."""

    path: Path
    version: Version


def _version_by_pointer(function: str) -> Callable[[ctypes.CDLL], Version]:
    def read(dll: ctypes.CDLL) -> Version:
        number = ctypes.c_int(0)
        status = getattr(dll, function)(ctypes.byref(number))
        return (number.value // 1000, number.value % 1000 // 10) if status == 0 else ()

    return read


def _nvrtc_version(dll: ctypes.CDLL) -> Version:
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    status = dll.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return (major.value, minor.value) if status == 0 else ()


def _cublaslt_version(dll: ctypes.CDLL) -> Version:
    dll.cublasLtGetVersion.restype = ctypes.c_size_t
    number = dll.cublasLtGetVersion()
    return number // 10000, number // 100 % 100, number % 100


@dataclass(frozen=True)
class _Spec:
    """How one library is found: ``wheels`` maps a CUDA major to (distribution, folder inside ``nvidia/``)."""

    soname: str
    version: Callable[[ctypes.CDLL], Version]
    wheels: dict[int, tuple[str, str]]

    @property
    def is_driver(self) -> bool:
        return not self.wheels


_SPECS = {
    "cuda": _Spec("libcuda.so.1", _version_by_pointer("cuDriverGetVersion"), {}),
    "cudart": _Spec(
        "libcudart.so",
        _version_by_pointer("cudaRuntimeGetVersion"),
        {13: ("nvidia-cuda-runtime", "cu13"), 12: ("nvidia-cuda-runtime-cu12", "cuda_runtime")},
    ),
    "nvrtc": _Spec(
        "libnvrtc.so",
        _nvrtc_version,
        {13: ("nvidia-cuda-nvrtc", "cu13"), 12: ("nvidia-cuda-nvrtc-cu12", "cuda_nvrtc")},
    ),
    "cublasLt": _Spec(
        "libcublasLt.so",
        _cublaslt_version,
        {13: ("nvidia-cublas", "cu13"), 12: ("nvidia-cublas-cu12", "cublas")},
    ),
}
NAMES = tuple(_SPECS)


CUPY_DISTRIBUTIONS = {"cupy-cuda13x": 13, "cupy-cuda12x": 12, "cupy": None}
"""CuPy's distributions and their CUDA major versions; ``cupy`` is built from source for any version."""


def find_cupy() -> dict[str, str]:
    """The installed distributions of CuPy, with their versions."""
    found = {}
    for name in CUPY_DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def major_of(cupy: Iterable[str]) -> int | None:
    """The CUDA major version of the distributions ``cupy``; None if it is not known, or not one."""
    majors = {CUPY_DISTRIBUTIONS[name] for name in cupy}
    return majors.pop() if len(majors) == 1 else None


@functools.cache
def cupy_major() -> int | None:
    """The CUDA major version of the installed CuPy; None if it is not known."""
    return major_of(find_cupy())


def extra(driver: Version = ()) -> str:
    """The extra of this package that suits a driver for CUDA ``driver``: ``cuda12`` or ``cuda13``."""
    return "cuda12" if driver and driver[0] < 13 else "cuda13"


def install_command(name: str, driver: Version = ()) -> str:
    """The exact command that installs the library ``name`` (or ``"headers"``, or ``"cupy"``) for a driver's version."""
    major = 12 if extra(driver) == "cuda12" else 13
    if name == "cuda":
        return "install the NVIDIA driver: https://www.nvidia.com/drivers"
    if name == "cupy":
        return f"pip install 'bminf-lite[{extra(driver)}]'"
    distribution = _SPECS["cudart" if name == "headers" else name].wheels[major][0]
    return f"pip install {distribution}"


def _wheel_folders(spec: _Spec, leaf: str) -> Iterator[Path]:
    package = importlib.util.find_spec("nvidia")
    roots = list(package.submodule_search_locations or ()) if package else []
    for major in CUDA_MAJORS:
        if major in spec.wheels:
            yield from (Path(root) / spec.wheels[major][1] / leaf for root in roots)


def _pathfinder_file(name: str) -> Iterator[str]:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib(name).abs_path
    except (ImportError, RuntimeError, OSError):
        return
    if path:
        yield path


def candidates(name: str) -> Iterator[str]:
    """Candidates for the library ``name``, in order: files, then names for the dynamic linker."""
    spec = _SPECS[name]
    if spec.is_driver:
        yield spec.soname
        return
    yield from _pathfinder_file(name)
    for folder in _wheel_folders(spec, "lib"):
        yield from (str(path) for path in sorted(folder.glob(f"{spec.soname}.*")))
    yield from (f"{spec.soname}.{major}" for major in CUDA_MAJORS)


def _mapped_file(name: str) -> str | None:
    """The file of a library that the dynamic linker found by name, read from ``/proc/self/maps``."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(rf"(/\S*/{re.escape(name)}\S*)$", maps, re.MULTILINE)
    return found[1] if found else None


def load_from(name: str, paths: Iterable[str], driver: Version, major: int | None = None) -> Library:
    """The first of ``paths`` that loads as the library ``name`` and is no newer than ``driver`` (``()``: unknown).

    With ``major``, CuPy's, it must be of that CUDA major version.

    Raises ``DeviceError`` with all attempts and the command that installs the library.
    """
    spec, tried = _SPECS[name], []
    for path in dict.fromkeys(paths):
        try:
            dll = ctypes.CDLL(path)
            version = spec.version(dll)
        except (OSError, AttributeError) as error:
            tried.append(str(error))
            continue
        if driver and version and version[0] > driver[0]:
            tried.append(f"{path} is for CUDA {version[0]}, and the driver supports CUDA {text(driver)}")
            continue
        if major and version and version[0] != major:
            tried.append(f"{path} is for CUDA {version[0]}, and CuPy for CUDA {major}")
            continue
        return Library(name, path if os.path.isabs(path) else _mapped_file(path), version, dll)
    details = "".join(f"\n  {line}" for line in tried)
    remedy = _remedy(name, (major,) if major else driver)
    raise DeviceError(f"{spec.soname} cannot be loaded; {remedy}. Tried:{details}")


def _remedy(name: str, driver: Version) -> str:
    command = install_command(name, driver)
    return command if name == "cuda" else f"run: {command}"


@functools.cache
def driver_version() -> Version:
    """The newest CUDA version that the installed driver supports, ``(major, minor)``; ``()`` without a driver."""
    try:
        return load_from("cuda", candidates("cuda"), ()).version
    except DeviceError:
        return ()


@functools.cache
def driver_release() -> str:
    """The installed driver's own version, such as ``580.159.04``; empty if NVML does not report it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return ""
    failed = nvml.nvmlSystemGetDriverVersion(text, len(text))
    nvml.nvmlShutdown()
    return "" if failed else text.value.decode()


@functools.cache
def load(name: str) -> Library:
    """Load ``"cuda"``, ``"cudart"``, ``"nvrtc"`` or ``"cublasLt"``; raises ``DeviceError`` with the remedy."""
    if name == "cuda":
        return load_from(name, candidates(name), ())
    return load_from(name, candidates(name), driver_version(), cupy_major())


def header_folders() -> Iterator[Path]:
    """Folders that may hold the CUDA headers, in order: NVIDIA's wheels, cuda-pathfinder's, ``CUDA_PATH``."""
    yield from _wheel_folders(_SPECS["cudart"], "include")
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory("cudart")
        if found:
            yield Path(found)
    except (ImportError, RuntimeError):
        pass
    for root in (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if root:
            yield Path(root) / "include"


def find_headers(folders: Iterable[Path] | None = None, major: int | None = None) -> Headers:
    """The folder with ``cuda_fp16.h``; one of the CUDA version ``major`` is preferred.

    Raises ``DeviceError`` with the folders searched and the command that installs the headers.
    """
    searched = list(dict.fromkeys(header_folders() if folders is None else folders))
    found = [Headers(f, _header_version(f)) for f in searched if (f / "cuda_fp16.h").is_file()]
    found.sort(key=lambda headers: headers.version[:1] != (major,))
    if found:
        return found[0]
    details = "".join(f"\n  {folder}" for folder in searched)
    command = install_command("headers", (major,) if major else driver_version())
    raise DeviceError(f"cuda_fp16.h was not found; run: {command}. Searched:{details}")


def other_headers(major: int, folders: Iterable[Path] | None = None) -> list[Headers]:
    """The headers among installed wheels that are of another CUDA version than ``major``.

    PyTorch for CUDA 13 brings such to ``cupy-cuda12x``.
    """
    searched = list(dict.fromkeys(_wheel_folders(_SPECS["cudart"], "include") if folders is None else folders))
    found = [Headers(f, _header_version(f)) for f in searched if (f / "cuda_runtime.h").is_file()]
    return [headers for headers in found if headers.version and headers.version[0] != major]


def _header_version(folder: Path) -> Version:
    try:
        content = (folder / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return ()
    number = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", content)
    return (int(number[1]) // 1000, int(number[1]) % 1000 // 10) if number else ()


def text(version: Version) -> str:
    """A version as text: ``(13, 1, 0)`` is ``13.1.0``, and ``()`` is ``unknown``."""
    return ".".join(map(str, version)) or "unknown"
