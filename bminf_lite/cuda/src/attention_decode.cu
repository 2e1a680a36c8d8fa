// Attention of one new token per sequence. The context is split over blocks, so that a long one fills the GPU even at
// batch 1. The blocks of a cluster put their parts together through each other's shared memory; where there are several
// clusters (or none, before Hopper), the last one to finish does the rest through global memory. Norm, rotation and the
// cache write of the new token happen here too.
#include "attention_decode.cuh"
#include "heads.cuh"

using namespace bminf;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int DIMS = 8;     // elements of a head that one lane holds
constexpr int STAGES = 3;

// What the new token sees: those before it and itself; the same, with a bias by the distance; or the whole source in its
// slot, to which it adds nothing.
enum Kind { CAUSAL = 0, BIASED = 1, SOURCE = 2 };
constexpr float LOG2_E = 1.4426950408889634f;

// Grid: (splits, kv_heads * ceil(group / GROUP), sequences) in clusters of CLUSTER splits. D: the head size rounded up to a
// power of two. qkv fp16 [B, pitch]. keys, values: [slots, kv_heads, capacity, head_pitch]. parts: fp32 [B, heads,
// splits / CLUSTER, CLUSTER, 2 + D / CLUSTER] and arrived: int32 [B, gridDim.y, CLUSTER], zero before and after; both are
// used only by several clusters. out: fp16 [B, out_pitch]. For BIASED, bias is fp32 [heads, 2 * reach + 1] by the distance
// key - query; for SOURCE, qkv holds queries only and lengths, int32 [slots], are those of the sources. Dynamic shared memory: keys and values of STAGES tiles.
template <int D, int GROUP, int CLUSTER, int KIND>
__global__ void __launch_bounds__(THREADS) attend(
    const __half* qkv, long long pitch, const float* q_gain, const float* k_gain, const float* frequencies, float eps,
    float rope_scale, const int* past, const int* slots, __half* keys, __half* values, float* parts, int* arrived,
    __half* out, long long out_pitch, int heads, int kv_heads, int head_dim, int head_pitch, int capacity, int window,
    float scale, const float* bias, int reach, const int* lengths)
{
    constexpr int LANES = D / DIMS;                     // lanes that share a token
    constexpr int AT_ONCE = WARP / LANES;               // tokens that a warp multiplies at once
    constexpr int PARTS = WARPS / GROUP;                // warps that share a head
    constexpr int TILE = D <= 128 ? 32 : 16;            // tokens brought to shared memory at once
    constexpr int ROUNDS = TILE / (PARTS * AT_ONCE);    // tokens of a tile that a lane sees
    constexpr int SLICE = D / CLUSTER;                  // elements of each head that a block puts together
    extern __shared__ __align__(16) char shared[];
    __half(*tile_keys)[TILE][D] = reinterpret_cast<__half(*)[TILE][D]>(shared);
    __half(*tile_values)[TILE][D] = tile_keys + STAGES;
    __shared__ __align__(16) float query[GROUP][D];
    __shared__ float warp_top[WARPS], warp_sum[WARPS], tops[GROUP], sums[GROUP];
    __shared__ __align__(16) float warp_out[WARPS][D], outs[GROUP][D];

    if constexpr (KIND != SOURCE) wait_for_predecessor();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, half = head_dim / 2;
    const int split = blockIdx.x, splits = gridDim.x, b = blockIdx.z;
    const int group = heads / kv_heads, groups = (group + GROUP - 1) / GROUP;
    const int kv = blockIdx.y / groups, first_head = kv * group + blockIdx.y % groups * GROUP;
    const int count = min(GROUP, (kv + 1) * group - first_head);
    const int position = KIND == SOURCE ? lengths[slots[b]] - 1 : min(past[b], capacity - 1);
    const int begin = window > 0 ? max(0, position + 1 - window) : 0;
    const int share = ((position + 1 - begin + splits - 1) / splits + 7) / 8 * 8;
    const int from = begin + split * share, to = min(position + 1, from + share);
    const size_t base = (static_cast<size_t>(slots[b]) * kv_heads + kv) * capacity * head_pitch;

    // Earlier tokens are in the cache already; the newest is put into its tile below.
    const int vectors = head_pitch / 8;
    auto bring = [&](int tile) {
        const int first = from + tile * TILE, stage = tile % STAGES;
        for (int i = threadIdx.x; i < TILE * vectors; i += THREADS) {
            const int row = i / vectors, column = i % vectors * 8, j = first + row;
            if (j >= to || (KIND != SOURCE && j == position)) continue;
            const size_t at = base + static_cast<size_t>(j) * head_pitch + column;
            copy16(&tile_keys[stage][row][column], keys + at);
            copy16(&tile_values[stage][row][column], values + at);
        }
        end_copy_group();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) bring(i);
    // Sources were stored before the step began, and self-attention, which waits before it lets anyone start, lies between.
    if constexpr (KIND == SOURCE) wait_for_predecessor();

    const Projection source = {qkv, nullptr, nullptr, nullptr, pitch};
    const Preparation how = {q_gain, k_gain, frequencies, eps, rope_scale};
    const bool newest = KIND != SOURCE && from <= position && position < to;
    const int newest_tile = (position - from) / TILE, newest_row = (position - from) % TILE;
    float new_low[PAIRS] = {}, new_high[PAIRS] = {};  // of a query, or of the new key or value in the two warps after
    if (warp < (KIND == SOURCE ? count : count + 2)) {
        float cosine[PAIRS], sine[PAIRS];
        angles(how, position, head_dim, cosine, sine);
        const int column = (warp < count ? first_head + warp : heads + (warp - count) * kv_heads + kv) * head_dim;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = i * WARP + lane;
            if (pair >= half) continue;
            new_low[i] = source.at<false, Order::ROW>(b, column + pair);
            new_high[i] = source.at<false, Order::ROW>(b, column + half + pair);
        }
        if (warp <= count) prepare_head(new_low, new_high, how, warp < count ? q_gain : k_gain, head_dim, cosine, sine);
        if (warp < count) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const int pair = i * WARP + lane;
                if (pair >= half) continue;
                query[warp][pair] = rounded(new_low[i]) * (scale * LOG2_E);
                query[warp][half + pair] = rounded(new_high[i]) * (scale * LOG2_E);
            }
            for (int d = head_dim + lane; d < D; d += WARP) query[warp][d] = 0;
        } else if (newest) {
            __half* cached = (warp == count ? keys : values) + base + static_cast<size_t>(position) * head_pitch;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const int pair = i * WARP + lane;
                if (pair >= half) continue;
                cached[pair] = __float2half_rn(new_low[i]);
                cached[half + pair] = __float2half_rn(new_high[i]);
            }
            if (lane < head_pitch - head_dim) cached[head_dim + lane] = __float2half_rn(0.0f);
        }
    }
    __syncthreads();

    const int head = warp / PARTS, part = warp % PARTS, sub = lane / LANES, dim = lane % LANES * DIMS;
    const bool inside = dim < head_pitch && head < count;
    float q[DIMS], o[DIMS] = {}, top = -INF_F, sum = 0;
