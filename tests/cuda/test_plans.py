"""Plans: computed here in NumPy from the very bytes and descriptors that cublasLt would get, each gives ``x @ w.T``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.cuda.kernels.gemm.layouts import Layout
from bminf_lite.cuda.kernels.gemm.plans import (
    GemmKind,
    GemmLayouts,
    MatmulOperand,
    MatmulProblem,
    bucket,
    kinds_for,
    row_major_matmul,
)
from bminf_lite.cuda.kernels.gemm.tensor_core_plans import gemm_layouts
from bminf_lite.cuda.runtime.cublaslt import ComputeType, DataType, Order

DTYPES = {DataType.R_8I: np.int8, DataType.R_32I: np.int32, DataType.R_32F: np.float32}
SIZES = st.one_of(st.sampled_from([1, 2, 31, 32, 33, 64]), st.integers(1, 80))


def offsets(matrix: MatmulOperand) -> np.ndarray:
    """The offset of every element [batch, rows, cols] of a matrix as cublasLt is told of it."""
    row, col = np.arange(matrix.rows)[:, None], np.arange(matrix.cols)
    if matrix.order is Order.COL:
        inside = col * matrix.ld + row
    else:
        inside = Layout(matrix.order, matrix.rows, matrix.cols, matrix.ld).offset(row, col)
    return np.arange(matrix.batch)[:, None, None] * matrix.stride + inside


def execute(product: MatmulProblem, a: np.ndarray, b: np.ndarray, d: np.ndarray) -> None:
    """What cublasLt does, on flat buffers, with a copy of its rules on shapes."""
    left, right = a[offsets(product.a)].astype(np.int64), b[offsets(product.b)].astype(np.int64)
    left = left.swapaxes(-1, -2) if product.transpose_a else left
    right = right.swapaxes(-1, -2) if product.transpose_b else right
    assert left.shape[-1] == right.shape[-2]
    assert (left.shape[-2], right.shape[-1]) == (product.d.rows, product.d.cols)
    d[offsets(product.d)] = left @ right


@given(st.sampled_from(list(GemmKind)), SIZES, SIZES, SIZES)
def test_every_plan_computes_the_product_whatever_lies_in_the_padding(kind, rows, out, inner):
    shapes = gemm_layouts(kind, out, inner)
    random = np.random.default_rng(rows + out + inner)
    x = random.integers(-128, 128, (rows, inner)).astype(np.int8)
    codes = random.integers(-128, 128, (out, inner)).astype(np.int8)

    padded = np.zeros(shapes.padded, np.int8)
    padded[:out, :inner] = codes
    w = shapes.weight.pack(padded)
    activation, result = shapes.activation(rows), shapes.result(rows)
    buffer = random.integers(-128, 128, activation.size).astype(np.int8)
    buffer[activation.offset(np.arange(rows)[:, None], np.arange(inner)).ravel()] = x.ravel()
    acc = np.full(result.size, -1, np.int32)

    product = shapes.product(rows)
    execute(product, *((w, buffer) if shapes.is_row_major else (buffer, w)), acc)
    assert np.array_equal(result.unpack(acc), x.astype(np.int64) @ codes.T.astype(np.int64))
    assert result.nbytes == acc.nbytes and activation.nbytes == buffer.nbytes
    assert product.compute is ComputeType.COMPUTE_32I and product.scale_type is DataType.R_32I


@given(SIZES, SIZES, SIZES, st.booleans(), st.booleans())
def test_row_major_products_with_every_transposition(m, n, k, transpose_x, transpose_w):
    random = np.random.default_rng(m * n + k)
    x = random.integers(-128, 128, (k, m) if transpose_x else (m, k))
    w = random.integers(-128, 128, (n, k) if transpose_w else (k, n))
    matrices = [MatmulOperand(DataType.R_8I, Order.ROW, *shape, shape[1]) for shape in (x.shape, w.shape, (m, n))]
    product = row_major_matmul(*matrices, ComputeType.COMPUTE_32I, transpose_x, transpose_w)
    d = np.zeros(m * n, np.int64)
    execute(product, w.ravel(), x.ravel(), d)
    assert np.array_equal(d.reshape(m, n), (x.T if transpose_x else x) @ (w.T if transpose_w else w))


def test_batched_products_repeat_an_operand_with_stride_0():
    shapes, random = GemmLayouts(GemmKind.ROW_MAJOR, 16, 32), np.random.default_rng(0)
    x, w = random.integers(-128, 128, (3, 5, 32)), random.integers(-128, 128, (1, 16, 32))
    acc = np.zeros(3 * 5 * 16, np.int64)
    execute(shapes.batched(5, 3, w_stride=0, x_stride=5 * 32), w.ravel(), x.ravel(), acc)
    assert np.array_equal(acc.reshape(3, 5, 16), x @ w.swapaxes(-1, -2))


@pytest.mark.parametrize(
    ("capability", "first"),
    [
        ((7, 0), GemmKind.DP4A),
        ((7, 5), GemmKind.COL4_4R2_8C),
        ((8, 9), GemmKind.COL32_2R_4R4),
        ((9, 0), GemmKind.ROW_MAJOR),
        ((12, 0), GemmKind.ROW_MAJOR),
    ],
)
def test_the_table_of_plans(capability, first):
    kinds = kinds_for(capability)
    assert kinds[0] is first
    assert kinds[-1] is GemmKind.DP4A, "what works everywhere comes last"
    assert any(gemm_layouts(kind, 1, 1).is_row_major for kind in kinds)


@given(st.integers(1, 1 << 20))
def test_a_bucket_holds_its_rows_and_is_not_much_larger(rows):
    assert rows <= bucket(rows) <= max(rows + 15, rows * 1.25)
    assert bucket(bucket(rows)) == bucket(rows)
