"""Layouts: the permutation equals the index formula, which is a bijection, and nothing is lost in a round trip."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.cuda.kernels.gemm.layouts import Layout
from bminf_lite.cuda.kernels.gemm.tensor_core_layouts import TILE_ROWS
from bminf_lite.cuda.kernels.sources import SOURCES
from bminf_lite.cuda.runtime.cublaslt import Order

ORDERS = [Order.ROW, *TILE_ROWS]
SIZES = st.one_of(st.sampled_from([1, 2, 7, 8, 31, 32, 33, 64, 97]), st.integers(1, 130))


def grid(layout: Layout) -> np.ndarray:
    """The offset of every element, [rows, cols]."""
    return layout.offset(np.arange(layout.rows)[:, None], np.arange(layout.cols))


@given(st.sampled_from(ORDERS), SIZES, SIZES)
def test_every_element_has_a_place_of_its_own_inside_the_buffer(order, rows, cols):
    layout = Layout.of(order, rows, cols)
    offsets = grid(layout)
    assert np.unique(offsets).size == rows * cols
    assert offsets.min() >= 0 and offsets.max() < layout.size


@given(
    st.sampled_from(ORDERS), SIZES, SIZES, st.lists(st.integers(0, 3), max_size=2), st.sampled_from(["int8", "int32"])
)
def test_pack_is_the_index_formula_with_zeros_elsewhere(order, rows, cols, batch, dtype):
    layout = Layout.of(order, rows, cols, np.dtype(dtype).itemsize)
    matrix = np.random.default_rng(rows * 1000 + cols).integers(-128, 128, (*batch, rows, cols)).astype(dtype)
    expected = np.zeros((*batch, layout.size), dtype)
    expected[..., grid(layout).ravel()] = matrix.reshape(*batch, rows * cols)
    packed = layout.pack(matrix)
    assert packed.dtype == matrix.dtype and packed.itemsize * layout.size == layout.nbytes
    assert np.array_equal(packed, expected)
    assert np.array_equal(layout.unpack(packed), matrix)


def test_a_padded_leading_dimension_is_respected():
    matrix = np.arange(6, dtype=np.int8).reshape(2, 3)
    layout = Layout(Order.ROW, 2, 3, 4)
    assert layout.pack(matrix).tolist() == [0, 1, 2, 0, 3, 4, 5, 0]
    assert np.array_equal(layout.unpack(layout.pack(matrix)), matrix)


@pytest.mark.parametrize(
    ("order", "rows", "cols", "ld"),
    [  # the examples in the comments of cublasLtOrder_t
        (Order.COL32, 2, 33, 32 * 2),
        (Order.COL4_4R2_8C, 1, 33, 32 * 8 * 1),
        (Order.COL32_2R_4R4, 1, 33, 32 * 32 * 1),
    ],
)
def test_leading_dimension_as_the_header_says(order, rows, cols, ld):
    layout = Layout.of(order, rows, cols)
    assert layout.ld == ld
    assert layout.offset(0, 32) == ld
    assert layout.size == 2 * ld


def test_col4_4r2_8c_interleaves_even_and_odd_rows():
    """One tile of 8 x 32: 4 even rows, then 4 odd ones, in inner tiles of 4 columns; an inner row is contiguous."""
    layout = Layout.of(Order.COL4_4R2_8C, 8, 32)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    position = 0
    for half in (order[:4], order[4:]):
        for block in range(0, 32, 4):
            for row in half:
                for col in range(block, block + 4):
                    assert layout.offset(row, col) == position
                    position += 1


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (-1, 4)])
def test_an_empty_matrix_has_no_layout(shape):
    with pytest.raises(ValueError, match="1 or more"):
        Layout.of(Order.COL32, *shape)


def test_a_matrix_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\[3, 4\] does not fit a layout \[4, 3\]"):
        Layout.of(Order.COL32, 4, 3).pack(np.zeros((3, 4), np.int8))


HOST_PROGRAM = """
#include <cstddef>
#define __host__
#define __device__
#define __forceinline__ inline
#include "common/layout.cuh"
template <Order order> void fill(unsigned rows, unsigned cols, size_t ld, size_t* out) {
    for (unsigned r = 0; r < rows; ++r)
        for (unsigned c = 0; c < cols; ++c) out[size_t(r) * cols + c] = offset<order>(r, c, ld);
}
extern "C" void offsets(int order, unsigned rows, unsigned cols, size_t ld, size_t* out) {
    if (order == 1) fill<Order::ROW>(rows, cols, ld, out);
    if (order == 2) fill<Order::COL32>(rows, cols, ld, out);
    if (order == 3) fill<Order::COL4_4R2_8C>(rows, cols, ld, out);
    if (order == 4) fill<Order::COL32_2R_4R4>(rows, cols, ld, out);
}
"""


@pytest.fixture(scope="module")
def compiled_offsets(tmp_path_factory):
    """``layout.cuh`` compiled for the host, as a function (order, rows, cols, ld) -> offsets [rows, cols]."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("layout")
    for name, text in {"host.cpp": HOST_PROGRAM, **SOURCES.included(HOST_PROGRAM)}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-I.", "-o", "layout.so", "host.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    function = ctypes.CDLL(str(folder / "layout.so")).offsets
    function.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)

    def offsets(layout: Layout) -> np.ndarray:
        out = np.empty((layout.rows, layout.cols), np.uint64)
        function(layout.order, layout.rows, layout.cols, layout.ld, out.ctypes.data)
        return out

    return offsets


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (33, 31), (70, 129)])
def test_the_header_for_kernels_has_the_same_formulas(compiled_offsets, order, shape):
    layout = Layout.of(order, *shape)
    assert np.array_equal(compiled_offsets(layout), grid(layout))
