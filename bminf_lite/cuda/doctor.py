"""A report on a machine's GPUs and CUDA libraries, missing parts, and the commands that install them.

:func:`diagnose` calls :class:`Probes`, one function for each fact. A probe raises ``DeviceError`` where it finds
nothing, and the others still run. CuPy is imported only if the machine has a driver, a GPU and CuPy.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import DeviceError, NoDriverError
from .runtime import driver, libraries
from .runtime.driver import DeviceAttribute
from .runtime.libraries import Headers, Library, Version, install_command, text

SPEED_SIZE = 4096
"""Rows, outputs and inputs of the product on which the speed of a plan is measured."""

REQUIRED = {
    "nvrtc": "libnvrtc (compiles kernels)",
    "cublasLt": "libcublasLt (multiplies matrices)",
    "headers": "the CUDA headers (cuda_fp16.h)",
}
"""Requirements beside CuPy. The CUDA runtime is reported only: neither the driver nor CuPy needs it."""

Part = Library | Headers | DeviceError


@dataclass(frozen=True)
class Gpu:
    """One GPU; ``memory`` in bytes. ``peers`` are the other GPUs whose memory its kernels reach."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    memory: int
    peers: tuple[int, ...] = ()


@dataclass(frozen=True)
class GemmReport:
    """One way to multiply int8 matrices on the first GPU.

    ``problem`` says why it is not used: cublasLt refuses it here, or its results were wrong. ``tops`` is its speed in
    10^12 operations per second.
    """

    name: str
    preferred: bool
    problem: str | None
    tops: float | None


@dataclass(frozen=True)
class Problem:
    """Something missing or wrong, and the command or step that helps; ``details`` are lines of explanation."""

    what: str
    remedy: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Component:
    """A library or a folder of headers that was found."""

    name: str
    version: str
    path: str | None


@dataclass(frozen=True)
class Diagnosis:
    """Everything that :func:`diagnose` found."""

    driver: str | None
    driver_cuda: str | None
    gpus: tuple[Gpu, ...]
    cupy: str | None
    components: tuple[Component, ...]
    plans: tuple[GemmReport, ...]
    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...] = ()
    """What this package can do without, and other programs perhaps cannot."""

    @property
    def usable(self) -> bool:
        """Whether ``--device cuda`` works here."""
        return bool(self.gpus) and not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {"usable": self.usable, **asdict(self)}

    def text(self) -> str:
        """The report as text: one fact per line, then each problem with its remedy."""
        driver = "none" if self.driver_cuda is None else f"{self.driver or 'unknown'}, CUDA up to {self.driver_cuda}"
        lines = [_line("driver", driver)]
        lines += [_line(f"GPU {gpu.index}", _gpu_text(gpu)) for gpu in self.gpus]
        lines.append(_line("CuPy", self.cupy or "none"))
        lines += [_line(c.name, f"{c.version:<10}{c.path or 'found by the dynamic linker'}") for c in self.components]
        lines += [_line("" if i else "int8 plans", _plan_text(plan)) for i, plan in enumerate(self.plans)]
        lines += ["", "CUDA is ready." if self.usable else "CUDA cannot be used yet; the CPU can."]
        for problem in self.problems:
            lines += _problem_lines(problem)
        for note in self.notes:
            lines += _problem_lines(note)
        return "\n".join(lines)


def _problem_lines(problem: Problem) -> list[str]:
    return ["", problem.what, *(f"    {line}" for line in problem.details), f"  {problem.remedy}"]


def _line(name: str, value: str) -> str:
    return f"{name:<14}{value}"


def _gpu_text(gpu: Gpu) -> str:
    facts = f"{gpu.name}, compute capability {text(gpu.compute_capability)}, {gpu.memory / 2**30:.1f} GiB"
    return facts + (f", reaches the memory of {_numbered(gpu.peers)}" if gpu.peers else "")


def _numbered(gpus: Sequence[int]) -> str:
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(str, gpus))}"


def _plan_text(plan: GemmReport) -> str:
    state = plan.problem or f"exact, {plan.tops:.0f} TOPS"
    return f"{plan.name:<14}{state}{' (in use)' if plan.preferred else ''}"


def _find_gpus() -> list[Gpu]:
    count = driver.device_count()
    return [_describe(driver.load(), index, count) for index in range(count)]


def _describe(functions: Any, index: int, count: int) -> Gpu:
    # Without a context, which would take seconds and memory on each GPU.
    handle, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    functions.cuDeviceGet(handle, index)
    functions.cuDeviceGetName(name, len(name), handle)
    functions.cuDeviceTotalMem_v2(memory, handle)
    capability = []
    for attribute in (DeviceAttribute.COMPUTE_CAPABILITY_MAJOR, DeviceAttribute.COMPUTE_CAPABILITY_MINOR):
        value = ctypes.c_int()
        functions.cuDeviceGetAttribute(value, attribute, handle)
        capability.append(value.value)
    peers = tuple(other for other in range(count) if other != index and _reaches(functions, handle, other))
    return Gpu(index, name.value.decode(), (capability[0], capability[1]), memory.value, peers)


