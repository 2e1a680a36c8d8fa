"""The layouts and the cublasLt operation of an exact int8 product, per GPU generation and shape.

A plan is ``acc = x @ w.T``: activation codes ``x`` int8 ``[rows, in]`` times a weight ``w`` int8 ``[out, in]``, summed
in int32. It describes buffers and operations and owns no memory, so every plan can be tested without a GPU. ``in``,
``out`` and ``rows`` are at least 1, and a plan pads them. The weight's padding is zeros, so an activation's padding may
hold anything.

``ROW_MAJOR`` and ``DP4A`` were checked bit for bit on an H200 (compute capability 9.0, cublasLt 13.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ...runtime.cublaslt import ComputeType, DataType, Order
from ..arrays import round_up
from .layouts import Layout


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
    """``D = op(A) op(B)``, where op transposes or does nothing; ``compute`` is the type of the sums."""

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
    """How a product is computed: on tensor cores in a tensor-core layout or row-major, or by dp4a."""

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
    """Row-major plans before those in tensor-core layouts: the gemv kernels read row-major weights only."""
    return tuple(sorted(kinds, key=[GemmKind.ROW_MAJOR, *(k for k in kinds if k is not GemmKind.ROW_MAJOR)].index))


_ROW_MULTIPLE = 16
"""Rows are padded to whole 16-byte vectors, which cublasLt's fast int8 kernels require."""


@dataclass(frozen=True)
class GemmLayouts:
    """The buffers of one plan for weights ``[out_features, in_features]``, all row-major.

    :class:`.tensor_core_plans.TensorCoreGemmLayouts` are those of the plans in tensor-core layouts.
    """

    kind: GemmKind
    out_features: int
    in_features: int

    @property
    def is_row_major(self) -> bool:
        """Whether codes and results are row-major; otherwise activations and results are in COL32."""
        return True

    @cached_property
    def padded(self) -> tuple[int, int]:
        """(out_features, in_features) as the weight is stored, the rest filled with zeros."""
        return round_up(self.out_features, _ROW_MULTIPLE), round_up(self.in_features, _ROW_MULTIPLE)

    @cached_property
    def weight(self) -> Layout:
        """The layout of the padded weight, int8."""
        return Layout.of(Order.ROW, *self.padded)

    def activation(self, rows: int) -> Layout:
        """The layout of activation codes int8 ``[rows, in_features]``; padding may hold anything."""
        return Layout(Order.ROW, rows, self.in_features, self.padded[1])

    def result(self, rows: int) -> Layout:
        """The layout of the sums int32 ``[rows, out_features]``; padding is zeros."""
        return Layout(Order.ROW, rows, self.out_features, self.padded[0], itemsize=4)

    def product(self, rows: int) -> MatmulProblem:
        """The cublasLt operation for ``rows`` activations. ``DP4A`` has that of ``ROW_MAJOR``."""
        out, inner = self.padded
        x, d = self.activation(rows), self.result(rows)
        return row_major_matmul(
            MatmulOperand(DataType.R_8I, Order.ROW, rows, inner, x.ld),
            MatmulOperand(DataType.R_8I, Order.ROW, out, inner, self.weight.ld),
            MatmulOperand(DataType.R_32I, Order.ROW, rows, out, d.ld),
            ComputeType.COMPUTE_32I,
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
    """``rows`` rounded up by at most a quarter or 15, so that similar sizes share an algorithm."""
    step = max(16, 1 << max(0, (rows - 1).bit_length() - 3))
    return round_up(rows, step)