#pragma unroll
    for (int i = 0; i < DIMS; ++i) q[i] = head < count ? query[head][dim + i] : 0.0f;
    const float* head_bias = bias + static_cast<long long>(first_head + head) * (2 * reach + 1) + reach;  // by distance
    const int tiles = to > from ? (to - from + TILE - 1) / TILE : 0;
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % STAGES;
        bring(tile + STAGES - 1);
        float added[ROUNDS] = {};
        if constexpr (KIND == BIASED) {
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const int key = from + tile * TILE + (r * PARTS + part) * AT_ONCE + sub;
                if (head < count) added[r] = head_bias[max(-reach, min(0, key - position))] * LOG2_E;
            }
        }
        wait_for_older_copies<STAGES - 1>();
        if (newest && tile == newest_tile && (warp == count || warp == count + 1)) {
            __half* row = warp == count ? tile_keys[stage][newest_row] : tile_values[stage][newest_row];
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const int pair = i * WARP + lane;
                if (pair >= half) continue;
                row[pair] = __float2half_rn(new_low[i]);
                row[half + pair] = __float2half_rn(new_high[i]);
            }
            if (lane < head_pitch - head_dim) row[head_dim + lane] = __float2half_rn(0.0f);
        }
        __syncthreads();
        const int present = min(TILE, to - from - tile * TILE);
        float score[ROUNDS], tile_top = -INF_F;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int row = (r * PARTS + part) * AT_ONCE + sub;
            float k[8];
            score[r] = 0;
            if (inside) {
                load8(&tile_keys[stage][row][dim], k);
#pragma unroll
                for (int i = 0; i < DIMS; ++i) score[r] = fmaf(q[i], k[i], score[r]);
            }
