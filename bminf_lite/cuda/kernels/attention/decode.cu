// Decode attention: one new token per sequence, on the tensor cores (mma.sync), split over the context (split-KV, as in
// Flash-Decoding).
//
//     out[b, h] = softmax(scale * q[b, h] @ keys.T + bias) @ values,  q, new key = rope(norm(...)) of the projection
//
// qkv: the fused projection fp16 [B, pitch], queries only for CROSS. keys, values: CACHE [slots, kv_heads, capacity,
// head_pitch], __half or int8; for int8 key_scales, value_scales: fp16 [slots, kv_heads, capacity]. out: fp16 [B,
// out_pitch]. The new token's key and value are prepared here and written to the cache.
//
// The grid is (splits, kv_heads * ceil(group / HEADS), B) in clusters of CLUSTER splits: splitting the context fills
// the GPU even at batch 1. A block has up to HEADS query heads that share a key-value head. Its warps take tiles of its
// part of the context in turn and keep an online softmax each; they combine their results at the end, then the blocks
// do (decode.cuh). Each warp has its own pipeline of tiles in shared memory, filled by cp.async, so that no barrier of
// the block is needed and loads in flight take no registers.
//
// Weights enter the product with the values as two fp16 numbers, the rounded weight and its rounding error, so the
// result is as exact as with weights in fp32.
#include "attention/decode.cuh"
#include "attention/tiles.cuh"
#include "common/values.cuh"

using namespace bminf;

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int STAGES = 2;  // tiles of a warp in shared memory
// With an int8 cache the codes enter the products unscaled; the scales multiply the scores and the weights instead. The
// weights are multiplied by this too, so that small ones do not underflow in fp16; a scale is at most 515.5.
constexpr float VALUE_SCALE_FACTOR = 64;

// The shape of a block for heads of D elements. Tiles take at most 64 KiB, and on 9.0 registers are limited (SHARES),
// so that blocks of the kernels before and after fit on the same SM. Before 8.0 a block has 64 KiB of shared memory in
// all.
template <int D>
struct Block {
    static constexpr bool SHARES = D <= 128 && __CUDA_ARCH__ == 900;
#if __CUDA_ARCH__ >= 800
    static constexpr int WARPS = D <= 128 ? 8 : 4;
#else
    static constexpr int WARPS = D <= 128 ? 4 : 2;
#endif
    static constexpr int THREADS = WARPS * WARP;
};

// The heads of one block: `count` query heads from first_head on, which share the key-value head kv.
struct HeadRange {
    int first_head, count, heads, kv, kv_heads, head_dim, head_pitch;
};

// The new token's queries, and its key and value (kv[0], kv[1]) as the cache stores them.
template <int D, class CACHE>
struct NewToken {
    alignas(16) __half query[HEADS][D + 8];  // padded by 16 bytes against bank conflicts
    alignas(16) CACHE kv[2][D];
    __half scales[2];
};

// Fills `new_token`, one warp a head at a time. The key and the value only if this block's part of the context has the
// new token (`newest`); then they are written to the cache too.
template <int D, class CACHE, int PAIRS>
__device__ __forceinline__ void prepare_new_token(
    const Values& source, const HeadParams& params, const HeadRange& at, const float (&cosine)[PAIRS],
    const float (&sine)[PAIRS], NewToken<D, CACHE>& new_token, bool newest, CACHE* key, CACHE* value, __half* key_scale,
    __half* value_scale) {
    const int lane = threadIdx.x % WARP, half = at.head_dim / 2, tasks = newest ? at.count + 2 : at.count;
    const auto fetch = [&](int task, float (&low)[PAIRS], float (&high)[PAIRS]) {
        const int head = task < at.count ? at.first_head + task : at.heads + (task - at.count) * at.kv_heads + at.kv;
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const int pair = p * WARP + lane, column = head * at.head_dim + pair;
            const bool inside = task < tasks && pair < half;
            low[p] = inside ? source.at<false, Order::ROW>(blockIdx.z, column) : 0.0f;
            high[p] = inside ? source.at<false, Order::ROW>(blockIdx.z, column + half) : 0.0f;
        }
    };
    float low[PAIRS], high[PAIRS], next_low[PAIRS], next_high[PAIRS];
    fetch(threadIdx.x / WARP, low, high);
