// What the two prefill kernels share: the tile of rows and keys of a block, masks, and the online softmax.
//
// A block owns a tile of rows of one key-value head of one sequence. The query heads that share the key-value head are
// packed into rows: row r is token r / group under the head r % group. So grouped-query heads fill a tile even if there
// are few tokens, and the rows of a tile have neighbouring positions, so few keys need a mask.
//
// Scores s[n][j] and outputs o[n][j] of a warp's 16 rows are accumulators of the tensor cores: lane t holds of each
// eight columns n the elements j = {(r, q), (r, q + 1), (r + 8, q), (r + 8, q + 1)}, with r = t / 4 and q = t % 4 * 2.
#pragma once
#include "attention/int8_cache.cuh"
#include "common/async.cuh"
#include "common/tensor_cores.cuh"
#include "constants/prefill.cuh"

namespace bminf {

constexpr float LOG2_E = 1.4426950408889634f;

// Sequence b has the tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1, at positions from context_lens[b] on, and the slot
// slots[b] of the cache. D is head_dim padded to a multiple of 16.
struct PrefillParams {
    const __half* q;  // [T, heads, D], q_pitch elements from token to token
    long long q_pitch;
    const void* keys;    // [slots, kv_heads, capacity, D] of fp16, or of int8 codes; a single slot for BIDIRECTIONAL
    const void* values;  // the same
    __half* out;         // [T, heads * head_dim], out_pitch elements from token to token
    long long out_pitch;
    const int* cu_seqlens;
    const int* context_lens;
    const int* slots;
    float scale;  // of the scores, times log2(e), because exponentials are to the base 2; positive
    int window;   // how many keys a query sees, its own included; 0 for all up to its own
    int heads, head_dim, capacity, sequences;
    const float* bias;  // [heads, 2 * max_distance + 1] by the distance key - query, clipped to max_distance
    int max_distance;
    const int* lengths;        // [slots], of the sources
    const __half* key_scales;  // of codes: [slots, kv_heads, capacity]
    const __half* value_scales;
};

// The tile of one block; the grid is (kv_heads, at least the number of tiles of all sequences).
struct WorkTile {
    int first, rows, group;             // first row of the tile, rows of the sequence, query heads per key-value head
    int before, window;                 // position of the sequence's first token
    int first_position, last_position;  // of the tile's rows
    int begin, end;                     // keys that any row sees; begin is a multiple of KEYS
    int sequence, start;                // the sequence and its first token
    size_t cached;                      // index of the head's first token in the cache

    __device__ __forceinline__ int position(int row) const { return before + row / group; }
};

// Finds this block's tile by walking over the sequences; returns false for a block beyond the last tile.
template <int D, int ROWS, int KEYS>
__device__ __forceinline__ bool find_work_tile(const PrefillParams& p, WorkTile& work) {
    const int head = blockIdx.x, kv_heads = gridDim.x;
    work.group = p.heads / kv_heads;
    int sequence = -1, tile = blockIdx.y, tiles = 0, stop = p.cu_seqlens[0];
    do {
        if (++sequence == p.sequences) return false;
        tile -= tiles;
        work.start = stop, stop = p.cu_seqlens[sequence + 1];
        work.rows = (stop - work.start) * work.group;
        tiles = (work.rows + ROWS - 1) / ROWS;
    } while (tile >= tiles);
    // The last tiles of a sequence see the most keys, so they start first.
    work.first = (tiles - 1 - tile) * ROWS;
    work.sequence = sequence, work.before = p.context_lens[sequence], work.window = p.window;
    work.first_position = work.position(work.first);
    work.last_position = work.position(min(work.first + ROWS, work.rows) - 1);
    work.begin = p.window ? max(0, work.first_position - p.window + 1) / KEYS * KEYS : 0;
    work.end = work.last_position + 1;
    work.cached = (static_cast<size_t>(p.slots[sequence]) * kv_heads + head) * p.capacity;
    return true;
}

// Changes a tile for CROSS and BIDIRECTIONAL, where all rows see the same keys.
template <int D, int MASK>
__device__ __forceinline__ void use_full_range(const PrefillParams& p, WorkTile& work) {
    work.begin = 0;
    if constexpr (MASK == CROSS) {
        work.end = p.lengths[p.slots[work.sequence]];
    } else {
        work.before = 0, work.end = work.rows / work.group;
        work.cached = static_cast<size_t>(blockIdx.x) * p.capacity + work.start;
    }
}

// The keys that a block works on, or their values, from a token on.
template <int D, class CACHE>
__device__ __forceinline__ Cached<CACHE> cached_from(
    const PrefillParams& p, const WorkTile& work, bool values, int token) {
    const CACHE* const data = static_cast<const CACHE*>(values ? p.values : p.keys);
    const __half* const scales = values ? p.value_scales : p.key_scales;
    return {data + (work.cached + token) * D, scales + work.cached + token};
}

// Sixteen codes of one token in registers; zeros if not `valid`.
struct CodeVector {
    uint4 codes;
    __half scale;

