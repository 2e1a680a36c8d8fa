// The memory layouts of a product's operands and results: the offset of element (row, col).
// bminf_lite/cuda/kernels/gemm/tensor_core_layouts.py defines them, and a test compares the two.
#pragma once
#include "constants/order.cuh"

// In elements. `ld` is the distance between rows (ROW) or between groups of 32 columns (the others). In every layout
// four columns from a multiple of 4 on are contiguous, so a thread may access them at once.
template <Order order>
__host__ __device__ __forceinline__ size_t offset(unsigned row, unsigned col, size_t ld) {
    const size_t group = (col / 32) * ld;
    const unsigned c = col % 32;
    if constexpr (order == Order::ROW) {
        return row * ld + col;
    } else if constexpr (order == Order::COL32) {
        return group + size_t(row) * 32 + c;
    } else if constexpr (order == Order::COL4_4R2_8C) {
        return group + size_t(row / 8) * 256 + (row % 2) * 128 + (c / 4) * 16 + (row % 8 / 2) * 4 + c % 4;
    } else {
        return group + size_t(row / 32) * 1024 + ((row % 8 / 2 * 4 + row % 32 / 8) * 2 + row % 2) * 32 + c;
    }
}
