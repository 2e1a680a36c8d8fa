"""Kernels on the fake GPU: their arguments are checked, then NumPy computes on the fake memory.

A model says what a kernel reads and writes, padding that it touches included, and how many blocks and bytes of shared
memory that takes. The arguments of a kernel without a model are checked, and running it skips the test.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from bminf_lite.cuda.kernels.sources import SOURCES
from bminf_lite.cuda.runtime.declarations import Declaration, kernel_name, struct_format
from bminf_lite.cuda.runtime.tensor_maps import TensorMapDataType

from . import ptx
from .machine import TENSOR_MAP, Launch, Machine
from .memory import FakeGpuError
from .races import words

INTERPRETED = {
    "gemv/gemv.cu", "rowwise/rows.cu", "rowwise/pointwise.cu", "rowwise/layer_norm_many_rows.cu",
    "rowwise/norm_unaligned.cu", "rowwise/quantize.cu", "rowwise/short_convolution.cu", "recurrent/delta_net.cu",
    "recurrent/mamba2.cu", "rowwise/adapters.cu", "experts/router.cu", "experts/pairs.cu", "experts/few_tokens.cu",
    "experts/grouped_gemm.cu", "experts/grouped_gemm_hopper.cu", "experts/float_products.cu", "experts/fetch.cu",
    "attention/latent.cu", "attention/latent_rows.cu", "attention/head_products.cu", "attention/decode.cu",
    "attention/prepare_heads.cu", "attention/prefill.cu", "attention/latent_few.cu", "attention/prefill_merge.cu",
    "attention/latent_hopper.cu", "rowwise/layer_inputs.cu", "attention/head_products_hopper.cu",
    "attention/latent_queries.cu", "attention/latent_values.cu", "experts/adapters.cu", "collective/divided_rows.cu",
    "recurrent/delta_token.cu", "recurrent/mamba2_token.cu", "rowwise/pooling.cu", "rowwise/softmax.cu",
    "attention/packed_hopper.cu",
}  # fmt: skip
"""Sources with the instructions that ``ptx.py`` knows. Their own code runs here, but for launches with clusters."""
CLUSTERS = {
    "attention/latent_few.cu", "attention/latent_hopper.cu", "recurrent/delta_token.cu", "recurrent/mamba2_token.cu",
    "rowwise/adapters.cu",
}  # fmt: skip
"""Of these, sources whose blocks wait for others of a cluster by no mbarriers, so that their own code runs here too."""
RELEASING = {"shrink_rows", "shrink_rows_and_quantize"}
"""Kernels that add to the counter ``ready`` behind their wait."""
Model = Callable[["Call"], None]
MODELS: dict[str, Model] = {}


def template_arguments(expression: str) -> tuple[str, ...]:
    """``"bminf::k<1, 2>"`` -> ``("1", "2")``."""
    arguments = expression.partition("<")[2].rstrip(">")
    return tuple(a.strip() for a in arguments.split(",") if a.strip())


def unpack(declaration: Declaration, parameters: bytes) -> dict[str, Any]:
    """A launch's parameters by name."""
    values = struct.unpack(struct_format(declaration.signature), parameters)
    return dict(zip((p.name for p in declaration.parameters), values, strict=True))


def model(function: Model) -> Model:
    """Registers a model under the kernel's name, which is its own."""
    MODELS[function.__name__] = function
    return function


