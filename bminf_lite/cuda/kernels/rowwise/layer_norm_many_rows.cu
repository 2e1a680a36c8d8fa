// LayerNorms of many wide rows. Gain and shift are as long as a row, and reading all three takes the L2 cache longer than the
// memory takes for the row: a block keeps gain and shift in shared memory and takes row after row, the next on its way while
// it reduces and writes this one.
#include "common/common.cuh"

using namespace bminf;

constexpr int VECTORS = 2;

// At least as many rows as blocks, of k <= 8 VECTORS THREADS elements. shift is null without SHIFT. out may be x.
template <bool SHIFT, class T, int THREADS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS) layer_norm_many(
    const float* x, long long pitch, const float* gain, const float* shift, float eps, T* out, long long out_pitch,
    int rows, int k)
{
    extern __shared__ float4 kept[];
    __shared__ RowScratch<THREADS> scratch;
    const int padded = (k + 15) / 16 * 16;
    float* const kept_gain = reinterpret_cast<float*>(kept);
    float* const kept_shift = kept_gain + padded;
#pragma unroll 4
    for (int column = threadIdx.x * 4; column < padded; column += THREADS * 4) {
        *reinterpret_cast<float4*>(kept_gain + column) = *reinterpret_cast<const float4*>(gain + column);
        if constexpr (SHIFT)
            *reinterpret_cast<float4*>(kept_shift + column) = *reinterpret_cast<const float4*>(shift + column);
    }
    let_successor_start();
    wait_for_predecessor();
    const auto column_of = [](int vector) { return static_cast<int>(vector * THREADS + threadIdx.x) * 8; };
    uint4 next[VECTORS][2];
    const auto fetch = [&](long long row) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const float* place = x + row * pitch + (column_of(i) < padded ? column_of(i) : 0);
            next[i][0] = fetch16(place);
            next[i][1] = fetch16(place + 4);
        }
    };
    fetch(blockIdx.x);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        __syncthreads();  // gain and shift are there, and the row before has left its scratch
        float v[VECTORS][8];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            load8(reinterpret_cast<const float*>(next[i]), v[i]);
            if (k < THREADS * VECTORS * 8) clear_past(v[i], column_of(i), k);
        }
        const int after = row + gridDim.x;
        fetch(after < rows ? after : row);
        normalise_row<THREADS, true, false>(
            v, kept_gain, SHIFT ? kept_shift : nullptr, eps, k, padded, scratch);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) store_vector(out + row * out_pitch, column_of(i), padded, v[i]);
    }
}
