"""cublasLt's functions on the fake GPU: descriptors as they were set, products by NumPy in the layouts they say."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bminf_lite.cuda.kernels.gemm.layouts import Layout
from bminf_lite.cuda.runtime import cublaslt
from bminf_lite.cuda.runtime.cublaslt import (
    ComputeType,
    DataType,
    LayoutAttribute,
    MatmulAttribute,
    Order,
    PreferenceAttribute,
    Status,
)

from .fake_library import FakeLibrary, set_number
from .machine import Machine
from .memory import FakeGpuError

DTYPES = {DataType.R_8I: np.int8, DataType.R_16F: np.float16, DataType.R_32F: np.float32, DataType.R_32I: np.int32}
WORKSPACE = 1 << 20


@dataclass
class Object:
    """A descriptor: its kind, and its attributes as bytes."""

    kind: str
    attributes: dict[int, bytes] = field(default_factory=dict)

    def number(self, attribute: int, default: int = 0) -> int:
        return int.from_bytes(self.attributes.get(attribute, default.to_bytes(8, "little")), "little", signed=True)


class FakeCublasLt:
    """Methods named and typed as in ``bminf_lite.cuda.runtime.cublaslt``."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.objects: dict[int, Object] = {}
        self.products = 0

    def library(self) -> FakeLibrary:
        """The functions as ``libcublasLt`` has them."""
        library = FakeLibrary(cublaslt._FUNCTIONS, self)
        library.cublasLtGetVersion = ctypes.CFUNCTYPE(ctypes.c_size_t)(lambda: 130100)  # type: ignore[attr-defined]
        describe = cublaslt._describe

        def describe_failure(status: int) -> str:
            library.raise_failure()
            return describe(status)

        cublaslt._describe = describe_failure
        return library

    def __getattr__(self, name: str) -> Any:
        for verb in ("Destroy", "Create", "SetAttribute", "GetAttribute"):
            if name.startswith("cublasLt") and name.endswith(verb):
                kind = name.removeprefix("cublasLt").removesuffix(verb)
                return lambda *arguments: getattr(self, f"_{verb}")(kind, *arguments)
        raise AttributeError(name)

    # -- descriptors ---------------------------------------------------------------------------------------------------

    def _Create(self, kind: str, handle: Any, *arguments: int) -> None:
        number = next(self.machine.numbers)
        created = self.objects[number] = Object(kind)
        names: dict[str, list[int]] = {
            "MatrixLayout": [LayoutAttribute.TYPE, LayoutAttribute.ROWS, LayoutAttribute.COLS, LayoutAttribute.LD],
            "MatmulDesc": [MatmulAttribute.COMPUTE_TYPE, MatmulAttribute.SCALE_TYPE],
        }
        for attribute, value in zip(names.get(kind, []), arguments, strict=True):
            created.attributes[attribute] = value.to_bytes(8, "little", signed=True)
        set_number(handle, number)

    def _Destroy(self, kind: str, handle: int) -> None:
        assert self.objects.pop(handle).kind == kind

    def _SetAttribute(self, kind: str, handle: int, attribute: int, content: int, nbytes: int) -> None:
        self._object(kind, handle).attributes[attribute] = ctypes.string_at(content, nbytes)

    def _GetAttribute(self, kind: str, handle: int, attribute: int, content: int, nbytes: int, written: Any) -> None:
        value = self._object(kind, handle).attributes[attribute][:nbytes]
        ctypes.memmove(content, value, len(value))
        set_number(written, len(value))

    def _object(self, kind: str, handle: int) -> Object:
        found = self.objects[handle]
        assert found.kind == kind, f"a {found.kind} where a {kind} belongs"
        return found

    # -- products ------------------------------------------------------------------------------------------------------

    def cublasLtMatmulAlgoGetHeuristic(
        self,
        handle: int,
        desc: int,
        a: int,
        b: int,
        c: int,
        d: int,
        preference: int,
        wanted: int,
        results: Any,
        count: Any,
    ) -> int:
        status = self._supported(desc, a, b, d)
        if status:
            return status
        alignment = self._object("MatmulPreference", preference).number(PreferenceAttribute.MIN_ALIGNMENT_A_BYTES)
        for i in range(min(2, wanted)):
            results[i].algorithm.data[0], results[i].algorithm.data[1] = i + 1, alignment
            results[i].workspace_bytes, results[i].state = WORKSPACE, Status.SUCCESS
        set_number(count, min(2, wanted))
        return Status.SUCCESS

    def cublasLtMatmulAlgoCheck(
        self, handle: int, desc: int, a: int, b: int, c: int, d: int, algorithm: Any, result: Any
    ) -> int:
        result.contents.workspace_bytes, result.contents.state = WORKSPACE, Status.SUCCESS
        return self._supported(desc, a, b, d)

    def _supported(self, desc: int, a: int, b: int, d: int) -> int:
        self._object("MatmulDesc", desc)
        orders = {self._object("MatrixLayout", x).number(LayoutAttribute.ORDER) for x in (a, b, d)}
        refused = self.machine.profile.capability >= (9, 0) and orders - {Order.COL, Order.ROW}
        return Status.NOT_SUPPORTED if refused else Status.SUCCESS

    def cublasLtMatrixTransform(self, *_: Any) -> int:
        return Status.NOT_SUPPORTED

    def cublasLtMatmul(
        self,
        handle: int,
        desc: int,
        alpha: int,
        a: int,
        a_layout: int,
        b: int,
        b_layout: int,
        beta: int,
        c: int,
        c_layout: int,
        d: int,
        d_layout: int,
        algorithm: Any,
        workspace: int,
        workspace_bytes: int,
        stream: int | None,
    ) -> int:
        assert (c, c_layout) == (d, d_layout) and workspace_bytes >= WORKSPACE
        self.machine.memory.check(workspace, workspace_bytes, "cublasLt: workspace")
        described = self._object("MatmulDesc", desc)
        compute = ComputeType(described.number(MatmulAttribute.COMPUTE_TYPE))
        number: Any = ctypes.c_int32 if compute is ComputeType.COMPUTE_32I else ctypes.c_float
        assert number.from_address(alpha).value == 1 and number.from_address(beta).value == 0
        layouts = [dict(self._object("MatrixLayout", x).attributes) for x in (a_layout, b_layout, d_layout)]
        matrices = [Matrix(self.machine, *pair) for pair in zip((a, b, d), layouts, strict=True)]
        transposed = [described.number(x) for x in (MatmulAttribute.TRANSA, MatmulAttribute.TRANSB)]
        for name, matrix in zip("abd", matrices, strict=True):
            matrix.check(name, algorithm.contents.data[1], self.machine.memory.check)
        self.products += 1
        self.machine.put(stream or 0, lambda: multiply(*matrices, *map(bool, transposed)))
        return Status.SUCCESS


