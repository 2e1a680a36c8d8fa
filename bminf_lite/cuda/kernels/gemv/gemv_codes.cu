// Products of a few rows of float elements with an int8 weight, for tensors of other libraries:
//
//     out[row, i] = w_scale[i] * (sum over k of weight[i, k] * x[row, k]) + bias[i]
//
// x: T [ROWS, k], contiguous; weight: int8 [n, k]; w_scale: fp32 [n]; bias: fp32 [n] or null; out: T [ROWS, n]; k is a
// multiple of 16. Each block puts the rows into shared memory; then each warp computes one column of the result at a
// time, so the weight is read once. Sums are fp32 and in a fixed order, so results do not depend on the grid.
#include "constants/gemv.cuh"
#include "rowwise/unaligned.cuh"

using namespace bminf;

constexpr int WARPS = THREADS / WARP;

// Dynamic shared memory: ROWS * k elements.
template <class T, int ROWS>
__global__ void __launch_bounds__(THREADS) gemv_codes(
    const T* x, const int8* __restrict__ weight, const float* __restrict__ w_scale, const float* __restrict__ bias,
    T* out, int n, int k) {
    extern __shared__ __align__(16) char shared[];
    T* const rows = reinterpret_cast<T*>(shared);
    constexpr int VECTOR = 16 / sizeof(T);
    for (int i = threadIdx.x * VECTOR; i < ROWS * k; i += THREADS * VECTOR)
        *reinterpret_cast<uint4*>(rows + i) = *reinterpret_cast<const uint4*>(x + i);
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    for (int i = blockIdx.x * WARPS + threadIdx.x / WARP; i < n; i += gridDim.x * WARPS) {
        const int8* const own = weight + static_cast<size_t>(i) * k;
        float sum[ROWS] = {};
#pragma unroll 4
        for (int column = lane * 16; column < k; column += WARP * 16) {
            const int4 raw = __ldcs(reinterpret_cast<const int4*>(own + column));
            const int8* const c = reinterpret_cast<const int8*>(&raw);
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    float v[8];
                    load8(rows + r * k + column + 8 * h, v);
#pragma unroll
                    for (int j = 0; j < 8; ++j) sum[r] = fmaf(static_cast<float>(c[8 * h + j]), v[j], sum[r]);
                }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int d = WARP / 2; d; d /= 2) sum[r] += __shfl_xor_sync(FULL, sum[r], d);
            const float y = __fmul_rn(w_scale[i], sum[r]);
            if (lane == 0) store_element(out + static_cast<size_t>(r) * n + i, bias ? __fadd_rn(y, bias[i]) : y);
        }
    }
}