#pragma unroll 1
    for (int task = threadIdx.x / WARP; task < tasks; task += Block<D>::WARPS) {
        fetch(task + Block<D>::WARPS, next_low, next_high);
        const int which = task - at.count;  // 0 the key, 1 the value
        CACHE* const cached = which == 0 ? key : value;
        if (which <= 0)
            norm_and_rope(
                low, high, params, which < 0 ? params.q_norm_weight : params.k_norm_weight, at.head_dim, cosine, sine);
        if (IS_INT8<CACHE> && which >= 0) {
            if constexpr (IS_INT8<CACHE>) {
                const __half scale = quantize_head(cached, new_token.kv[which], low, high, at.head_dim, at.head_pitch);
                if (lane == 0) *(which == 0 ? key_scale : value_scale) = new_token.scales[which] = scale;
            }
        } else {
            __half* const near = which < 0 ? new_token.query[task] : reinterpret_cast<__half*>(new_token.kv[which]);
            __half* const far = which < 0 ? nullptr : reinterpret_cast<__half*>(cached);
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
                const int pair = p * WARP + lane;
                if (pair >= half) continue;
                near[pair] = __float2half_rn(low[p]), near[half + pair] = __float2half_rn(high[p]);
                if (far) far[pair] = near[pair], far[half + pair] = near[half + pair];
            }
#pragma unroll 1
            for (int d = at.head_dim + lane; d < D; d += WARP) {
                near[d] = __float2half_rn(0.0f);
                if (far && d < at.head_pitch) far[d] = near[d];
            }
        }
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) low[p] = next_low[p], high[p] = next_high[p];
    }
}