class Matrix:
    """A matrix as cublasLt is told of it."""

    def __init__(self, machine: Machine, address: int, attributes: dict[int, bytes]) -> None:
        described = Object("MatrixLayout", attributes)
        self.machine, self.address = machine, address
        self.dtype = np.dtype(DTYPES[DataType(described.number(LayoutAttribute.TYPE))])
        self.order = Order(described.number(LayoutAttribute.ORDER))
        names = LayoutAttribute.ROWS, LayoutAttribute.COLS, LayoutAttribute.LD
        self.rows, self.cols, self.ld = (described.number(name) for name in names)
        self.batch = described.number(LayoutAttribute.BATCH_COUNT, 1)
        self.stride = described.number(LayoutAttribute.STRIDED_BATCH_OFFSET)

    @property
    def one(self) -> int:
        """Elements from a matrix's first to the end of its last."""
        if self.order is Order.COL:
            return (self.cols - 1) * self.ld + self.rows
        layout = Layout(self.order, self.rows, self.cols, self.ld)
        return layout.size if self.order is not Order.ROW else (self.rows - 1) * self.ld + self.cols

    @property
    def nbytes(self) -> int:
        return ((self.batch - 1) * self.stride + self.one) * self.dtype.itemsize

    def check(self, name: str, alignment: int, live: Any) -> None:
        if self.address % alignment:
            raise FakeGpuError(f"cublasLt: {name} at {self.address:#x} is not aligned to {alignment} bytes")
        if self.order is Order.COL and self.ld < self.rows:
            raise FakeGpuError(f"cublasLt: columns of {self.rows} elements lie {self.ld} apart")
        live(self.address, self.nbytes, f"cublasLt: {name}")

    def values(self, index: int) -> np.ndarray:
        """Matrix ``index``: a view where it is column-major, else a copy by its layout."""
        flat = self.flat(index)
        if self.order is Order.COL:
            size = self.dtype.itemsize
            return np.lib.stride_tricks.as_strided(flat, (self.rows, self.cols), (size, self.ld * size))
        return flat[self.offsets()]

    def flat(self, index: int) -> np.ndarray:
        self.machine.check(self.address, self.nbytes, "cublasLt")
        raw = self.machine.memory.raw(self.address, self.nbytes).view(self.dtype)
        return raw[index * self.stride :]

    def offsets(self) -> np.ndarray:
        layout = Layout(self.order, self.rows, self.cols, self.ld)
        return np.asarray(layout.offset(np.arange(self.rows)[:, None], np.arange(self.cols)))


def multiply(a: Matrix, b: Matrix, d: Matrix, transpose_a: bool, transpose_b: bool) -> None:
    """``d = op(a) op(b)``, exactly for integers and in fp32 for the rest."""
    wide = np.float64 if a.dtype == np.int8 else np.float32
    for i in range(d.batch):
        left, right = (x.values(i if x.batch > 1 else 0).astype(wide) for x in (a, b))
        left, right = left.T if transpose_a else left, right.T if transpose_b else right
        with np.errstate(all="ignore"):
            product = left @ right
        if product.shape != (d.rows, d.cols):
            raise FakeGpuError(f"cublasLt: a product {product.shape} into {d.rows} x {d.cols}")
        if d.order is Order.COL:
            d.values(i)[...] = product
        else:
            d.flat(i)[d.offsets()] = product