    __device__ __forceinline__ void load(const Cached<int8>& from, int chunk, int row, bool valid) {
        codes = valid ? *reinterpret_cast<const uint4*>(from.data + chunk * 16) : make_uint4(0, 0, 0, 0);
        scale = valid ? from.scales[row] : __float2half_rn(0.0f);
    }
};

// Whether any row of the tile does not see all of `count` keys from `key` on.
__device__ __forceinline__ bool needs_mask(const WorkTile& work, int key, int count) {
    return key + count - 1 > work.first_position || (work.window && key <= work.last_position - work.window);
}

// The online softmax of a thread's two rows: the largest score so far, and the sum of weights relative to it. Each of
// the four lanes that share a row keeps its own part of the sum.
struct SoftmaxRows {
    int position[2];
    float top[2], total[2];
};

// first: the first of the warp's 16 rows.
__device__ __forceinline__ SoftmaxRows init_softmax_rows(const WorkTile& work, int first) {
    const int row = first + threadIdx.x % WARP / 4;
    return {{work.position(row), work.position(row + 8)}, {-INF_F, -INF_F}, {0.0f, 0.0f}};
}

// Sets scores to -inf where a row does not see a key; column 0 of s is `key`.
template <int N>
__device__ __forceinline__ void apply_causal_mask(float (&s)[N][4], const SoftmaxRows& rows, int key, int window) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int last = rows.position[h] - key - static_cast<int>(threadIdx.x) % 4 * 2;
        const int before = window ? last - window : -1;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (n * 8 + j > last || n * 8 + j <= before) s[n][2 * h + j] = -INF_F;
    }
}

// Sets scores to -inf from column `count` on.
template <int N>
__device__ __forceinline__ void mask_keys_from(float (&s)[N][4], int count) {
    count -= static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (n * 8 + j % 2 >= count) s[n][j] = -INF_F;
}

// s = s * scale + bias * log2(e). Column 0 of s is `key`; first: the first of the warp's 16 rows.
template <int N>
__device__ __forceinline__ void add_bias(
    float (&s)[N][4], const WorkTile& work, const PrefillParams& p, const SoftmaxRows& rows, int first, int key) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head =
            blockIdx.x * work.group + (first + static_cast<int>(threadIdx.x) % WARP / 4 + h * 8) % work.group;
        const float* const bias = p.bias + static_cast<long long>(head) * (2 * p.max_distance + 1) + p.max_distance;
        const int distance = key + static_cast<int>(threadIdx.x) % 4 * 2 - rows.position[h];
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float value = __ldg(bias + max(-p.max_distance, min(p.max_distance, distance + n * 8 + j)));
                s[n][2 * h + j] = fmaf(s[n][2 * h + j], p.scale, value * LOG2_E);
            }
    }
}

// Turns scores into weights 2^(scale * s - top), with the largest score of the row so far as top, and updates the
// running sums. rescale: the factor for outputs that were accumulated before, 2^(old top - top).
template <int N>
__device__ __forceinline__ void online_softmax(SoftmaxRows& rows, float (&s)[N][4], float (&rescale)[2], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top = rows.top[h];
#pragma unroll
        for (int n = 0; n < N; ++n) top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
        // top is -inf for a row that has seen no key yet.
        const float shift = top == -INF_F ? 0.0f : top * scale;
        rescale[h] = exp2_fast(rows.top[h] * scale - shift);
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 2 * h; j < 2 * h + 2; ++j) {
                s[n][j] = exp2_fast(s[n][j] * scale - shift);
                total += s[n][j];
            }
        rows.top[h] = top, rows.total[h] = rows.total[h] * rescale[h] + total;
    }
}

// o[row] *= by[row].
template <int N>
__device__ __forceinline__ void multiply_rows(float (&o)[N][4], const float (&by)[2]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[n][j] *= by[j / 2];
}

// Divides the outputs by the total weight; a row that sees no key becomes zeros.
template <int N>
__device__ __forceinline__ void normalise(float (&o)[N][4], const SoftmaxRows& rows) {
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float total = rows.total[h];
        total += __shfl_xor_sync(FULL, total, 1);
        total += __shfl_xor_sync(FULL, total, 2);
        inverse[h] = total == 0.0f ? 0.0f : 1.0f / total;
    }
    multiply_rows(o, inverse);
}

// The weights of the keys 16 * k to 16 * k + 15, rounded to fp16, as a left operand of the tensor cores.
template <int N>
__device__ __forceinline__ void weights_fragment(unsigned (&a)[4], const float (&s)[N][4], int k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float (&piece)[4] = s[2 * k + j / 2];
        a[j] = pack_half2(piece[j % 2 * 2], piece[j % 2 * 2 + 1]);
    }
}

// Starts the copy of eight elements of a row's query from `column` on; zeros for rows beyond the sequence.
template <int D>
__device__ __forceinline__ void copy_query(
    __half* target, const WorkTile& work, const PrefillParams& p, int row, int column) {
    const int token = row / work.group, head = blockIdx.x * work.group + row - token * work.group;
    const bool valid = row < work.rows;
    cp_async_16(target, valid ? p.q + (work.start + token) * p.q_pitch + head * D + column : p.q, valid);
}

// Writes eight elements of a row's output from `column` on, as far as they are within the row and the sequence.
__device__ __forceinline__ void store_output(
    const WorkTile& work, const PrefillParams& p, int row, int column, const __half* eight) {
    if (row >= work.rows) return;
    const int token = row / work.group, head = blockIdx.x * work.group + row - token * work.group;
    __half* const target = p.out + (work.start + token) * p.out_pitch + head * p.head_dim;
    if (p.head_dim % 8 == 0) {
        if (column < p.head_dim) *reinterpret_cast<uint4*>(target + column) = *reinterpret_cast<const uint4*>(eight);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (column + j < p.head_dim) target[column + j] = eight[j];
    }
}

}  // namespace bminf
