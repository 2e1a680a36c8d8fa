// Random matrices by SplitMix64, generated on the GPU; backend/random_matrix.py defines their contents.
#include "common/common.cuh"

using namespace bminf;
using u64 = unsigned long long;

__device__ __forceinline__ u64 split_mix(u64 seed, u64 index) {
    u64 x = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

__device__ __forceinline__ void store_code(int8* to, int code, float) { *to = static_cast<int8>(code); }
__device__ __forceinline__ void store_code(__half* to, int code, float unit) { *to = __float2half_rn(code / unit); }

// Fills out [rows, pitch] up to column `columns`; a thread writes eight elements, those of word `row * row_words +
// group` of the generator; floats are codes over `unit`. It does not call launch_dependent_grids, because products read
// weights before they wait for their predecessor.
template <class T>
__global__ void __launch_bounds__(256)
    fill_random(T* out, long long pitch, int rows, int columns, u64 seed, long long row_words, float unit) {
    wait_on_dependent_grids();
    const int groups = (columns + 7) / 8;
    const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long row = index / groups;
    const int column = static_cast<int>(index % groups) * 8;
    if (row >= rows) return;
    const u64 word = split_mix(seed, static_cast<u64>(row * row_words + column / 8));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int code = max(-127, static_cast<int>(static_cast<int8>(word >> (8 * j) & 0xff)));
        if (column + j < columns) store_code(out + row * pitch + column + j, code, unit);
    }
    __threadfence();
}
