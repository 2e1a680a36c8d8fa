// What the prefill kernels share: which rows and keys a block works on, masks, and the running softmax.
//
// A block owns a tile of rows of one key-value head of one sequence. The query heads that share a key-value head are
// packed into the rows: row r is query token r / group under head r % group. So grouped heads fill a tile even where
// there are few tokens, and a tile's rows lie close in position, which leaves little to mask.
//
// Scores s[n][j] and outputs o[n][j] of 16 rows lie in a warp's registers as the tensor cores leave them: of the rows a
// thread holds lane / 4 and that plus 8, and of each 8 columns n two from lane % 4 * 2 on, so j = 0..3 are
// {row, column}, {row, column + 1}, {row + 8, column}, {row + 8, column + 1}.
#pragma once
#include "attention/int8_cache.cuh"
#include "common/async.cuh"
#include "common/tensor_cores.cuh"
#include "constants/prefill.cuh"

namespace bminf {

constexpr float LOG2_E = 1.4426950408889634f;

// Sequence b of `sequences` owns tokens cu_seqlens[b] to cu_seqlens[b + 1], at positions from context_lens[b] on, and
// lives in slot slots[b] of the cache. D is head_dim padded to a multiple of 16.
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
    float scale;  // of the scores, times log2(e); positive
    int window;   // how many keys a query sees; 0 for all up to its own
    int heads, head_dim, capacity, sequences;
    const float*
        bias;  // [heads, 2 * max_distance + 1] by the distance key - query, longer ones counting as `max_distance`
    int max_distance;
    const int* lengths;        // [slots], of the sources
    const __half* key_scales;  // of codes: [slots, kv_heads, capacity]
    const __half* value_scales;
};

// What one block of grid (kv_heads, at least as many tiles as all sequences have) works on.
struct WorkTile {
    int first, rows, group;  // first row of the tile, rows of the sequence
    int before, window;
    int first_position, last_position;  // of the tile's rows
    int begin, end;                     // keys that any of them sees; begin is a multiple of KEYS
    int sequence, start;                // which one, and its first token
    size_t cached;                      // tokens of the cache before its keys of this head

    __device__ __forceinline__ int position(int row) const { return before + row / group; }
};

// Returns false for a block that has nothing to do.
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
    // A sequence's last tile sees the most keys, so it starts first.
    work.first = (tiles - 1 - tile) * ROWS;
    work.sequence = sequence, work.before = p.context_lens[sequence], work.window = p.window;
    work.first_position = work.position(work.first);
    work.last_position = work.position(min(work.first + ROWS, work.rows) - 1);
    work.begin = p.window ? max(0, work.first_position - p.window + 1) / KEYS * KEYS : 0;
    work.end = work.last_position + 1;
    work.cached = (static_cast<size_t>(p.slots[sequence]) * kv_heads + head) * p.capacity;
    return true;
}

// For tiles whose rows all see the same keys.
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

// Sixteen codes from memory, of one token, or zeros.
struct CodeVector {
    uint4 codes;
    __half scale;

    __device__ __forceinline__ void load(const Cached<int8>& from, int chunk, int row, bool valid) {
        codes = valid ? *reinterpret_cast<const uint4*>(from.data + chunk * 16) : make_uint4(0, 0, 0, 0);
        scale = valid ? from.scales[row] : __float2half_rn(0.0f);
    }
};

// Until this thread's copies have arrived.
__device__ __forceinline__ void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Whether some row of the tile does not see some of `count` keys from `key` on.
__device__ __forceinline__ bool needs_mask(const WorkTile& work, int key, int count) {
    return key + count - 1 > work.first_position || (work.window && key <= work.last_position - work.window);
}

// A thread's two rows: their positions, and their running softmax. Each of the four threads that share a row keeps the
// part of its total that it summed.
struct SoftmaxRows {
    int position[2];
    float top[2], total[2];
};

// first: of the warp's 16 rows.
__device__ __forceinline__ SoftmaxRows init_softmax_rows(const WorkTile& work, int first) {
    const int row = first + threadIdx.x % WARP / 4;
    return {{work.position(row), work.position(row + 8)}, {-INF_F, -INF_F}, {0.0f, 0.0f}};
}

// Scores of keys from `key` on become -inf where a row does not see a key.
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

// Scores become -inf from the key `count` on.
template <int N>
__device__ __forceinline__ void mask_keys_from(float (&s)[N][4], int count) {
    count -= static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (n * 8 + j % 2 >= count) s[n][j] = -INF_F;
}

// Scores of keys from `key` on are scaled and get their biases, times log2(e). first: of the warp's 16 rows.
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

// Scores become weights relative to the largest score so far. rescale: what sums made before must be multiplied by.
template <int N>
__device__ __forceinline__ void online_softmax(SoftmaxRows& rows, float (&s)[N][4], float (&rescale)[2], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top = rows.top[h];
#pragma unroll
        for (int n = 0; n < N; ++n) top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
        // A row that has seen no key yet has -inf, from which nothing can be subtracted.
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

template <int N>
__device__ __forceinline__ void multiply_rows(float (&o)[N][4], const float (&by)[2]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[n][j] *= by[j / 2];
}

// Divides by the softmax's total; a row that sees nothing becomes zeros.
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

// Weights of 16 rows and of keys 16 * k to 16 * k + 15, rounded to fp16, as the left operand of a product.
template <int N>
__device__ __forceinline__ void weights(unsigned (&a)[4], const float (&s)[N][4], int k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float (&piece)[4] = s[2 * k + j / 2];
        a[j] = pack(piece[j % 2 * 2], piece[j % 2 * 2 + 1]);
    }
}

// Eight queries from `column` on of one of the sequence's rows, or zeros.
template <int D>
__device__ __forceinline__ void copy_query(
    __half* target, const WorkTile& work, const PrefillParams& p, int row, int column) {
    const int token = row / work.group, head = blockIdx.x * work.group + row - token * work.group;
    const bool valid = row < work.rows;
    cp_async_16(target, valid ? p.q + (work.start + token) * p.q_pitch + head * D + column : p.q, valid);
}

// Eight outputs from `column` on of one of the sequence's rows, as far as the row has them.
__device__ __forceinline__ void write8(
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
