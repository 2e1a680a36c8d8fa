// LayerNorm of many wide rows:
//
//     out = (x - mean) * norm_weight / sqrt(variance + eps) + norm_bias
//
// x: fp32 [rows, k]; out: T [rows, k], fp16 or fp32. Persistent: weight and bias are as long as a row, and reading them
// from L2 for each row would take longer than reading the row from memory. So each block keeps them in shared memory
// and normalises row after row, loading the next row while it reduces and writes the present one.
#include "common/common.cuh"

using namespace bminf;

constexpr int VECTORS = 2;

// A norm whose weight and bias are in shared memory. inverse: 1 / k, computed once for all rows.
template <int THREADS>
struct SharedNorm : NormParams<THREADS> {
    double inverse;
    __device__ __forceinline__ double inverse_k() const { return inverse; }
};

// rows >= gridDim.x, k <= 8 * VECTORS * THREADS; inverse_k: 1 / k. norm_bias is null without HAS_BIAS. out may be x.
// Dynamic shared memory: weight and, with HAS_BIAS, bias, each padded to a multiple of 16 floats.
template <bool HAS_BIAS, class T, int THREADS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS) layer_norm_persistent(
    const float* x, long long pitch, const float* norm_weight, const float* norm_bias, float eps, T* out,
    long long out_pitch, int rows, int k, double inverse_k) {
    extern __shared__ float4 kept[];
    __shared__ RowScratch<THREADS, VECTORS> scratch;
    const int padded = (k + 15) / 16 * 16;
    float* const shared_weight = reinterpret_cast<float*>(kept);
    float* const shared_bias = shared_weight + padded;
#pragma unroll 4
    for (int column = threadIdx.x * 4; column < padded; column += THREADS * 4) {
        *reinterpret_cast<float4*>(shared_weight + column) = *reinterpret_cast<const float4*>(norm_weight + column);
        if constexpr (HAS_BIAS)
            *reinterpret_cast<float4*>(shared_bias + column) = *reinterpret_cast<const float4*>(norm_bias + column);
    }
    launch_dependent_grids();
    wait_on_dependent_grids();
    const auto column_of = [](int vector) { return static_cast<int>(vector * THREADS + threadIdx.x) * 8; };
    uint4 next[VECTORS][2];
    const auto fetch = [&](long long row) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const float* source = x + row * pitch + (column_of(i) < padded ? column_of(i) : 0);
            next[i][0] = ld_global_v4(source);
            next[i][1] = ld_global_v4(source + 4);
        }
    };
    const SharedNorm<THREADS> norm = {{shared_weight, HAS_BIAS ? shared_bias : nullptr, eps, k, padded}, inverse_k};
    fetch(blockIdx.x);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        __syncthreads();  // weight and bias have been written, and the scratch of the previous row has been read
        float v[VECTORS][8];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            load8(reinterpret_cast<const float*>(next[i]), v[i]);
            if (k < THREADS * VECTORS * 8) zero_tail(v[i], column_of(i), k);
        }
        const int after = row + gridDim.x;
        fetch(after < rows ? after : row);
        normalise_row<THREADS, true, false>(v, norm, scratch);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) store_vector(out + row * out_pitch, column_of(i), padded, v[i]);
    }
}
