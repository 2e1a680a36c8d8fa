// LayerNorms of many wide rows. Weight and bias are as long as a row, and reading all three takes the L2 cache longer
// than the memory takes for the row: a block keeps weight and bias in shared memory and takes row after row, the next
// on its way while it reduces and writes this one.
#include "common/common.cuh"

using namespace bminf;

constexpr int VECTORS = 2;

// At least as many rows as blocks, of k <= 8 VECTORS THREADS elements. norm_bias is null without HAS_BIAS. out may be
// x.
template <bool HAS_BIAS, class T, int THREADS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS) layer_norm_persistent(
    const float* x, long long pitch, const float* norm_weight, const float* norm_bias, float eps, T* out,
    long long out_pitch, int rows, int k) {
    extern __shared__ float4 kept[];
    __shared__ RowScratch<THREADS> scratch;
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
            const float* place = x + row * pitch + (column_of(i) < padded ? column_of(i) : 0);
            next[i][0] = ld_global_v4(place);
            next[i][1] = ld_global_v4(place + 4);
        }
    };
    fetch(blockIdx.x);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        __syncthreads();  // weight and bias are there, and the row before has left its scratch
        float v[VECTORS][8];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            load8(reinterpret_cast<const float*>(next[i]), v[i]);
            if (k < THREADS * VECTORS * 8) zero_tail(v[i], column_of(i), k);
        }
        const int after = row + gridDim.x;
        fetch(after < rows ? after : row);
        normalise_row<THREADS, true, false>(
            v, shared_weight, HAS_BIAS ? shared_bias : nullptr, eps, k, padded, scratch);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) store_vector(out + row * out_pitch, column_of(i), padded, v[i]);
    }
}