def _reaches(functions: Any, handle: ctypes.c_int, other: int) -> bool:
    """Whether kernels of a GPU may reach the memory of another."""
    found, peer = ctypes.c_int(), ctypes.c_int()
    functions.cuDeviceGet(peer, other)
    functions.cuDeviceCanAccessPeer(found, handle, peer)
    return bool(found.value)


def _measure_plans() -> list[GemmReport]:
    import cupy

    from .kernels.gemm.cublaslt_matmul import MatmulContext
    from .kernels.gemm.igemm import Int8Gemm
    from .kernels.gemm.plans import GemmKind
    from .runtime.driver import Device

    device = Device(0)
    int8_gemm = Int8Gemm(device, MatmulContext.open(device, cupy.cuda.alloc))
    reports = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the report repeats them
        for kind in GemmKind:
            problem = int8_gemm.check(kind)
            tops = None if problem else int8_gemm.speed(kind, SPEED_SIZE)
            reports.append(GemmReport(kind.value, kind is int8_gemm.kind, problem, tops))
    return reports


@dataclass(frozen=True)
class Probes:
    """The functions that find the facts; each raises ``DeviceError`` if it finds nothing.

    ``library(name)`` loads one of ``libraries.NAMES``, ``driver_release`` gives the driver's version (or ""), ``gpus``
    asks the driver, ``cupy`` gives the CuPy distributions with their versions, ``headers(major)`` finds headers,
    preferably of that CUDA version, ``other_headers(major)`` finds those of other versions among wheels, and ``plans``
    tries every plan on the first GPU.
    """

    library: Callable[[str], Library] = libraries.load
    driver_release: Callable[[], str] = libraries.driver_release
    gpus: Callable[[], list[Gpu]] = _find_gpus
    cupy: Callable[[], dict[str, str]] = libraries.find_cupy
    headers: Callable[[int | None], Headers] = lambda major: libraries.find_headers(major=major)
    other_headers: Callable[[int], list[Headers]] = libraries.other_headers
    plans: Callable[[], list[GemmReport]] = _measure_plans


def diagnose(probes: Probes | None = None) -> Diagnosis:
    """Report on this machine; loads libraries, and runs products on the first GPU if none is missing."""
    probes = probes or Probes()
    problems: list[Problem] = []
    libcuda = _library(probes, "cuda")
    no_driver = isinstance(libcuda, DeviceError)
    if no_driver:
        problems.append(Problem("There is no NVIDIA driver.", install_command("cuda")))
    gpus = [] if no_driver else _gpus(probes, problems)
    cuda = _version(libcuda)
    cupy = probes.cupy()
    parts: dict[str, Part] = {name: _library(probes, name) for name in libraries.NAMES if name != "cuda"}
    wanted = _wanted(cupy, parts, cuda)
    parts["headers"] = _headers(probes, _version(parts["nvrtc"]) or wanted)
    problems += [*_missing(cupy, parts, wanted), *_mismatched(cupy, parts, cuda)]
    plans = _plans(probes, problems, wanted) if gpus and not problems else []
    return Diagnosis(
        driver=None if no_driver else probes.driver_release() or None,
        driver_cuda=None if no_driver else text(cuda),
        gpus=tuple(gpus),
        cupy=", ".join(f"{name} {version}" for name, version in cupy.items()) or None,
        components=tuple(
            Component(name, text(part.version), str(part.path) if part.path else None)
            for name, part in parts.items()
            if not isinstance(part, DeviceError)
        ),
        plans=tuple(plans),
        problems=tuple(problems),
        notes=(*_apart(gpus), *_mixed_headers(probes, cupy)),
    )


def require_usable(index: int, probes: Probes | None = None) -> None:
    """Check that GPU ``index`` can be used, without running anything on it.

    Raises ``DeviceError`` with all missing parts and the commands that install them, on one line. Without a driver,
    nothing else is checked.
    """
    probes = replace(probes or Probes(), plans=list)
    if isinstance(_library(probes, "cuda"), DeviceError):
        raise NoDriverError(f"there is no NVIDIA driver; {install_command('cuda')}")
    report = diagnose(probes)
    if report.problems:
        raise DeviceError("; ".join(f"{problem.what.rstrip('.')}: {problem.remedy}" for problem in report.problems))
    if index >= len(report.gpus):
        raise DeviceError(f"there is no GPU {index}: the driver offers {len(report.gpus)}, numbered from 0")


def _version(part: Part) -> Version:
    return () if isinstance(part, DeviceError) else part.version


def _wanted(cupy: dict[str, str], parts: dict[str, Part], driver: Version) -> Version:
    """The CUDA version that everything should be of: CuPy's, without CuPy that of the libraries, or the driver's."""
    if major := libraries.major_of(cupy):
        return (major,)
    majors = {version[0] for name in ("nvrtc", "cublasLt") if (version := _version(parts[name]))}
    fits = len(majors) == 1 and (not driver or majors <= set(range(driver[0] + 1)))
    return (majors.pop(),) if fits and not cupy else driver