// D: head_dim rounded up to a power of two. context_lens: int32 [B], the new token's positions. lengths: int32 [slots],
// the lengths of the sources, for CROSS. bias: fp32 [heads, 2 * max_distance + 1] by the distance key - query, for
// BIASED. window: the number of tokens that are seen, 0 for all. partials, arrival_counts: see CombineParams. Dynamic
// shared memory: STAGES tiles for each warp.
template <int D, int CLUSTER, int KIND, class CACHE>
__global__ void __launch_bounds__(Block<D>::THREADS, Block<D>::SHARES ? 2 : 1) attention_decode(
    const __half* qkv, long long pitch, const float* q_norm_weight, const float* k_norm_weight,
    const float* frequencies, float eps, float rope_scale, const int* context_lens, const int* slots, CACHE* keys,
    CACHE* values, float* partials, int* arrival_counts, __half* out, long long out_pitch, int heads, int kv_heads,
    int head_dim, int head_pitch, int capacity, int window, float scale, const float* bias, int max_distance,
    const int* lengths, __half* key_scales, __half* value_scales) {
    using Tiles = Tile<D, CACHE>;
    constexpr int TOKENS = Tiles::TOKENS, WARPS = Block<D>::WARPS, THREADS = Block<D>::THREADS, STEP = WARPS * TOKENS;
    extern __shared__ __align__(128) char shared[];
    __shared__ NewToken<D, CACHE> new_token;
    __shared__ ClusterPartials<D, CLUSTER> partial_results;
    __shared__ float warp_top[WARPS][HEADS], warp_sum[WARPS][HEADS];

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = lane / 4, head = lane % 4 * 2;
    const int split = blockIdx.x, splits = gridDim.x, b = blockIdx.z;
    const int group = heads / kv_heads, groups = (group + HEADS - 1) / HEADS;
    const int kv = blockIdx.y / groups, first_head = kv * group + blockIdx.y % groups * HEADS;
    const int count = min(HEADS, (kv + 1) * group - first_head);
    const int position = KIND == CROSS ? lengths[slots[b]] - 1 : min(context_lens[b], capacity - 1);
    const int begin = window > 0 ? max(0, position + 1 - window) : 0;
    const int split_len = ((position + 1 - begin + splits - 1) / splits + TOKENS - 1) / TOKENS * TOKENS;
    const int from = begin + split * split_len, to = min(position + 1, from + split_len);
    const bool newest = KIND != CROSS && from <= position && position < to;
    const int stop = newest ? position : to;  // the end of the tokens that are in the cache already
    const size_t tokens = (static_cast<size_t>(slots[b]) * kv_heads + kv) * capacity, base = tokens * head_pitch;

    // The loads of the first tiles start before the kernel waits for the projection. That is allowed because it is
    // launched as dependent only if no earlier kernel of the step wrote to this cache.
    cluster_arrive_relaxed<CLUSTER>();
    // A circular buffer of tiles: keys, values, keys and so on. `next` is the oldest.
    const unsigned stages = cast_smem_ptr_to_uint(shared) + warp * STAGES * Tiles::BYTES;
    unsigned next = stages;
    int first = from + warp * TOKENS;
    // Loads tile `number` from the warp's present position on: even numbers are keys, odd ones values.
    const auto load_tile = [&](unsigned tile, int number) {
        const int at = first + number / 2 * STEP;
        const CACHE* const source = (number % 2 ? values : keys) + base + static_cast<size_t>(at) * head_pitch;
        if (at < to) Tiles::load_async(tile, source, head_pitch, stop - at);
        cp_async_commit_group();
    };
    __half scales[2] = {};  // int8: of the key and the value of the tile's token `lane`
    // Loads the scales of the tile at `at`, and prefetches those two tiles later, because scales are needed before
    // tiles.
    const auto load_scales = [&](int at) {
        if constexpr (IS_INT8<CACHE>) {
            const bool here = at + lane < stop;
            scales[0] = here ? key_scales[tokens + at + lane] : __half{};
            scales[1] = here ? value_scales[tokens + at + lane] : __half{};
            const __half* const later = (lane ? value_scales : key_scales) + tokens + at + 2 * STEP;
            if (lane < 2 && at + 2 * STEP < stop) prefetch_l2(later);
        }
    };
#pragma unroll
    for (int i = 0; i < STAGES; ++i) load_tile(stages + i * Tiles::BYTES, i);
    load_scales(first);
    const HeadParams params = {q_norm_weight, k_norm_weight, frequencies, eps, rope_scale};
    float cosine[D / 64], sine[D / 64];
    rope_angles(params, position, head_dim, cosine, sine);
    wait_on_dependent_grids();
    launch_dependent_grids();
    const HeadRange at = {first_head, count, heads, kv, kv_heads, head_dim, head_pitch};
    const size_t token = tokens + position, new_offset = token * head_pitch;
    prepare_new_token<D, CACHE>(
        {qkv, nullptr, nullptr, nullptr, pitch}, params, at, cosine, sine, new_token, newest, keys + new_offset,
        values + new_offset, key_scales + token, value_scales + token);
    __syncthreads();

    // Waits for the oldest tile.
    const auto wait_tile = [&] {
        const unsigned tile = next;
        next = next == stages + (STAGES - 1) * Tiles::BYTES ? stages : next + Tiles::BYTES;
        cp_async_wait_group<STAGES - 1>();
        __syncwarp();
        return tile;
    };
    float o[D / 16][4] = {}, top[2] = {-INF_F, -INF_F}, sum[2] = {};
#pragma unroll 1
    for (; first < to; first += STEP) {
        const int new_row = newest ? position - first : TOKENS;
        float s[TOKENS / 16][4], tile_top[2] = {-INF_F, -INF_F};
        const unsigned key_tile = wait_tile();
        if (new_row < TOKENS) Tiles::store_token(key_tile, new_row, new_token.kv[0]);
        Tiles::mma_qk(key_tile, new_token.query, s);
        __syncwarp();
        load_tile(key_tile, STAGES);
        if (new_row == lane) scales[0] = new_token.scales[0], scales[1] = new_token.scales[1];
        const float key_scale = __half2float(scales[0]), value_scale = __half2float(scales[1]) * VALUE_SCALE_FACTOR;
        load_scales(first + STEP);
#pragma unroll
        for (int j = 0; j < TOKENS / 16; ++j)
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const int index = 16 * j + row + m / 2 * 8, token = first + index;
                s[j][m] *= scale * LOG2_E;
                if (IS_INT8<CACHE>) s[j][m] *= __shfl_sync(FULL, key_scale, index);
                if (KIND == BIASED && head + m % 2 < count) {
                    const int distance = max(-max_distance, min(0, token - position));
                    s[j][m] +=
                        bias[(first_head + head + m % 2) * (2ll * max_distance + 1) + max_distance + distance] * LOG2_E;
                }
                if (token >= to) s[j][m] = -INF_F;
                tile_top[m % 2] = fmaxf(tile_top[m % 2], s[j][m]);  // fmaxf drops a NaN, but it reaches the sum below
            }
#pragma unroll
        for (int d = 4; d < WARP; d *= 2)
#pragma unroll
            for (int h = 0; h < 2; ++h) tile_top[h] = fmaxf(tile_top[h], __shfl_xor_sync(FULL, tile_top[h], d));
        if (tile_top[0] > top[0] || tile_top[1] > top[1]) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float new_top = fmaxf(top[h], tile_top[h]), old = rescale_factor(top[h], new_top);
                sum[h] *= old, top[h] = new_top;
#pragma unroll
                for (int n = 0; n < D / 16; ++n) o[n][h] *= old, o[n][h + 2] *= old;
            }
        }
        unsigned weights[TOKENS / 16][2][2];