@dataclass
class Call:
    """A launch with its template's arguments and its parameters by name."""

    machine: Machine
    launch: Launch
    declaration: Declaration
    template: dict[str, str]
    arguments: dict[str, Any]
    taken: list[tuple[int, np.ndarray, bytes]] = field(default_factory=list)
    """Memory that the model has taken, by address, and what was in it; noted where kernels run their own code."""

    def __getattr__(self, name: str) -> Any:
        arguments = self.__dict__["arguments"]
        if name not in arguments:
            raise AttributeError(name)
        return arguments[name]

    def number(self, name: str) -> int:
        """An argument of the template."""
        return int(self.template[name])

    @property
    def defines(self) -> dict[str, int]:
        pairs = (define.split("=") for define in self.launch.kernel.defines)
        return {name: int(value) for name, value in pairs}

    @property
    def threads(self) -> int:
        """All threads along the grid's first dimension."""
        return self.launch.grid[0] * self.launch.block

    def require(self, condition: bool, what: str) -> None:
        if not condition:
            raise FakeGpuError(f"{self.launch.kernel.expression}: {what}; {self.arguments}, {self.launch.grid}")

    def vector(self, name: str, count: int, dtype: Any, align: int = 0, offset: int = 0) -> np.ndarray:
        """``count`` elements from a pointer on; ``align`` is what its vector accesses need, in bytes."""
        return self.rows(name, 1, count, count, dtype, align, offset)[0]

    def rows(
        self, name: str, rows: int, pitch: int, columns: int, dtype: Any, align: int = 16, offset: int = 0
    ) -> np.ndarray:
        """``[rows, columns]`` of a matrix with rows of ``pitch`` elements from a pointer on."""
        itemsize, (rows, pitch, columns, offset) = np.dtype(dtype).itemsize, map(int, (rows, pitch, columns, offset))
        address = self.arguments[name] + offset
        self.require(address != 0, f"{name} is null")
        self.require(not align or address % align == 0, f"{name} = {address:#x} is not aligned to {align} bytes")
        even = rows < 2 or not align or pitch * itemsize % align == 0
        self.require(even, f"{name}'s rows of {pitch} are not aligned")
        self.require(rows < 2 or pitch >= columns, f"{name}'s rows of {pitch} elements hold fewer than {columns}")
        extent = ((rows - 1) * pitch + columns) * itemsize
        if rows == 0 or columns == 0:
            return np.empty((rows, columns), dtype)
        self.machine.check(address, extent, f"{self.launch.kernel.expression}: {name}")
        raw = self.machine.memory.raw(address, extent)
        if self.machine.runs_ptx:
            self.taken.append((address, raw, raw.tobytes()))
        return np.lib.stride_tricks.as_strided(raw.view(dtype), (rows, columns), (pitch * itemsize, itemsize))

    def written(self) -> list[np.ndarray]:
        """The words of memory that the model has changed."""
        changed = ((at, np.flatnonzero(raw != np.frombuffer(old, np.uint8))) for at, raw, old in self.taken)
        return [words(address + bytes_, 1).ravel() for address, bytes_ in changed]

    def mapped(self, name: str, *box: int) -> np.ndarray:
        """What a tensor map describes, the innermost dimension last; ``box``: the sizes of its boxes but the last."""
        described = self.arguments[name][: struct.calcsize(TENSOR_MAP)]
        address, element, rank, *numbers = struct.unpack(TENSOR_MAP, described)
        sizes, pitches, boxes = numbers[:rank], numbers[5 : 4 + rank], numbers[9 : 9 + rank]
        self.require(tuple(boxes[:0:-1]) == box, f"{name} has boxes of {boxes[::-1]}")
        dtype = np.dtype(
            {
                TensorMapDataType.INT8: np.int8,
                TensorMapDataType.FLOAT16: np.float16,
                TensorMapDataType.FLOAT32: np.float32,
            }[TensorMapDataType(element)]
        )
        strides = (*pitches[::-1], dtype.itemsize)
        extent = sum((size - 1) * stride for size, stride in zip(sizes[::-1], strides, strict=True)) + dtype.itemsize
        self.arguments[f"{name}'s address"] = address
        flat = self.vector(f"{name}'s address", extent // dtype.itemsize, dtype, 16)
        return np.lib.stride_tricks.as_strided(flat, sizes[::-1], strides)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A dense array from a pointer on."""
        return self.vector(name, int(np.prod(shape)), dtype, 16).reshape(shape)


def call_of(machine: Machine, launch: Launch) -> Call:
    """A launch in words of the kernel's declaration."""
    name, template = kernel_name(launch.kernel.expression), template_arguments(launch.kernel.expression)
    known = SOURCES.declarations(launch.kernel.source)
    if name not in known:
        raise FakeGpuError(f"{launch.kernel.source} has no kernel {name}")
    declaration = known[name]
    if len(template) != len(declaration.template):
        raise FakeGpuError(f"{launch.kernel.expression} has not as many arguments as template <{declaration.template}>")
    try:
        arguments = unpack(declaration, launch.parameters)
    except struct.error as error:
        raise FakeGpuError(f"{launch.kernel.expression} takes {declaration.signature}: {error}") from error
    values = (str(int(t == "true")) if t in ("true", "false") else t for t in template)
    return Call(machine, launch, declaration, dict(zip(declaration.template, values, strict=True)), arguments)


def check(machine: Machine, launch: Launch) -> None:
    """When a launch is asked for: every pointer is 0 or lies in memory that is in use."""
    call = call_of(machine, launch)
    for parameter in call.declaration.parameters:
        if parameter.letter == "p" and call.arguments[parameter.name]:
            what = f"{launch.kernel.expression}: {parameter.name}"
            machine.memory.check(call.arguments[parameter.name], 1, what)
    known = machine.requested[launch.kernel.source, launch.kernel.expression, launch.kernel.defines]
    known.launches += 1
    known.threads, known.shared = max(known.threads, launch.block), max(known.shared, launch.shared)


def run(machine: Machine, launch: Launch) -> None:
    """When its turn comes."""
    call = call_of(machine, launch)
    if (
        machine.runs_ptx
        and launch.kernel.source in INTERPRETED
        and ((launch.cluster or 1) == 1 or launch.kernel.source in CLUSTERS)
    ):
        run_ptx(machine, launch)
        return
    if call.declaration.name not in MODELS:
        pytest.skip(f"the fake GPU does not compute {call.declaration.name}")
    machine.order.start(launch.dependent)
    with np.errstate(all="ignore"):
        MODELS[call.declaration.name](call)
    early = starts_next_early(launch.kernel.source, call.declaration.name, call.arguments)
    machine.order.end(call.written(), early, call.declaration.name in RELEASING and call.ready != 0)


def kernel_bodies(text: str) -> dict[str, str]:
    """The body of each kernel of a source."""
    bounds, kernel = r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)", r"__global__ void\s+(\w+)\(.*?{\n(.*?)\n}\n"
    return dict(re.findall(kernel, re.sub(bounds, "", text), re.DOTALL))


@functools.cache
def dependency_calls(source: str, name: str) -> list[tuple[str, str]]:
    """Where a kernel lets its successor start and where it waits, in order: (the argument that decides or "", what)."""
    call = r"(?:if \((\w+)\) )?(launch|wait_on)_dependent_grids\(\);"
    return re.findall(call, kernel_bodies(SOURCES.source(source))[name])


def starts_next_early(source: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a launch lets its successor start before it waits itself: whether its source does so in this order."""
    calls = (what for decides, what in dependency_calls(source, name) if not decides or arguments[decides])
    return next(calls, "") == "launch"


def run_ptx(machine: Machine, launch: Launch) -> None:
    """The kernel's own code for the GPU's architecture. The first and the last bytes of each access must be in use."""
    kernel, (major, minor) = launch.kernel, machine.profile.capability
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def check(addresses: np.ndarray, nbytes: int) -> None:
        for address in {int(addresses.min()), int(addresses.max())}:
            machine.check(address, nbytes, kernel.expression)

    code = ptx.program(kernel.source, arch, kernel.expression, kernel.defines)
    pending = machine.order.start(launch.dependent)
    grid = ptx.Grid(
        code, launch.grid, launch.block, launch.parameters, launch.shared, check, pending, launch.cluster or 1,
        machine.order.behind_counter,
    )  # fmt: skip
    grid.run()
    if launch.dependent and not grid.waited.any():
        raise FakeGpuError(f"{kernel.expression} could end before the kernels before it, as it does not wait for them")
    machine.order.end(grid.written, grid.early, grid.released)