#pragma unroll
            for (int d = 1; d < LANES; d *= 2) score[r] += __shfl_xor_sync(FULL, score[r], d);
            if constexpr (KIND == BIASED) score[r] += added[r];
            if (row >= present) score[r] = -INF_F;
            tile_top = fmaxf(tile_top, score[r]);  // a NaN gets into the sum below
        }
        if (tile_top > top) {
            const float old = weight_of(top, tile_top);
            sum *= old, top = tile_top;
#pragma unroll
            for (int i = 0; i < DIMS; ++i) o[i] *= old;
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int row = (r * PARTS + part) * AT_ONCE + sub;
            if (row >= present || !inside) continue;
            float v[8];
            load8(&tile_values[stage][row][dim], v);
            const float p = exp2f(score[r] - top);
            sum += p;
#pragma unroll
            for (int i = 0; i < DIMS; ++i) o[i] = fmaf(p, v[i], o[i]);
        }
        __syncthreads();
    }

    // Not earlier: this kernel has fewer blocks than the GPU has multiprocessors, and those of the next, which are to be one
    // per multiprocessor, would crowd where it is not.
    let_successor_start();

    // The lanes of a warp, the warps of a head, the blocks of a cluster.
#pragma unroll
    for (int d = LANES; d < WARP; d *= 2) {
        const float other_top = __shfl_xor_sync(FULL, top, d), other_sum = __shfl_xor_sync(FULL, sum, d);
        const float new_top = fmaxf(top, other_top), mine = weight_of(top, new_top), theirs = weight_of(other_top, new_top);
        sum = sum * mine + other_sum * theirs, top = new_top;
#pragma unroll
        for (int i = 0; i < DIMS; ++i) o[i] = o[i] * mine + __shfl_xor_sync(FULL, o[i], d) * theirs;
    }
    if (lane == 0) warp_top[warp] = top, warp_sum[warp] = sum;
    if (sub == 0) store8(&warp_out[warp][dim], o);
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * D; i += THREADS) {
        const int h = i / D, d = i % D;
        float t = -INF_F, s = 0, value = 0;
#pragma unroll
        for (int w = h * PARTS; w < (h + 1) * PARTS; ++w) t = fmaxf(t, warp_top[w]);
#pragma unroll
        for (int w = h * PARTS; w < (h + 1) * PARTS; ++w) {
            const float weight = weight_of(warp_top[w], t);
            s += warp_sum[w] * weight, value += warp_out[w][d] * weight;
        }
        outs[h][d] = value;
        if (d == 0) tops[h] = t, sums[h] = s;
    }
    const Meeting meeting = {parts, arrived, out, out_pitch, heads, head_dim, first_head, count};
    put_together<D, CLUSTER, THREADS>(meeting, outs, tops, sums);
}
