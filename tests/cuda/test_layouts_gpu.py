"""The NumPy models of cublasLt's layouts against ``cublasLtMatrixTransform``, byte by byte."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from bminf_lite.cuda.kernels.gemm.layouts import Layout
from bminf_lite.cuda.runtime.cublaslt import DataType, LayoutAttribute, MatrixLayout, Order, TransformDesc

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy is not installed")

SHAPES = [(1, 1), (1, 33), (2, 33), (7, 31), (8, 32), (31, 33), (32, 32), (33, 64), (65, 97), (100, 130), (257, 511)]
TENSOR_CORE_ORDERS = [Order.COL32, Order.COL4_4R2_8C, Order.COL32_2R_4R4]


def descriptor(lt, layout: Layout, dtype: DataType, batch: int) -> MatrixLayout:
    made = MatrixLayout(lt, dtype, layout.order, layout.rows, layout.cols, layout.ld)
    made[LayoutAttribute.BATCH_COUNT] = batch
    made[LayoutAttribute.STRIDED_BATCH_OFFSET] = layout.size
    return made


def transform(lt, source: cp.ndarray, source_layout: Layout, target_layout: Layout, dtype: DataType) -> cp.ndarray:
    """Change the order of a batch of matrices with cublasLt; what it does not write stays 85."""
    batch = len(source)
    target = cp.full((batch, target_layout.size), 85, source.dtype)
    a, c = (descriptor(lt, layout, dtype, batch) for layout in (source_layout, target_layout))
    scale, number = (DataType.R_32I, ctypes.c_int32) if dtype is DataType.R_32I else (DataType.R_32F, ctypes.c_float)
    one, zero = number(1), number(0)
    operation = TransformDesc(lt, scale)
    lt.functions.cublasLtMatrixTransform(
        lt.handle,
        operation.handle,
        ctypes.addressof(one),
        source.data.ptr,
        a.handle,
        ctypes.addressof(zero),
        None,
        None,
        target.data.ptr,
        c.handle,
        0,
    )
    cp.cuda.Device().synchronize()
    return target


@pytest.mark.parametrize("order", TENSOR_CORE_ORDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_packing_equals_cublaslt(matmul_context, order, shape, batch):
    plain, packed = Layout.of(Order.ROW, *shape), Layout.of(order, *shape)
    matrix = np.random.default_rng(sum(shape)).integers(-128, 128, (batch, *shape)).astype(np.int8)
    result = transform(matmul_context.lt, cp.asarray(matrix.reshape(batch, -1)), plain, packed, DataType.R_8I).get()
    assert np.array_equal(packed.unpack(result), matrix)
    offsets = packed.offset(np.arange(shape[0])[:, None], np.arange(shape[1])).ravel()
    assert np.array_equal(result[:, offsets], packed.pack(matrix)[:, offsets])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpacking_equals_cublaslt(matmul_context, shape):
    """Out of COL32 alone: cublasLt transforms into the weights' orders, and never out of them."""
    plain, packed = Layout.of(Order.ROW, *shape), Layout.of(Order.COL32, *shape)
    matrix = np.random.default_rng(sum(shape)).integers(-128, 128, (1, *shape)).astype(np.int8)
    result = transform(matmul_context.lt, cp.asarray(packed.pack(matrix)), packed, plain, DataType.R_8I)
    assert np.array_equal(result.get().reshape(matrix.shape), matrix)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int32_results_lie_in_col32_as_modelled(matmul_context, shape):
    plain, packed = Layout.of(Order.ROW, *shape, itemsize=4), Layout.of(Order.COL32, *shape, itemsize=4)
    matrix = np.random.default_rng(0).integers(-(2**20), 2**20, (1, *shape)).astype(np.int32)
    result = transform(matmul_context.lt, cp.asarray(packed.pack(matrix)), packed, plain, DataType.R_32I)
    assert np.array_equal(result.get().reshape(matrix.shape), matrix)


@pytest.mark.parametrize("order", TENSOR_CORE_ORDERS)
def test_packing_on_the_gpu_equals_packing_on_the_host(device, order):
    matrix = np.random.default_rng(0).integers(-128, 128, (2, 70, 100)).astype(np.int8)
    layout = Layout.of(order, 70, 100)
    packed = layout.pack(cp.asarray(matrix))
    assert np.array_equal(packed.get(), layout.pack(matrix))
    assert np.array_equal(layout.unpack(packed).get(), matrix)
