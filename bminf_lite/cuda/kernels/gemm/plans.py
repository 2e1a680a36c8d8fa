"""Which layouts and which cublasLt operation compute an exact int8 product, per GPU generation and shape.

A plan is ``acc = x @ w.T``: activation codes ``x`` int8 ``[rows, in]`` times a weight ``w`` int8 ``[out, in]``, summed
in int32. It describes buffers and operations and owns nothing, so every plan can be tested on a machine without a GPU.
Padding is the plan's business: ``in``, ``out`` and ``rows`` may be any number from 1 on. The weight's padding is zeros,
so that an activation's padding may hold anything.

What ran where: ``ROW_MAJOR`` and ``DP4A`` were checked bit for bit on an H200 (compute capability 9.0, cublasLt 13.1).
cublasLt refuses products in COL32 there, so the products of ``COL4_4R2_8C`` and ``COL32_2R_4R4`` have not been executed
by this project. Their layouts equal what ``cublasLtMatrixTransform`` writes on that GPU, byte by byte, a NumPy model
executes their descriptors in the tests, and on a GPU that they are meant for they are checked before they are trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ...runtime.cublaslt import ComputeType, DataType, Order
from ..arrays import round_up
from .layouts import GROUP, Layout


@dataclass(frozen=True)
class MatmulOperand:
    """One matrix of a product as cublasLt sees it; ``batch`` matrices lie ``stride`` elements apart."""

    dtype: DataType
    order: Order
    rows: int
    cols: int
    ld: int
    batch: int = 1
    stride: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        distinct = self.batch if self.stride else 1
        return distinct * self.rows * self.cols * self.dtype.itemsize

    def __str__(self) -> str:
        batch = f"{self.batch} of " if self.batch > 1 else ""
        return f"{batch}{self.rows} x {self.cols} {self.dtype.name[2:]} {self.order.name}"


@dataclass(frozen=True)
class MatmulProblem:
    """``D = op(A) op(B)``, where op transposes or does nothing; ``compute`` is what is summed in."""

    a: MatmulOperand
    b: MatmulOperand
    d: MatmulOperand
    transpose_a: bool
    transpose_b: bool
    compute: ComputeType

    def __str__(self) -> str:
        a, b = (f"{m}{' transposed' * t}" for m, t in ((self.a, self.transpose_a), (self.b, self.transpose_b)))
        return f"({a}) by ({b}) into {self.d.dtype.name[2:]} {self.d.order.name}"

    @property
    def nbytes(self) -> int:
        """Bytes that the product must read and write."""
        return self.a.nbytes + self.b.nbytes + self.d.nbytes

    @property
    def scale_type(self) -> DataType:
        """The type of alpha and beta."""
        return DataType.R_32I if self.compute is ComputeType.COMPUTE_32I else DataType.R_32F


def row_major_matmul(
    x: MatmulOperand,
    w: MatmulOperand,
    d: MatmulOperand,
    compute: ComputeType,
    transpose_x: bool = False,
    transpose_w: bool = True,
) -> MatmulProblem:
    """``d = x @ w.T`` over row-major matrices, or without the transposition of ``w``, or with one of ``x``.

    cublasLt computes it as the column-major product of the same bytes, ``d.T = w @ x.T``: the weight comes first. For
    int8 that is also the only order of operands with fast kernels ("TN").
    """
    a, b, out = (MatmulOperand(m.dtype, Order.COL, m.cols, m.rows, m.ld, m.batch, m.stride) for m in (w, x, d))
    return MatmulProblem(a, b, out, transpose_w, transpose_x, compute)


class GemmKind(str, Enum):
    """How a product is computed: on tensor cores in a layout of theirs, on tensor cores from plain rows, or by dp4a."""

    COL4_4R2_8C = "col4_4r2_8c"
    COL32_2R_4R4 = "col32_2r_4r4"
    ROW_MAJOR = "plain"
    DP4A = "dp4a"


def kinds_for(capability: tuple[int, int]) -> tuple[GemmKind, ...]:
    """The plans to try on a GPU of that compute capability, the best first; the last one works everywhere."""
    if capability < (7, 5):
        return (GemmKind.DP4A,)
    if capability < (8, 0):
        return GemmKind.COL4_4R2_8C, GemmKind.ROW_MAJOR, GemmKind.DP4A
    if capability < (9, 0):
        return GemmKind.COL32_2R_4R4, GemmKind.ROW_MAJOR, GemmKind.DP4A
    return GemmKind.ROW_MAJOR, GemmKind.DP4A


def row_major_first(kinds: Sequence[GemmKind]) -> tuple[GemmKind, ...]:
    """Plans over plain rows before those in tensor-core layouts: the matrix-vector kernels read plain rows only."""
    return tuple(sorted(kinds, key=[GemmKind.ROW_MAJOR, *(k for k in kinds if k is not GemmKind.ROW_MAJOR)].index))


_WEIGHT_ORDER = {GemmKind.COL4_4R2_8C: Order.COL4_4R2_8C, GemmKind.COL32_2R_4R4: Order.COL32_2R_4R4}
_ROW_MAJOR_MULTIPLE = 16
"""Plain rows are padded to whole 16-byte vectors; cublasLt's fast int8 kernels want no less."""


