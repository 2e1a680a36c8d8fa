// LayerNorms of many wide rows. Gain and shift are as long as a row, and reading all three takes the L2 cache longer than the
// memory takes for the row: a block keeps gain and shift in shared memory and takes row after row, the next on its way while
// it reduces and writes this one.
#include "common.cuh"

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
    const int padded = (k + 15) / 16 * 16, thread = threadIdx.x;
    const auto column_of = [thread](int vector) { return (vector * THREADS + thread) * 8; };
    float* const kept_gain = reinterpret_cast<float*>(kept);
    float* const kept_shift = kept_gain + THREADS * VECTORS * 8;
    const auto keep = [&](float* place, const float* parameters) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            float x[8];
            load_row8(parameters, column_of(i), k, padded, x);
            store4(place + kept_place<THREADS>(i, 0, thread), x[0], x[1], x[2], x[3]);
            store4(place + kept_place<THREADS>(i, 1, thread), x[4], x[5], x[6], x[7]);
        }
    };
    keep(kept_gain, gain);
    if constexpr (SHIFT) keep(kept_shift, shift);
    let_successor_start();
    wait_for_predecessor();
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
        float v[VECTORS][8];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            load8(reinterpret_cast<const float*>(next[i]), v[i]);
            if (k < THREADS * VECTORS * 8) clear_past(v[i], column_of(i), k);
        }
        const int after = row + gridDim.x;
        fetch(after < rows ? after : row);
        normalise_row<THREADS, true, false, VECTORS, true>(
            v, kept_gain, SHIFT ? kept_shift : nullptr, eps, k, padded, scratch);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) store_vector(out + row * out_pitch, column_of(i), padded, v[i]);
    }
}
