"""A GPU made of NumPy, to run the package's GPU code where there is no GPU.

``install`` puts a CuPy, a CUDA driver and a cublasLt in place whose memory is host memory. The package's own Python
then runs as it is, down to the bytes of a launch. Every launch is checked against the limits of the GPU and the memory
that is in use: freed blocks are filled with NaNs, and a pointer
into one is an error at the launch. Models in NumPy compute what the kernels would (``models_*.py``).

The models tell nothing about the kernels themselves. Products of one row and kernels over rows can run their own PTX
instead (``ptx.py``), slowly, and are checked for races (``races.py``). Neither tells anything about time, or about work
on several streams at once: work runs when it is put on a stream, or when the graph that recorded it is launched.

``pytest --fake-gpu=h200 -m gpu tests/models`` runs tests that need a GPU on it, with ``--fake-gpu-ptx`` by the kernels'
own code where it can. ``--fake-gpu=h200:2`` has two SMs, whose blocks have more to do; ``h200*2`` are two GPUs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bminf_lite.cuda import doctor
from bminf_lite.cuda.runtime import compiler, driver, libraries, tensor_maps
from bminf_lite.cuda.runtime.compiler import Cubin, Sources
from bminf_lite.cuda.runtime.declarations import kernel_name
from bminf_lite.cuda.runtime.libraries import Library

from . import (  # noqa: F401 - models and instructions register themselves
    fake_cupy,
    models_adapters,
    models_attention,
    models_calibration,
    models_collective,
    models_expert_adapters,
    models_experts,
    models_float,
    models_latent,
    models_recurrent,
    models_rows,
    models_sampling,
    ptx_hopper,
)
from .fake_cublaslt import FakeCublasLt
from .fake_driver import FakeDriver
from .launching import template_arguments
from .machine import PROFILES, Machine, Requested
from .memory import FakeGpuError

__all__ = ["PROFILES", "FakeGpuError", "Machine", "install", "report"]


def install(profile: str, runs_ptx: bool = False) -> Machine:
    """Put a fake GPU in place for the rest of this process, before anything has imported CuPy."""
    if any(name == "cupy" or name.startswith("cupy.") for name in sys.modules):
        raise RuntimeError("CuPy is imported already: a fake GPU needs a process of its own")
    profile, _, gpus = profile.partition("*")
    name, _, sms = profile.partition(":")
    described = replace(PROFILES[name], multiprocessors=int(sms)) if sms else PROFILES[name]
    machine = Machine.current = Machine(described, runs_ptx=runs_ptx, devices=int(gpus or 1))
    machine.memory.watch_arenas()
    sys.modules.update(fake_cupy.modules(machine))
    real = libraries.load
    fakes = {"cuda": FakeDriver(machine).library(), "cublasLt": FakeCublasLt(machine).library()}

    def load(name: str) -> Library:
        return Library(name, None, (13, 1), fakes[name]) if name in fakes else real(name)  # type: ignore[arg-type]

    libraries.load = load  # type: ignore[assignment]
    driver.load.cache_clear()
    tensor_maps.functions.cache_clear()
    doctor.require_usable = lambda index: None  # type: ignore[assignment]  # what is installed here does not matter
    _record_compilations(machine)
    return machine


def _record_compilations(machine: Machine) -> None:
    """Nothing is compiled: an image says what it would hold."""

    def compile(
        source_name: str, arch: str, name_expressions: Sequence[str], defines: Sequence[str] = (),
        *, sources: Sources, cache: Path | None = None,
    ) -> Cubin:  # fmt: skip
        known = sources.declarations(source_name)
        for expression in name_expressions:
            name = kernel_name(expression)
            if name not in known or len(template_arguments(expression)) != len(known[name].template):
                raise FakeGpuError(f"{source_name} has no {expression}")
            machine.requested.setdefault((source_name, expression, tuple(defines)), Requested(arch))
        return Cubin("|".join([source_name, *defines]).encode() + b"\0", {e: e for e in name_expressions}, {})

    compiler.compile = compile  # type: ignore[assignment]


def report(machine: Machine) -> str:
    """As JSON: bytes of memory that are ``left`` taken, and what was ``requested``: source, expression, macros and the
    fields of :class:`Requested`, and which functions used ``kernels_of_cupy``.
    """
    requested = [[*key, asdict(value)] for key, value in machine.requested.items()]
    of_cupy = sorted(machine.kernels_of_cupy)
    return json.dumps({"left": machine.memory.taken, "requested": requested, "kernels_of_cupy": of_cupy})