@dataclass(frozen=True)
class GemmLayouts:
    """The buffers of one plan for weights ``[out_features, in_features]``."""

    kind: GemmKind
    out_features: int
    in_features: int

    @cached_property
    def is_row_major(self) -> bool:
        """Whether codes and results are row-major; otherwise activations and results are in COL32."""
        return self.kind not in _WEIGHT_ORDER

    @cached_property
    def padded(self) -> tuple[int, int]:
        """(out_features, in_features) as the weight is stored, the rest filled with zeros."""
        multiple = _ROW_MAJOR_MULTIPLE if self.is_row_major else GROUP
        return round_up(self.out_features, multiple), round_up(self.in_features, multiple)

    @cached_property
    def weight(self) -> Layout:
        """Of the padded weight, int8."""
        return Layout.of(_WEIGHT_ORDER.get(self.kind, Order.ROW), *self.padded)

    def activation(self, rows: int) -> Layout:
        """Of activation codes int8 ``[rows, in_features]``; only those need be written, padding may hold anything."""
        if self.is_row_major:
            return Layout(Order.ROW, rows, self.in_features, self.padded[1])
        return Layout.of(Order.COL32, rows, self.in_features)

    def result(self, rows: int) -> Layout:
        """Of the sums int32 ``[rows, out_features]``; padding is zeros."""
        if self.is_row_major:
            return Layout(Order.ROW, rows, self.out_features, self.padded[0], itemsize=4)
        return Layout.of(Order.COL32, rows, self.out_features, itemsize=4)

    def product(self, rows: int) -> MatmulProblem:
        """The cublasLt operation for ``rows`` activations. ``DP4A`` has that of ``ROW_MAJOR``."""
        out, inner = self.padded
        x, d = self.activation(rows), self.result(rows)
        if self.is_row_major:
            return row_major_matmul(
                MatmulOperand(DataType.R_8I, Order.ROW, rows, inner, x.ld),
                MatmulOperand(DataType.R_8I, Order.ROW, out, inner, self.weight.ld),
                MatmulOperand(DataType.R_32I, Order.ROW, rows, out, d.ld),
                ComputeType.COMPUTE_32I,
            )
        return MatmulProblem(
            MatmulOperand(DataType.R_8I, Order.COL32, rows, inner, x.ld),
            MatmulOperand(DataType.R_8I, self.weight.order, out, inner, self.weight.ld),
            MatmulOperand(DataType.R_32I, Order.COL32, rows, out, d.ld),
            transpose_a=False,
            transpose_b=True,
            compute=ComputeType.COMPUTE_32I,
        )

    def batched(self, rows: int, count: int, w_stride: int, x_stride: int) -> MatmulProblem:
        """``count`` plain products at once; strides count elements, and 0 repeats an operand."""
        single, d_stride = self.product(rows), rows * self.padded[0]
        return replace(
            single,
            a=replace(single.a, batch=count, stride=w_stride),
            b=replace(single.b, batch=count, stride=x_stride),
            d=replace(single.d, batch=count, stride=d_stride),
        )


def bucket(rows: int) -> int:
    """``rows`` rounded up by a quarter or 15 at most, so that nearby sizes share the choice of an algorithm."""
    step = max(16, 1 << max(0, (rows - 1).bit_length() - 3))
    return round_up(rows, step)