#pragma unroll
        for (int j = 0; j < TOKENS / 16; ++j)
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                float w[2], error[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    w[h] = exp2_fast(s[j][2 * m + h] - (top[h] == -INF_F ? 0.0f : top[h])), sum[h] += w[h];
                    if (IS_INT8<CACHE>) w[h] *= __shfl_sync(FULL, value_scale, 16 * j + row + 8 * m);
                    error[h] = w[h] - rounded(w[h]);
                }
                weights[j][0][m] = movmatrix_trans(pack_half2(w[0], w[1])),
                weights[j][1][m] = movmatrix_trans(pack_half2(error[0], error[1]));
            }
        const unsigned value_tile = wait_tile();
        if (new_row < TOKENS) Tiles::store_token(value_tile, new_row, new_token.kv[1]);
        Tiles::mma_pv(value_tile, weights, o);
        __syncwarp();
        load_tile(value_tile, STAGES + 1);
    }

    // Combine the lanes of each head, then the warps of the block, then the blocks.
#pragma unroll
    for (int d = 4; d < WARP; d *= 2)
#pragma unroll
        for (int h = 0; h < 2; ++h) sum[h] += __shfl_xor_sync(FULL, sum[h], d);
    // The outputs of a warp overlay its tiles.
    constexpr int WARP_FLOATS = STAGES * Tiles::BYTES / sizeof(float), ROW = D + 4;
    static_assert(HEADS * ROW <= WARP_FLOATS, "the outputs of a warp fit into its tiles");
    constexpr float inverse_factor = IS_INT8<CACHE> ? 1 / VALUE_SCALE_FACTOR : 1;
    float* const warp_out = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (row == 0) warp_top[warp][head + h] = top[h], warp_sum[warp][head + h] = sum[h];
#pragma unroll
        for (int n = 0; n < D / 16; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                warp_out[warp * WARP_FLOATS + (head + h) * ROW + Tiles::element_of(n, i)] =
                    o[n][h + 2 * i] * inverse_factor;
    }
    __syncthreads();
    cluster_wait<CLUSTER>();
#pragma unroll 1
    for (int i = threadIdx.x * 4; i < count * D; i += THREADS * 4) {
        const int h = i / D, d = i % D;
        float t = -INF_F, total = 0, value[4] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) t = fmaxf(t, warp_top[w][h]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = rescale_factor(warp_top[w][h], t);
            const float4 part = *reinterpret_cast<const float4*>(&warp_out[w * WARP_FLOATS + h * ROW + d]);
            total += warp_sum[w][h] * weight;
            value[0] += part.x * weight, value[1] += part.y * weight, value[2] += part.z * weight,
                value[3] += part.w * weight;
        }
        partial_results.send_partial(split % CLUSTER, h, d, value, t, total);
    }
    combine_splits<THREADS>(
        {partials, arrival_counts, out, out_pitch, heads, head_dim, first_head, count}, partial_results);
}
