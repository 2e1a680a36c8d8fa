// What the kernels of attention to latent rows share: the tiles of rows, and how means are stored.
#pragma once
#include "attention/int8_cache.cuh"
#include "attention/softmax.cuh"
#include "common/async.cuh"
#include "constants/latent.cuh"
#include "constants/latent_segments.cuh"

namespace bminf {

// ROWS neighbouring pairs (token, head) of a sequence. row: the first one among those of the step, `rows` are there.
// first: the first one among those of the sequence. end: keys that the last one sees.
struct RowTile {
    int sequence, row, rows, first, context, end;

    __device__ __forceinline__ int segments() const { return (end + LATENT_SEGMENT - 1) / LATENT_SEGMENT; }
};

// The tile of this number, if there is one: those of a sequence lie in order. Called by all lanes of a warp.
template <int ROWS>
__device__ __forceinline__ bool find_row_tile(
    const int* cu_seqlens, const int* context_lens, int sequences, int heads, int index, RowTile& tile) {
    const int lane = threadIdx.x % WARP;
    for (int base = 0; base < sequences; base += WARP) {
        const int own = min(base + lane, sequences - 1), start = cu_seqlens[own], tokens = cu_seqlens[own + 1] - start;
        const int context = context_lens[own], tiles = base + lane < sequences ? (tokens * heads + ROWS - 1) / ROWS : 0;
        int sum = tiles;
#pragma unroll
        for (int d = 1; d < WARP; d *= 2) {
            const int before = __shfl_up_sync(FULL, sum, d);
            if (lane >= d) sum += before;
        }
        const int at = __popc(__ballot_sync(FULL, sum <= index));
        if (at < WARP) {
            const int first = (index - __shfl_sync(FULL, sum - tiles, at)) * ROWS;
            const int all = __shfl_sync(FULL, tokens, at) * heads;
            tile.sequence = base + at, tile.first = first, tile.rows = min(ROWS, all - first);
            tile.row = __shfl_sync(FULL, start, at) * heads + first;
            tile.context = __shfl_sync(FULL, context, at);
            tile.end = tile.context + (first + tile.rows - 1) / heads + 1;
            return true;
        }
        index -= __shfl_sync(FULL, sum, WARP - 1);
    }
    return false;
}

// Where a sequence's rows lie in the cache.
template <class CACHE>
struct LatentSource {
    const CACHE* cache;
    const __half* scales;
    const int* table;
    int depth, rank, end;  // end: the keys from there on are zeros

    // The index in the cache of key `key`, the first of a tile; it and the rest of the tile lie in one block.
    __device__ __forceinline__ long long at(int key) const {
        return static_cast<long long>(table[key / BLOCK_SIZE]) * BLOCK_SIZE + key % BLOCK_SIZE;
    }
};

__device__ __forceinline__ void store_means(__half* mean, float low, float high, float sum) {
    *reinterpret_cast<__half2*>(mean) = __halves2half2(attention_output(low, sum), attention_output(high, sum));
}

}  // namespace bminf
