// Attention of one new token per sequence. The context is split over blocks, so that a long one fills the GPU even at
// batch 1; the last block to finish puts the parts together. Norm, rotation and the cache write of the new token happen
// here too.
#include "heads.cuh"

using namespace bminf;

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int DIMS = 16;   // elements of a head that one lane holds
constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ void load16(const __half* p, float (&x)[DIMS]) {
    float a[8], b[8];
    load8(p, a), load8(p + 8, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = a[i], x[8 + i] = b[i];
}

// A running softmax over the tokens that a lane has seen: largest score, sum of weights, weighted values.
struct Running {
    float top, sum, out[DIMS];

    __device__ __forceinline__ void merge(float other_top, float other_sum, const float (&other)[DIMS]) {
        const float new_top = fmaxf(top, other_top);
        const float mine = top == -INF_F ? 0.0f : exp2f(top - new_top);
        const float theirs = other_top == -INF_F ? 0.0f : exp2f(other_top - new_top);
        sum = sum * mine + other_sum * theirs;
#pragma unroll
        for (int i = 0; i < DIMS; ++i) out[i] = out[i] * mine + other[i] * theirs;
        top = new_top;
    }
};

// Grid: (splits, kv_heads * ceil(group / GROUP), sequences). D: the head size rounded up to a power of two that a whole
// number of lanes covers. qkv fp16 [B, pitch]. keys, values: [slots, kv_heads, capacity, head_pitch]. parts: fp32
// [B, heads, splits, head_pitch + 2] and arrived: int32 [B, gridDim.y], zero before and after. out: fp16 [B, out_pitch].
template <int D, int GROUP>
__global__ void __launch_bounds__(THREADS) attend(
    const __half* qkv, long long pitch, const float* q_gain, const float* k_gain, const float* frequencies, float eps,
    float rope_scale, const int* past, const int* slots, __half* keys, __half* values, float* parts, int* arrived,
    __half* out, long long out_pitch, int heads, int kv_heads, int head_dim, int head_pitch, int capacity, int window,
    float scale)
{
    constexpr int LANES = D / DIMS;         // lanes that share a token
    constexpr int AT_ONCE = WARP / LANES;   // tokens that a warp reads at once
    __shared__ __align__(16) float query[GROUP][D];
    __shared__ float tops[WARPS][GROUP], sums[WARPS][GROUP];
    __shared__ __align__(16) float outs[WARPS][GROUP][D];
    __shared__ bool is_last;

    let_successor_start();
    wait_for_predecessor();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, half = head_dim / 2;
    const int split = blockIdx.x, splits = gridDim.x, b = blockIdx.z;
    const int group = heads / kv_heads, groups = (group + GROUP - 1) / GROUP;
    const int kv = blockIdx.y / groups, first_head = kv * group + blockIdx.y % groups * GROUP;
    const int count = min(GROUP, (kv + 1) * group - first_head);
    const int position = min(past[b], capacity - 1);
    const int begin = window > 0 ? max(0, position + 1 - window) : 0;
    const int share = (position + 1 - begin + splits - 1) / splits;
    const int from = begin + split * share, to = min(position + 1, from + share);
    const size_t base = (static_cast<size_t>(slots[b]) * kv_heads + kv) * capacity * head_pitch;

    // The group's queries, and in the block that owns the newest position its key and value.
    const Projection source = {qkv, nullptr, nullptr, nullptr, pitch};
    const Preparation how = {q_gain, k_gain, frequencies, eps, rope_scale};
    const bool newest = from <= position && position < to;
    float cosine[PAIRS], sine[PAIRS];
    angles(how, position, head_dim, cosine, sine);
    for (int i = threadIdx.x; i < GROUP * D; i += THREADS) query[i / D][i % D] = 0;
    __syncthreads();
    for (int h = warp; h < count + (newest ? 2 : 0); h += WARPS) {
        const int column = (h < count ? first_head + h : heads + (h - count) * kv_heads + kv) * head_dim;
        float low[PAIRS] = {}, high[PAIRS] = {};
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = i * WARP + lane;
            if (pair >= half) continue;
            low[i] = source.at<false, Order::ROW>(b, column + pair);
            high[i] = source.at<false, Order::ROW>(b, column + half + pair);
        }
        if (h <= count) prepare_head(low, high, how, h < count ? q_gain : k_gain, head_dim, cosine, sine);
        __half* cached = (h == count ? keys : values) + base + static_cast<size_t>(position) * head_pitch;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = i * WARP + lane;
            if (pair >= half) continue;
            if (h < count) {
                query[h][pair] = rounded(low[i]) * (scale * LOG2_E);
                query[h][half + pair] = rounded(high[i]) * (scale * LOG2_E);
            } else {
                cached[pair] = __float2half_rn(low[i]);
                cached[half + pair] = __float2half_rn(high[i]);
            }
        }
        if (h >= count && lane < head_pitch - head_dim) cached[head_dim + lane] = __float2half_rn(0.0f);
    }
    __syncthreads();

    const int part = lane % LANES, dim = part * DIMS;
    const bool inside = dim < head_pitch;
    float q[GROUP][DIMS];
    Running state[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        state[g].top = -INF_F, state[g].sum = 0;
#pragma unroll
        for (int i = 0; i < DIMS; ++i) q[g][i] = query[g][dim + i], state[g].out[i] = 0;
    }
    for (int j = from + warp * AT_ONCE + lane / LANES; j - lane / LANES < to; j += WARPS * AT_ONCE) {
        float k[DIMS] = {}, v[DIMS] = {};
        if (j < to && inside) {
            load16(keys + base + static_cast<size_t>(j) * head_pitch + dim, k);
            load16(values + base + static_cast<size_t>(j) * head_pitch + dim, v);
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            float score = 0;
#pragma unroll
            for (int i = 0; i < DIMS; ++i) score = fmaf(q[g][i], k[i], score);
#pragma unroll
            for (int d = 1; d < LANES; d *= 2) score += __shfl_xor_sync(FULL, score, d);
            if (j < to) state[g].merge(score, 1.0f, v);
        }
    }

    // Put the warp's tokens together, then the block's.
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
#pragma unroll
        for (int d = LANES; d < WARP; d *= 2) {
            float other[DIMS];
            const float top = __shfl_xor_sync(FULL, state[g].top, d), sum = __shfl_xor_sync(FULL, state[g].sum, d);
#pragma unroll
            for (int i = 0; i < DIMS; ++i) other[i] = __shfl_xor_sync(FULL, state[g].out[i], d);
            state[g].merge(top, sum, other);
        }
        if (lane < LANES) {
            tops[warp][g] = state[g].top, sums[warp][g] = state[g].sum;
#pragma unroll
            for (int i = 0; i < DIMS; ++i) outs[warp][g][dim + i] = state[g].out[i];
        }
    }
    __syncthreads();
    const size_t stride = head_pitch + 2;
    for (int i = threadIdx.x; i < count * head_pitch; i += THREADS) {
        const int g = i / head_pitch, d = i % head_pitch;
        float top = -INF_F, sum = 0, value = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w][g]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = tops[w][g] == -INF_F ? 0.0f : exp2f(tops[w][g] - top);
            sum += sums[w][g] * weight, value += outs[w][g][d] * weight;
        }
        const size_t head = static_cast<size_t>(b) * heads + first_head + g;
        if (splits == 1) {
            if (d < head_dim) out[b * out_pitch + (first_head + g) * head_dim + d] = __float2half_rn(__fdiv_rn(value, sum));
        } else {
            float* place = parts + (head * splits + split) * stride;
            place[2 + d] = value;
            if (d == 0) place[0] = top, place[1] = sum;
        }
    }
    if (splits == 1) return;

    // The last block of this group of heads reads all parts, in order.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int* counter = arrived + b * gridDim.y + blockIdx.y;
        is_last = atomicAdd(counter, 1) == splits - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = threadIdx.x; i < count * head_dim; i += THREADS) {
        const int g = i / head_dim, d = i % head_dim;
        const float* place = parts + (static_cast<size_t>(b) * heads + first_head + g) * splits * stride;
        float top = -INF_F, sum = 0, value = 0;
#pragma unroll 8
        for (int s = 0; s < splits; ++s) top = fmaxf(top, __ldcg(place + s * stride));
#pragma unroll 8
        for (int s = 0; s < splits; ++s) {
            const float t = __ldcg(place + s * stride), weight = t == -INF_F ? 0.0f : exp2f(t - top);
            sum += __ldcg(place + s * stride + 1) * weight, value += __ldcg(place + s * stride + 2 + d) * weight;
        }
        out[b * out_pitch + (first_head + g) * head_dim + d] = __float2half_rn(__fdiv_rn(value, sum));
    }
}