def _library(probes: Probes, name: str) -> Library | DeviceError:
    try:
        return probes.library(name)
    except DeviceError as error:
        return error


def _headers(probes: Probes, version: Version) -> Headers | DeviceError:
    try:
        return probes.headers(version[0] if version else None)
    except DeviceError as error:
        return error


def _gpus(probes: Probes, problems: list[Problem]) -> list[Gpu]:
    remedy = "see whether nvidia-smi lists a GPU; a container needs one passed in, as by docker run --gpus all"
    try:
        gpus = probes.gpus()
    except DeviceError as error:
        problems.append(Problem("The driver offers no GPU.", remedy, (str(error).splitlines()[0],)))
        return []
    if not gpus:
        problems.append(Problem("The driver offers no GPU.", remedy))
    return gpus


def _apart(gpus: Sequence[Gpu]) -> list[Problem]:
    """A note on GPUs that cannot exchange values directly; it says nothing of a single GPU."""
    every = {gpu.index for gpu in gpus}
    found = {gpu.index: sorted(every - {gpu.index, *gpu.peers}) for gpu in gpus}
    details = tuple(f"GPU {index} does not reach the memory of {_numbered(far)}" for index, far in found.items() if far)
    if not details:
        return []
    what = "A model that is divided among these GPUs adds through the host's memory, which is slow."
    return [Problem(what, "see nvidia-smi topo -p2p w for what the system allows, or use one GPU", details)]


def _missing(cupy: dict[str, str], parts: dict[str, Part], cuda: Version) -> list[Problem]:
    """Missing parts: one problem and one command for all of them if CuPy is missing, else one for each part.

    ``cuda`` is the version that they should be of.
    """
    missing = {name: part for name in REQUIRED if isinstance(part := parts[name], DeviceError)}
    if not cupy:
        names = ["CuPy", *(REQUIRED[name] for name in missing)]
        return [Problem(f"Not installed: {', '.join(names)}.", install_command("cupy", cuda))]
    return [
        Problem(f"Not usable: {REQUIRED[name]}.", install_command(name, cuda), tuple(str(error).splitlines()[1:]))
        for name, error in missing.items()
    ]


def _mismatched(cupy: dict[str, str], parts: dict[str, Part], cuda: Version) -> list[Problem]:
    """Parts whose versions do not fit the others."""
    problems = []
    remove = f"pip uninstall {' '.join(cupy)}, then {install_command('cupy', cuda)}"
    if len(cupy) > 1:
        problems.append(Problem(f"More than one CuPy is installed: {', '.join(cupy)}.", remove))
    for name in cupy if len(cupy) == 1 else ():
        major = libraries.CUPY_DISTRIBUTIONS[name]
        if major and cuda and major > cuda[0]:
            problems.append(Problem(f"{name} needs a newer driver: this one supports CUDA up to {text(cuda)}.", remove))
            continue
        for library in ("nvrtc", "cublasLt"):
            found = _version(parts[library])
            if major and found and found[0] != major:
                what = f"{REQUIRED[library]} is of CUDA {text(found)}, and {name} needs CUDA {major}."
                problems.append(Problem(what[0].upper() + what[1:], install_command(library, (major,))))
    nvrtc, headers = _version(parts["nvrtc"]), _version(parts["headers"])
    if nvrtc and headers and nvrtc[0] != headers[0]:
        what = f"The CUDA headers are of version {text(headers)}, and libnvrtc of {text(nvrtc)}."
        problems.append(Problem(what, install_command("headers", nvrtc)))
    return problems


def _mixed_headers(probes: Probes, cupy: dict[str, str]) -> list[Problem]:
    """A note on wheels of another CUDA version beside CuPy's: CuPy may compile its own kernels against their headers.

    The kernels of this package are compiled against headers of the compiler's version, but some models also need one of
    CuPy's.
    """
    major = libraries.major_of(cupy)
    others = probes.other_headers(major) if major else []
    if not others:
        return []
    versions = ", ".join(sorted({text(headers.version) for headers in others}))
    what = f"Headers of CUDA {versions}, which a PyTorch of that version brings, are beside {next(iter(cupy))}."
    effect = "CuPy may compile its own kernels against them, which fails, and some models need such a kernel."
    newest = max(headers.version for headers in others)
    remedy = f"pip uninstall {' '.join(cupy)}, then {install_command('cupy', newest)}"
    return [Problem(what, remedy, (effect, *(str(headers.path) for headers in others)))]


def _plans(probes: Probes, problems: list[Problem], cuda: Version) -> list[GemmReport]:
    remedy = f"pip install --upgrade 'bminf-lite[{libraries.extra(cuda)}]'"
    try:
        return probes.plans()
    except (DeviceError, ImportError) as error:
        problems.append(Problem("Products on the GPU fail.", remedy, tuple(str(error).splitlines())))
        return []
