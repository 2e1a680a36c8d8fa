// A row of elements of type T in registers: vector i of a thread holds the columns column_of(i) to column_of(i) + 7.
#pragma once
#include "rowwise/unaligned.cuh"

namespace bminf {

// The sum of one number of each of THREADS threads, in all of them. bank: see RowScratch.
template <int THREADS>
__device__ __forceinline__ double threads_sum(double sum, RowScratch<THREADS>& scratch, int bank) {
    float none = 0;
    lanes_sum_max<true, false, (THREADS < WARP ? THREADS : WARP)>(sum, none);
    if constexpr (THREADS > WARP) {
        constexpr int WARPS = THREADS / WARP;
        if (threadIdx.x % WARP == 0) scratch.sum[bank][threadIdx.x / WARP] = sum;
        sync_threads<THREADS>();
        sum = scratch.sum[bank][threadIdx.x % WARPS];
        lanes_sum_max<true, false, WARPS>(sum, none);
    }
    return sum;
}

// Two sums over THREADS threads at once, in all of them: one half of a warp's lanes adds up the first, the other half
// the second. Both banks of the scratch are used.
template <int THREADS>
__device__ __forceinline__ double2 threads_two_sums(double first, double second, RowScratch<THREADS>& scratch) {
    constexpr int WARPS = THREADS / WARP, HALF = WARP / 2;
    static_assert(1 < WARPS && WARPS <= HALF, "a lane of each half for each warp");
    const int lane = threadIdx.x % WARP, upper = lane / HALF;
    double sum = (upper ? second : first) + __shfl_xor_sync(FULL, upper ? first : second, HALF);
    float none = 0;
    lanes_sum_max<true, false, HALF>(sum, none);
    if (lane % HALF == 0) scratch.sum[upper][threadIdx.x / WARP] = sum;
    sync_threads<THREADS>();
    sum = scratch.sum[upper][lane % WARPS];
    lanes_sum_max<true, false, WARPS>(sum, none);
    const double other = __shfl_xor_sync(FULL, sum, HALF);
    return upper ? make_double2(other, sum) : make_double2(sum, other);
}

// Reads N vectors, with zeros in columns from k on. WHOLE: k is a multiple of 8 and the row is aligned to 16 bytes;
// then all loads are in flight together.
template <bool WHOLE, class T, int N, class Columns>
__device__ __forceinline__ void read_row(const T* row, int k, Columns column_of, float (&x)[N][8]) {
    if constexpr (WHOLE) {
        constexpr int PARTS = sizeof(T) / 2;
        uint4 raw[N][PARTS];
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                raw[i][part] = ld_global_v4(row + (column_of(i) < k ? column_of(i) : 0) + part * (16 / sizeof(T)));
#pragma unroll
        for (int i = 0; i < N; ++i) {
            load8(reinterpret_cast<const T*>(raw[i]), x[i]);
            zero_tail(x[i], column_of(i), k);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) load_some(row + column_of(i), k - column_of(i), false, x[i]);
    }
}

// Writes the columns below `end` of N vectors. `end` is 0 for a row that is not written. Called by whole warps.
template <bool WHOLE, class T, int N, class Columns>
__device__ __forceinline__ void write_row(T* row, int end, Columns column_of, const float (&x)[N][8]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if constexpr (WHOLE)
            store_vector(row, column_of(i), end, x[i]);
        else
            store_some(row + column_of(i), end - column_of(i), false, x[i]);
    }
}

}  // namespace bminf
